"""The ASGI application: which path is whose, who may come in, what happens when a client leaves.

Decisions use `scope["path"]` as the server parsed it, and nothing that is rebuilt from the Host
header. All paths but the public ones need a key where there are keys. Each request runs beside a
watcher of its connection; whichever ends first ends the other.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

from outrider import __version__
from outrider.serve.answers import new_id
from outrider.serve.chat import chat_completions
from outrider.serve.completions import completions
from outrider.serve.config import ServerConfig
from outrider.serve.errors import ApiError, bad_request
from outrider.serve.exchange import Exchange, as_api_error
from outrider.serve.keys import Caller
from outrider.serve.logs import log_request
from outrider.serve.openapi import document
from outrider.serve.service import Service
from outrider.serve.tokens import detokenize, tokenize
from outrider.serve.ui import page, policy
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

Handler = Callable[[Service, Exchange], Awaitable[None]]

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_HOST = re.compile(r"[A-Za-z0-9.-]{1,255}|\[[0-9A-Fa-f:.]{2,64}\]")
_LOCAL = ("localhost", "127.0.0.1", "[::1]")


async def health(service: Service, exchange: Exchange) -> None:
    """Is the process in order? For whoever restarts it."""
    good = service.worker.healthy
    await exchange.reply({"status": "ok" if good else "failed"}, status=200 if good else 503)


async def ready(service: Service, exchange: Exchange) -> None:
    """Does it take requests? For whoever sends them here."""
    word = "ready" if service.ready else "draining" if service.draining else "not ready"
    await exchange.reply({"status": word}, status=200 if service.ready else 503)


async def version(service: Service, exchange: Exchange) -> None:
    await exchange.reply({"version": __version__})


async def openapi(service: Service, exchange: Exchange) -> None:
    await exchange.reply(document())


async def ui(service: Service, exchange: Exchange) -> None:
    headers = {"content-security-policy": policy(), "x-content-type-options": "nosniff"}
    await exchange.reply_bytes(page(), kind="text/html; charset=utf-8", headers=headers)


async def metrics(service: Service, exchange: Exchange) -> None:
    await exchange.reply_bytes(service.metrics.text(), kind=service.metrics.CONTENT_TYPE)


async def models(service: Service, exchange: Exchange) -> None:
    names = service.profiles.models(exchange.caller)
    await exchange.reply({"object": "list", "data": [_model(service, name) for name in names]})


async def model(service: Service, exchange: Exchange) -> None:
    name = exchange.path.removeprefix("/v1/models/")
    if name not in service.profiles.models(exchange.caller):
        raise ApiError(404, "there is no such model here", param="model", code="model_not_found")
    await exchange.reply(_model(service, name))


def _model(service: Service, name: str) -> dict[str, Any]:
    root = service.config.served_name
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "outrider",
        "root": root,
        "parent": None if name == root else root,
        "max_model_len": service.room.context,
    }


PUBLIC: dict[tuple[str, str], Handler] = {
    ("GET", "/health"): health,
    ("GET", "/ready"): ready,
}
API: dict[tuple[str, str], Handler] = {
    ("POST", "/v1/chat/completions"): chat_completions,
    ("POST", "/v1/completions"): completions,
    ("GET", "/v1/models"): models,
    ("GET", "/v1/models/{id}"): model,
    ("POST", "/tokenize"): tokenize,
    ("POST", "/detokenize"): detokenize,
    ("GET", "/version"): version,
    ("GET", "/openapi.json"): openapi,
}
ADMIN: dict[tuple[str, str], Handler] = {("GET", "/metrics"): metrics, ("GET", "/version"): version}


class App:
    """The ASGI callable of a service.

    Args:
        service: what stands behind it.
        admin: serve the operator's paths instead of the API's; its port is apart and has no keys.
    """

    def __init__(self, service: Service, *, admin: bool = False) -> None:
        self._service = service
        self._admin = admin
        config = service.config
        self._routes = dict(ADMIN if admin else API)
        if not admin and config.admin_port is None:
            self._routes |= ADMIN
        self._public = dict(PUBLIC)
        if config.ui and not admin:
            self._public["GET", "/ui"] = ui
        self._hosts = allowed_hosts(config, config.admin_host if admin else config.host)
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1003})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        """For servers that start us themselves."""
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self._service.start()
                await send({"type": "lifespan.startup.complete"})
            else:
                await asyncio.to_thread(self._service.stop)
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin = time.perf_counter()
        headers = Headers(scope["headers"])
        given = headers.text(b"x-request-id") or ""
        request_id = given if _REQUEST_ID.fullmatch(given) else new_id("req-")
        exchange = Exchange(request_id, scope["method"], scope["path"], headers, send)
        self._in_flight += 1
        self._service.metrics.in_flight.set(self._in_flight)
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
            self._service.metrics.in_flight.set(self._in_flight)
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
            await beside_client(handler(self._service, exchange), receive)  # type: ignore[arg-type]
        else:
            await handler(self._service, exchange)

    def _check_edge(self, exchange: Exchange) -> None:
        """What is refused before anything is read or decided."""
        limits = self._service.config.limits
        headers = exchange.headers
        if len(headers) > limits.header_count or headers.size > limits.header_bytes:
            raise ApiError(
                431, "too many or too large headers; send fewer", code="headers_too_large"
            )
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

    def _handler(self, exchange: Exchange) -> Handler:
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
