"""From a profile to the lane that serves it: attached to a running engine, started and supervised,
or the embedded engine, of which one serves all profiles that want it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol

from outrider.backends.base import EngineUnfit
from outrider.backends.connect import DIALECTS
from outrider.backends.launch import Launch, command_of
from outrider.backends.own import OWN
from outrider.backends.supervise import Patience, Supervisor
from outrider.errors import InvalidParameter
from outrider.rollout.config import BASELINE, Profile, RolloutConfig
from outrider.serve.config import ServerConfig, make_config
from outrider.serve.gateway.flow import Stage
from outrider.serve.gateway.lanes import Lane, probe_features
from outrider.serve.gateway.upstream import Application, AsgiUpstream, HttpUpstream

log = logging.getLogger(__name__)

BACKEND_KEY = "OUTRIDER_BACKEND_KEY"  # sent to every attached engine
Told = Callable[[str, str, str], None]  # profile, what happened, a line


class Embedded(Protocol):
    """The embedded engine's server, started."""

    @property
    def app(self) -> Application: ...

    async def stop(self) -> None: ...


def embedded_config(config: RolloutConfig, options: Mapping[str, object]) -> ServerConfig | None:
    """The configuration of the embedded engine's server; `None` where no profile wants it.

    Args:
        config: the rollout.
        options: of the command line, such as weights and the engine's slots.

    Raises:
        InvalidParameter: a profile asks for what the embedded engine has not.
    """
    wanted = {n: p for n, p in config.profiles.items() if runs_embedded(p)}
    if not wanted:
        return None
    engine = options.get("engine")
    values = {
        "target": config.target,
        "name": Stage(config, {}).model,
        "profiles": {
            name: {
                "drafter": embedded_drafter(profile),
                "max_depth": profile.num_speculative_tokens,
                "rule": "walk" if profile.rule == "exact" else profile.rule,
                "pad": profile.pad,
                "interval_ms": profile.interval_ms,
            }
            for name, profile in wanted.items()
            if name != BASELINE
        },
        "default_profile": BASELINE,
        **{name: value for name, value in options.items() if name != "engine"},
        "engine": engine if isinstance(engine, dict) else {},
    }
    return make_config(values, source="rollout")


def runs_embedded(profile: Profile) -> bool:
    return profile.backend.engine == "embedded" and profile.backend.url is None


def embedded_drafter(profile: Profile) -> str:
    """The drafter's spec, as on the command line: `eagle3:FOLDER`, or a word such as `suffix`."""
    method, drafter = profile.method, profile.drafter
    if not profile.speculative:
        return "none"
    if drafter is None:
        return method or "none"
    if method is None or drafter == method or drafter.startswith(f"{method}:"):
        return drafter
    if method != "draft_model" and (Path(drafter).expanduser() / "config.json").is_file():
        return drafter  # the folder says of which style its head is
    return f"{method}:{drafter}"


class Engines:
    """Makes lanes.

    Args:
        embedded: the embedded engine's server; `None` where no profile wants it.
        told: of what happens to supervised engines.
    """

    def __init__(
        self, *, embedded: Application | None, told: Told, patience: Patience | None = None
    ) -> None:
        self._embedded = embedded
        self._told = told
        self._patience = patience

    async def lanes(
        self, config: RolloutConfig, *, keep: Mapping[str, Lane] | None = None
    ) -> dict[str, Lane]:
        """A lane for every profile; those in ``keep`` are taken over where their engine can stay.

        Raises:
            EngineUnfit: the baseline's engine cannot be had; another one is unhealthy then.
        """
        found: dict[str, Lane] = {}
        try:
            for name, profile in config.profiles.items():
                old = (keep or {}).get(name)
                if old is not None and same_engine(old.profile, profile):
                    found[name] = old
                else:
                    found[name] = await self._lane(config, name, profile, replaces=old is not None)
        except BaseException:
            for name, lane in found.items():
                if lane is not (keep or {}).get(name):
                    await lane.close()
            raise
        return found

    async def _lane(
        self, config: RolloutConfig, name: str, profile: Profile, *, replaces: bool
    ) -> Lane:
        backend = profile.backend
        if runs_embedded(profile):
            if self._embedded is None or replaces:
                raise InvalidParameter(
                    f"profiles.{name}: the embedded engine is put together at the start; restart"
                )
            upstream = AsgiUpstream(self._embedded)
            headers = {"x-outrider-profile": name}
            return Lane(
                name,
                profile,
                upstream,
                "embedded",
                OWN.read,
                headers=headers,
                exact=not profile.approximate,
            )
        url, stop = backend.url, None
        if url is None:
            url, stop = await self._start(config, name, profile)
        kind = "outrider" if backend.engine == "embedded" else backend.engine
        dialect = DIALECTS[kind]
        lane = Lane(
            name,
            profile,
            HttpUpstream(
                url,
                api_key=os.environ.get(BACKEND_KEY),
                connect_s=profile.timeouts.connect_s,
            ),
            kind,
            dialect.read,
            model=backend.model or config.target,
            extra=dialect.extra_body,
            stop=stop,
        )
        if profile.speculative:
            lane.lacking = await probe_features(lane, model=config.target)
            if lane.lacking:
                log.info("profile %s does not take %s", name, ", ".join(sorted(lane.lacking)))
        return lane

    async def _start(
        self, config: RolloutConfig, name: str, profile: Profile
    ) -> tuple[str, Callable[[], Awaitable[None]] | None]:
        """Start an engine; of one that does not come up the address alone."""
        port = _free_port()
        root = f"http://127.0.0.1:{port}"
        launch = Launch(
            engine=profile.backend.engine,
            model=config.target,
            name=profile.backend.model or config.target,
            port=port,
            method=profile.method,
            drafter=profile.drafter,
            guesses=profile.num_speculative_tokens,
            args=profile.backend.args,
        )
        supervisor = Supervisor(
            command_of(launch),
            root,
            told=lambda what, line: self._told(name, what, line),
            patience=self._patience,
        )
        try:
            await supervisor.start()
        except EngineUnfit as fault:
            if name == BASELINE:
                raise
            log.warning("profile %s: %s", name, fault)
            return root, None
        return root, supervisor.stop


def same_engine(one: Profile, two: Profile) -> bool:
    """Can the engine stay while the profile changes?"""
    keys = ("backend", "method", "drafter", "num_speculative_tokens", "rule", "speculative")
    return all(getattr(one, key) == getattr(two, key) for key in (*keys, "pad", "interval_ms"))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


async def close_when_idle(lane: Lane, *, every_s: float = 0.2) -> None:
    """Let go of a lane that no new request gets, once what runs on it is over."""
    while lane.running:
        await asyncio.sleep(every_s)
    await lane.close()


def modified(path: Path) -> float:
    """When a file was last written; 0 where it is not there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
