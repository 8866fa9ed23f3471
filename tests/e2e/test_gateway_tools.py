"""A forced tool call through the gateway, answered by the embedded engine's own server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop

from gateway_fakes import CHAT, served
from outrider.engine import FixedBudget
from outrider.rollout.config import make_rollout
from outrider.serve.gateway.engines import embedded_config
from outrider.serve.service import Service
from outrider.testing.asgi import parse_events
from outrider.testing.serving import FakeModel


def tool(name: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"x": {"type": "boolean"}},
        "required": ["x"],
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("first"), tool("second")]
NAMED = {"type": "function", "function": {"name": "second"}}


def call_of(data: bytes, *, stream: bool) -> tuple[str, str, str]:
    """Name, arguments and finish reason of an answer's only call."""
    if not stream:
        choice = json.loads(data)["choices"][0]
        [call] = choice["message"]["tool_calls"]
        return call["function"]["name"], call["function"]["arguments"], choice["finish_reason"]
    *events, end = parse_events(data)
    assert end == "[DONE]"
    choices = [choice for event in events for choice in event["choices"]]
    parts = [part for choice in choices for part in choice["delta"].get("tool_calls", ())]
    assert {part["index"] for part in parts} == {0}
    name = "".join(part["function"].get("name", "") for part in parts)
    arguments = "".join(part["function"].get("arguments", "") for part in parts)
    return name, arguments, str(choices[-1]["finish_reason"])


@pytest.mark.parametrize("share", ["100%", "0%"], ids=["speculative", "baseline"])
def test_a_forced_tool_call_reaches_the_embedded_engine(tmp_path: Path, share: str) -> None:
    fast = {"speculative": True, "method": "suffix", "rollout": share}
    values = {
        "target": "fake", "profiles": {"fast": fast}, "state": str(tmp_path / "state"),
        "port": 0, "admin_port": 0,
    }  # fmt: skip
    rollout = make_rollout(values)
    server = embedded_config(rollout, {"engine": {"slots": 4, "context": 1024}})
    assert server is not None
    embedded = Service(server, FakeModel(), budget=FixedBudget(nodes=8, depth=6))

    async def test() -> None:
        async with served(rollout, embedded) as (api, _), aiohttp.ClientSession() as session:
            for choice, names in (("required", {"first", "second"}), (NAMED, {"second"})):
                found = set()
                for stream in (False, True):
                    body = {
                        "model": "fake", "messages": [{"role": "user", "content": "call it"}],
                        "max_tokens": 80, "seed": 3, "tools": TOOLS, "tool_choice": choice,
                        "stream": stream,
                    }  # fmt: skip
                    async with session.post(api + CHAT, json=body) as response:
                        data = await response.read()
                        assert response.status == 200, data
                        served_by = "fast" if share == "100%" else "baseline"
                        assert response.headers["x-outrider-profile"] == served_by
                    found.add(call_of(data, stream=stream))
                [(name, arguments, finish)] = found  # a stream says what a whole answer says
                assert name in names and finish == "tool_calls"
                assert isinstance(json.loads(arguments)["x"], bool)

    uvloop.run(test())
