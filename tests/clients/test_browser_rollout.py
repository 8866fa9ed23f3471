"""The operators' page at /ui/rollout in headless Chromium: what it shows, and the switch."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from test_browser import BROWSER, Browser, browser

from gateway_fakes import served
from outrider.engine import FixedBudget
from outrider.rollout.config import make_rollout
from outrider.serve.gateway.engines import embedded_config
from outrider.serve.service import Service
from outrider.testing.serving import FakeModel

pytestmark = pytest.mark.skipif(not BROWSER, reason="no Chromium here")
__all__ = ["browser"]  # the fixture


def drive(page: Browser, admin: str) -> None:
    heading = "document.querySelector('section[data-profile=fast] h2').textContent"
    page.open(f"{admin}/ui/rollout")
    page.until(f"{heading} === 'fast: canary at 5%'")
    assert page.run("document.querySelector('.bar i').style.width") == "5%"
    page.run("document.getElementById('why').value = 'a <b>reason</b>'")
    page.run("document.getElementById('kill').click()")
    page.until("document.querySelector('.alarm').textContent.includes('a <b>reason</b>')")
    page.run("document.getElementById('kill').click()")
    page.until("document.querySelector('.alarm') === null")
    page.run("document.querySelector('button[data-action=promote]').click()")
    page.until(f"{heading} === 'fast: promoted at 100%'")
    page.run("document.querySelector('button[data-action=rollback]').click()")
    page.until(f"{heading} === 'fast: rolled_back at 0%'")
    page.run("document.querySelector('button[data-action=promote]').click()")
    page.until("document.getElementById('told').textContent.includes('arm it')")
    rows = page.run("document.querySelectorAll('#history tr').length")
    assert rows == 6  # the head, start, kill, unkill, promote, rollback
    refused = [text for text in page.complaints if "409" not in text]
    assert refused == []


def test_the_page_shows_and_turns_the_rollout(browser: Browser, tmp_path: Path) -> None:
    fast = {"speculative": True, "method": "suffix", "rollout": "5%"}
    values = {"target": "fake", "profiles": {"fast": fast}, "state": str(tmp_path / "state")}
    rollout = make_rollout({**values, "ramp": {"steps": ["100%"]}, "port": 0, "admin_port": 0})
    server = embedded_config(rollout, {"engine": {"slots": 2, "context": 512}})
    assert server is not None
    embedded = Service(server, FakeModel(), budget=FixedBudget(nodes=8, depth=6))

    async def test() -> None:
        async with served(rollout, embedded) as (_, admin):
            await asyncio.to_thread(drive, browser, admin)

    asyncio.run(test())
