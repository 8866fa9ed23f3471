"""From a rollout's file to a gateway that listens: engines first, then the ports."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from outrider.rollout.config import RolloutConfig
from outrider.rollout.gates import check_gates
from outrider.rollout.ramp import GateResult
from outrider.serve.app import App
from outrider.serve.config import ServerConfig, make_config
from outrider.serve.gateway.app import AdminApp, GatewayApp, admin_keys
from outrider.serve.gateway.engines import Engines
from outrider.serve.gateway.feedback import withhold
from outrider.serve.gateway.flow import Stage
from outrider.serve.gateway.gateway import Gateway
from outrider.serve.gateway.lanes import Lane
from outrider.serve.keys import keys_from_environment
from outrider.serve.run import Place, serve_places
from outrider.serve.service import Service

log = logging.getLogger(__name__)


def edges(config: RolloutConfig) -> tuple[ServerConfig, ServerConfig]:
    """Settings of the clients' port and of the operators'.

    Raises:
        InvalidParameter: a key of the environment is none.
    """
    common = {"target": config.target, "name": Stage(config, {}).model}
    api = {"host": config.host, "port": config.port, "keys": keys_from_environment()}
    admin = {"host": config.admin_host, "port": config.admin_port, "keys": admin_keys()}
    return make_config({**common, **api}), make_config({**common, **admin})


class Running:
    """A gateway with its engines, ready to be served.

    Args:
        config: the rollout.
        source: its file, which is watched.
        embedded: the embedded engine's service; `None` where no profile wants it.
        redact: takes personal data out of prompts that are kept as feedback.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        source: Path | None,
        embedded: Service | None,
        redact: Callable[[str], str] = withhold,
    ) -> None:
        self._redact = redact
        self.config = config
        self._source = source
        self._embedded = embedded
        self.gateway: Gateway | None = None

    async def start(self) -> Gateway:
        """Start the engines and the gateway.

        Raises:
            EngineUnfit: the baseline's engine cannot be had.
            RecordFileError: the persisted state is damaged.
        """
        app = None
        if self._embedded is not None:
            self._embedded.start()
            app = App(self._embedded)
        engines = Engines(embedded=app, told=self._told)

        async def rebuild(config: RolloutConfig, old: Mapping[str, Lane]) -> dict[str, Lane]:
            return await engines.lanes(config, keep=old)

        lanes = await engines.lanes(self.config)
        self.gateway = Gateway(
            self.config,
            lanes,
            gates=self._gates,
            source=self._source,
            rebuild=None if self._source is None else rebuild,
            redact=self._redact,
        )
        await self.gateway.start()
        return self.gateway

    def _gates(self, profile: str) -> GateResult:
        config = self.config if self.gateway is None else self.gateway.stage.config
        return check_gates(config.gates, now=time.time())

    def _told(self, profile: str, what: str, line: str) -> None:
        if self.gateway is None:
            log.warning("profile %s: %s: %s", profile, what, ascii(line))
        else:
            self.gateway.happened(profile, what, line)

    async def stop(self) -> None:
        if self.gateway is not None:
            await self.gateway.stop()
        if self._embedded is not None:
            await asyncio.to_thread(self._embedded.stop)


async def serve_rollout(
    config: RolloutConfig,
    *,
    source: Path | None,
    embedded: Service | None,
    listening: Callable[[str], None],
    signals: bool = True,
    redact: Callable[[str], str] = withhold,
) -> None:
    """Serve a rollout until a signal comes or the task is cancelled.

    Raises:
        CannotListen: a port is taken or not allowed.
        EngineUnfit: the baseline's engine cannot be had.
    """
    api, admin = edges(config)
    running = Running(config, source=source, embedded=embedded, redact=redact)
    try:
        gateway = await running.start()

        def draining() -> None:
            gateway.draining = True

        await serve_places(
            [
                Place(GatewayApp(gateway, api), api.host, api.port),
                Place(AdminApp(gateway, admin), admin.host, admin.port),
            ],
            limits=api.limits,
            tls=api.tls,
            listening=listening,
            draining=draining,
            signals=signals,
        )
    finally:
        await running.stop()
