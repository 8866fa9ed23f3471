"""The commands of "From 0 % to 100 % and back" do what the page says."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import shlex
from pathlib import Path

import aiohttp
import yaml
from test_gateway_sockets import ask

from gateway_fakes import CHAT, served
from outrider.cli.main import run
from outrider.cli.session import Session
from outrider.engine import FixedBudget
from outrider.rollout.config import make_rollout
from outrider.serve.gateway.engines import embedded_config
from outrider.serve.service import Service
from outrider.testing.serving import FakeModel

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorials" / "from-0-to-100-and-back.md"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def commands() -> list[tuple[str, list[str]]]:
    """Each command with the lines that its output must hold."""
    found: list[tuple[str, list[str]]] = []
    for line in "".join(blocks("console")).replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line.strip())
    return found


def said(words: list[str]) -> str:
    """What a command line prints; it must succeed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert run(words, session=Session()) == 0, words
    return out.getvalue()


def test_the_page_runs(tmp_path: Path) -> None:
    values = yaml.safe_load(blocks("yaml")[0])
    values |= {"target": "fake", "state": str(tmp_path), "port": 0, "admin_port": 0}
    rollout = make_rollout(values)
    server = embedded_config(rollout, {"engine": {"slots": 2, "context": 512}})
    assert server is not None
    embedded = Service(server, FakeModel(), budget=FixedBudget(nodes=8, depth=6))

    async def test() -> int:
        ran = 0
        async with served(rollout, embedded) as (api, admin), aiohttp.ClientSession() as session:
            async with session.post(api + CHAT, json=ask()) as response:
                assert response.headers["x-outrider-profile"] in ("baseline", "lookup")
                assert response.headers["x-outrider-reason"]
            for command, lines in commands():
                words = shlex.split(command)
                if words[:2] != ["outrider", "rollout"]:
                    continue
                out = await asyncio.to_thread(said, [*words[1:], "--url", admin])
                for line in lines:
                    assert line in out, (command, out)
                ran += 1
        return ran

    assert asyncio.run(test()) == 9
