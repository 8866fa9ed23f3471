"""A gateway in front of pretended engines, for tests: no sockets, no waiting, real decisions."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from outrider.backends.vllm import VLLM
from outrider.rollout.config import RolloutConfig, make_rollout
from outrider.rollout.ramp import GateResult
from outrider.serve.config import make_config
from outrider.serve.gateway.app import AdminApp, GatewayApp
from outrider.serve.gateway.gateway import Gateway
from outrider.serve.gateway.lanes import Lane
from outrider.serve.gateway.run import serve_rollout
from outrider.serve.gateway.upstream import AsgiUpstream
from outrider.serve.service import Service
from outrider.testing.asgi import AsgiClient, Response
from outrider.testing.engine import FakeEngine

CHAT = "/v1/chat/completions"
WAIT_S = 20
_Result = TypeVar("_Result")


def rollout(tmp_path: Path, **more: Any) -> dict[str, Any]:
    """A rollout of one speculative profile that takes everything, unless told otherwise."""
    spec = {"speculative": True, "method": "eagle3", "rollout": "100%", **more.pop("spec", {})}
    return {
        "target": "fake",
        "profiles": {"spec": spec, **more.pop("profiles", {})},
        "state": str(tmp_path / "state"),
        "ramp": {"automatic": False, "least_s": 0},
        **more,
    }


@dataclass
class World:
    """A gateway, its engines and clients of both its ports."""

    gateway: Gateway
    engines: dict[str, FakeEngine]
    client: AsgiClient
    admin: AsgiClient
    said: list[Any] = field(default_factory=list)

    async def ask(self, text: str = "hello", **more: Any) -> Response:
        headers = more.pop("headers", None)
        return await self.client.request("POST", CHAT, body(text, **more), headers=headers)

    async def order(self, action: str, **told: Any) -> Response:
        return await self.admin.request(
            "POST", f"/rollout/{action}", {"profile": "spec", "who": "me", "why": "test", **told}
        )

    def sample(self, name: str, **labels: str) -> float:
        return self.gateway.metrics.registry.get_sample_value(name, labels) or 0.0


def body(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {
        "model": "fake",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 6,
        "temperature": 0,
        **more,
    }


def lanes(config: RolloutConfig, engines: dict[str, FakeEngine], *, exact: bool) -> dict[str, Lane]:
    return {
        name: Lane(name, profile, AsgiUpstream(engines[name]), "vllm", VLLM.read, exact=exact)
        for name, profile in config.profiles.items()
    }


def with_gateway(
    values: dict[str, Any],
    test: Callable[[World], Awaitable[_Result]],
    *,
    exact: bool = True,
    settings: dict[str, Any] | None = None,
    loops: bool = False,
    source: Path | None = None,
    wall: Callable[[], float] = time.time,
) -> _Result:
    """Run an asynchronous test against a gateway; `loops` runs what it does by itself."""

    async def run() -> _Result:
        config = make_rollout(values)
        engines = {name: FakeEngine(name=name, drafted=3, accepted=1) for name in config.profiles}
        engines["baseline"].drafted = 0

        async def rebuild(config: RolloutConfig, old: Any) -> dict[str, Lane]:
            for name in config.profiles:
                engines.setdefault(name, FakeEngine(name=name))
            made = lanes(config, engines, exact=exact)
            return {name: old.get(name) or lane for name, lane in made.items()}

        gateway = Gateway(
            config,
            lanes(config, engines, exact=exact),
            gates=lambda profile: GateResult(True, "none asked for"),
            source=source,
            rebuild=rebuild if source is not None else None,
            wall=wall,
        )
        edge = make_config({"target": "fake", **(settings or {})})
        world = World(
            gateway,
            engines,
            AsgiClient(GatewayApp(gateway, edge)),
            AsgiClient(AdminApp(gateway, edge)),
        )
        if loops:
            await gateway.start()
        else:
            gateway.tick()
        try:
            async with asyncio.timeout(40):
                return await test(world)
        finally:
            await gateway.stop()

    return uvloop.run(run())


@contextlib.asynccontextmanager
async def served(rollout: RolloutConfig, embedded: Service | None) -> AsyncIterator[list[str]]:
    """The addresses of the clients' port and of the operators'."""
    addresses: list[str] = []
    task = asyncio.create_task(
        serve_rollout(
            rollout, source=None, embedded=embedded, listening=addresses.append, signals=False
        )
    )
    try:
        async with asyncio.timeout(WAIT_S):
            while len(addresses) < 2 and not task.done():
                await asyncio.sleep(0.01)
        if task.done():
            task.result()
        yield addresses
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
