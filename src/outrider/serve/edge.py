"""The edge of an ASGI application: which path is whose, who may come in, what happens when a client
leaves. What stands behind it is the application's; it is handed to every handler as it is.

Decisions use `scope["path"]` as the server parsed it, and nothing that is rebuilt from the Host
header. All paths but the public ones need a key where there are keys. Each request runs beside a
watcher of its connection; whichever ends first ends the other.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, Protocol, TypeVar

from prometheus_client import Counter, Gauge

from outrider.serve.answers import new_id
from outrider.serve.config import ServerConfig
from outrider.serve.errors import ApiError, bad_request, headers_too_large
from outrider.serve.exchange import Exchange, as_api_error
from outrider.serve.keys import Caller, KeyRing
from outrider.serve.logs import log_request
from outrider.serve.wire import (
    JSON,
    ClientGone,
    Headers,
    Receive,
    Scope,
    Send,
    beside_client,
    read_body,
)

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_HOST = re.compile(r"[A-Za-z0-9.-]{1,255}|\[[0-9A-Fa-f:.]{2,64}\]")
_LOCAL = ("localhost", "127.0.0.1", "[::1]")


class Counts(Protocol):
    """Figures of the edge itself."""

    @property
    def http_in_flight(self) -> Gauge: ...

    @property
    def refused(self) -> Counter: ...


class Behind(Protocol):
    """What the edge needs of what stands behind it."""

    @property
    def config(self) -> ServerConfig: ...

    @property
    def metrics(self) -> Counts: ...

    @property
    def keys(self) -> KeyRing: ...

    def refuse_if_away(self) -> None: ...


_Behind = TypeVar("_Behind", bound=Behind)
Handler = Callable[[_Behind, Exchange], Awaitable[None]]
Routes = Mapping[tuple[str, str], Handler[_Behind]]


class Edge(Generic[_Behind]):
    """An ASGI callable.

    Args:
        service: what stands behind it.
        routes: method and path to handler; these need a key where there are keys.
        public: likewise, for anybody.
        admin: it listens apart, at the administrator's address, and knows no callers.
    """

    def __init__(
        self,
        service: _Behind,
        *,
        routes: Routes[_Behind],
        public: Routes[_Behind],
        admin: bool = False,
    ) -> None:
        self._service = service
        self._admin = admin
        self._routes = routes
        self._public = public
        config = service.config
        self._hosts = allowed_hosts(config, config.admin_host if admin else config.host)
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self.lifespan(receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1003})

    async def lifespan(self, receive: Receive, send: Send) -> None:
        """For servers that start us themselves."""
        while True:
            message = await receive()
            word = message["type"].removeprefix("lifespan.")
            await send({"type": f"lifespan.{word}.complete"})
            if word == "shutdown":
                return

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin = time.perf_counter()
        headers = Headers(scope["headers"])
        given = headers.text(b"x-request-id") or ""
        request_id = given if _REQUEST_ID.fullmatch(given) else new_id("req-")
        exchange = Exchange(request_id, scope["method"], scope["path"], headers, send)
        self._in_flight += 1
        self._service.metrics.http_in_flight.set(self._in_flight)
        try:
            await self._serve(exchange, receive)
        except ClientGone:
            exchange.facts["error"] = "client gone"
            exchange.status = exchange.status or 499
        except asyncio.CancelledError:
            exchange.facts["error"] = "server stopped"
            raise
        except Exception as fault:
            await self._refuse(exchange, as_api_error(fault))
        finally:
            self._in_flight -= 1
            self._service.metrics.http_in_flight.set(self._in_flight)
            log_request(exchange, time.perf_counter() - begin)

    async def _refuse(self, exchange: Exchange, error: ApiError) -> None:
        if exchange.status is not None:
            log.error("request %s failed behind its response's head", exchange.request_id)
            return
        self._service.metrics.refused.labels(str(error.status)).inc()
        await exchange.refuse(error)

    async def _serve(self, exchange: Exchange, receive: Receive) -> None:
        limits = self._service.config.limits
        self._check_edge(exchange)
        if exchange.method == "OPTIONS":
            await exchange.reply_bytes(b"", status=204, kind="text/plain")
            return
        handler = self._public.get((exchange.method, exchange.path))
        if handler is None:
            exchange.caller = self._caller(exchange)
            handler = self._handler(exchange)
        if exchange.method == "POST":
            self._service.refuse_if_away()
            _check_kind(exchange)
            exchange.body = await read_body(
                receive, exchange.headers, limit=limits.body_bytes, seconds=limits.body_s
            )
            work = handler(self._service, exchange)
            await beside_client(work, receive, over=lambda: exchange.over)  # type: ignore[arg-type]
        else:
            await handler(self._service, exchange)

    def _check_edge(self, exchange: Exchange) -> None:
        """What is refused before anything is read or decided."""
        limits = self._service.config.limits
        headers = exchange.headers
        if len(headers) > limits.header_count or headers.size > limits.header_bytes:
            raise headers_too_large()
        if headers.count(b"host") > 1:
            raise bad_request("the Host header was sent more than once", code="bad_host")
        if not self._host_allowed(headers.text(b"host")):
            raise ApiError(403, "this Host is not served here", code="host_not_allowed")
        if self._in_flight > limits.in_flight:
            raise ApiError(429, "too many requests are under way", code="overloaded", retry_after=1)
        origin = headers.text(b"origin")
        if origin is not None and origin in self._service.config.cors_origins:
            exchange.extra |= {
                "access-control-allow-origin": origin,
                "access-control-allow-methods": "GET, POST, OPTIONS",
                "access-control-allow-headers": "authorization, content-type, x-outrider-profile",
                "vary": "origin",
            }

    def _host_allowed(self, host: str | None) -> bool:
        name = re.sub(r":\d{1,5}$", "", host or "")
        if not _HOST.fullmatch(name):
            return False
        return "*" in self._hosts or name.lower() in self._hosts

    def _caller(self, exchange: Exchange) -> Caller:
        """Who sends the request; the admin port, which listens apart, knows no callers."""
        if self._admin:
            return Caller()
        caller = self._service.keys.caller(exchange.headers.get(b"authorization"))
        if caller is None:
            raise ApiError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        exchange.facts["tenant"] = caller.tenant
        return caller

    def _handler(self, exchange: Exchange) -> Handler[_Behind]:
        path = exchange.path
        if path.startswith("/v1/models/"):
            path = "/v1/models/{id}"
        handler = self._routes.get((exchange.method, path))
        if handler is not None:
            return handler
        known = sorted(m for m, p in (*self._routes, *self._public) if p == path)
        if not known:
            raise ApiError(404, "there is nothing at this path", code="not_found")
        allow = ", ".join(known)
        raise ApiError(
            405, f"use {allow} here", code="method_not_allowed", headers={"allow": allow}
        )


def allowed_hosts(config: ServerConfig, address: str) -> frozenset[str]:
    """Values of the Host header that are served at an address; "*" for any.

    A server that listens on this machine only answers to local names only, so that no web page can
    reach it under a name of its own.
    """
    if config.allowed_hosts:
        return frozenset(host.lower() for host in config.allowed_hosts)
    local = address == "localhost" or address.startswith("127.") or address == "::1"
    return frozenset((*_LOCAL, address)) if local else frozenset("*")


def _check_kind(exchange: Exchange) -> None:
    """A body must say that it is JSON: a web page cannot send that here without being allowed."""
    kind = (exchange.headers.text(b"content-type") or "").partition(";")[0].strip().lower()
    if kind != JSON:
        raise ApiError(415, f"the content-type must be {JSON}", code="unsupported_media_type")
    if exchange.headers.text(b"content-encoding") not in (None, "identity"):
        raise bad_request("compressed bodies are not read", code="unsupported_encoding")
