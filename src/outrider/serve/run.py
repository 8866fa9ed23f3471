"""Binds ports and serves until told to stop: uvicorn around the ASGI apps.

On the first signal the server takes no more connections and finishes what is under way, up to its
drain time; what runs longer is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

import uvicorn

from outrider.errors import InvalidParameter, OutriderError
from outrider.serve.app import App
from outrider.serve.config import Limits, Tls
from outrider.serve.protocol import BoundedHttp
from outrider.serve.service import Service
from outrider.serve.wire import Receive, Scope, Send

log = logging.getLogger(__name__)

Application = Callable[[Scope, Receive, Send], Awaitable[None]]
KEEP_ALIVE_S = 30  # of an idle connection


class CannotListen(OutriderError):
    """A port could not be bound."""

    exit_code = 3


def check_tls(tls: Tls | None) -> None:
    """Can these files be served with?

    Raises:
        InvalidParameter: a file is missing, is no certificate or key, or they do not fit together.
    """
    if tls is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            tls.certificate, tls.key
        )
    except OSError as fault:  # of which ssl.SSLError is one
        raise InvalidParameter(
            f"tls: certificate {tls.certificate} and key {tls.key} cannot be used: "
            f"{fault.strerror or fault}"
        ) from None


def check_ports(places: Iterable[tuple[str, int]]) -> None:
    """Can these hosts and ports be listened on? Told before a model is loaded.

    Raises:
        CannotListen: one is taken or not allowed.
    """
    for host, port in places:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            socket.create_server((host, port), family=family).close()
        except OSError as fault:
            why = os.strerror(fault.errno).lower() if fault.errno else str(fault)
            raise _cannot_listen(host, port, why) from None


def _cannot_listen(host: str, port: int, why: str) -> CannotListen:
    return CannotListen(f"{host}:{port} cannot be listened on ({why}); choose another port")


class _Server(uvicorn.Server):
    """A server that leaves signals to us: two of them run in one process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    @property
    def port(self) -> int:
        """The port that it listens on, also where 0 was asked for."""
        return int(self.servers[0].sockets[0].getsockname()[1])


async def serve(
    service: Service, *, listening: Callable[[str], None], signals: bool = True
) -> None:
    """Serve until a signal comes or the task is cancelled.

    Args:
        service: what stands behind the API; it is started here and stopped at the end.
        listening: told each address once it listens.
        signals: SIGINT and SIGTERM end the server.

    Raises:
        CannotListen: a port is taken or not allowed.
    """
    config = service.config
    service.start()
    places = [Place(App(service), config.host, config.port)]
    if config.admin_port is not None:
        admin = App(service, admin=True)
        places.append(Place(admin, config.admin_host, config.admin_port))

    def draining() -> None:
        service.draining = True

    try:
        await serve_places(
            places,
            limits=config.limits,
            tls=config.tls,
            listening=listening,
            draining=draining,
            signals=signals,
        )
    finally:
        draining()
        await asyncio.to_thread(service.stop)


@dataclass(frozen=True)
class Place:
    """An application and where it listens."""

    app: Application
    host: str
    port: int


async def serve_places(
    places: Sequence[Place],
    *,
    limits: Limits,
    tls: Tls | None,
    listening: Callable[[str], None],
    draining: Callable[[], None],
    signals: bool,
) -> None:
    """Serve applications until a signal comes or the task is cancelled.

    Args:
        draining: called once no more connections are taken.

    Raises:
        CannotListen: a port is taken or not allowed.
        InvalidParameter: the files of ``tls`` cannot be used.
    """
    check_tls(tls)
    servers = [_Server(_settings(place, limits, tls)) for place in places]
    heeding = _heeding_signals(servers) if signals else contextlib.nullcontext()
    with heeding:
        await _serve_all(servers, listening, draining, scheme="https" if tls else "http")


async def _serve_all(
    servers: list[_Server],
    listening: Callable[[str], None],
    draining: Callable[[], None],
    *,
    scheme: str,
) -> None:
    tasks = [asyncio.create_task(_serve_one(server)) for server in servers]
    try:
        await _announce(servers, tasks, listening, scheme=scheme)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        draining()
        for server in servers:
            server.should_exit = True
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result


@contextlib.contextmanager
def _heeding_signals(servers: list[_Server]) -> Iterator[None]:
    """The first signal begins to drain, the second gives up what is still under way.

    Afterwards signals do what they did before; the loop alone would put Python's own handler there.
    """

    def end() -> None:
        for server in servers:
            server.force_exit = server.should_exit
            server.should_exit = True

    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        loop.add_signal_handler(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


async def _serve_one(server: _Server) -> None:
    try:
        await server.serve()
    except SystemExit:  # how uvicorn says that it cannot bind
        config = server.config
        raise _cannot_listen(config.host, config.port, "see the log") from None


async def _announce(
    servers: list[_Server],
    tasks: list[asyncio.Task[None]],
    listening: Callable[[str], None],
    *,
    scheme: str,
) -> None:
    while not all(server.started for server in servers):
        if any(task.done() for task in tasks):
            return
        await asyncio.sleep(0.01)
    for server in servers:
        listening(f"{scheme}://{server.config.host}:{server.port}")


def _settings(place: Place, limits: Limits, tls: Tls | None) -> uvicorn.Config:
    return uvicorn.Config(
        place.app,
        host=place.host,
        port=place.port,
        http=BoundedHttp,
        ws="none",
        lifespan="off",
        loop="none",  # the one that is running
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=limits.header_bytes,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=round(limits.drain_s),
        ssl_certfile=None if tls is None else str(tls.certificate),
        ssl_keyfile=None if tls is None else str(tls.key),
    )
