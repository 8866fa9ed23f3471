"""The server's ASGI application: its paths and what answers at each. Who may come in and what
happens when a client leaves is `edge`'s."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from outrider import __version__
from outrider.serve.chat import chat_completions
from outrider.serve.completions import completions
from outrider.serve.edge import Edge
from outrider.serve.errors import ApiError
from outrider.serve.exchange import Exchange
from outrider.serve.openapi import document
from outrider.serve.service import Service
from outrider.serve.tokens import detokenize, tokenize
from outrider.serve.ui import page, policy
from outrider.serve.wire import Receive, Send

Handler = Callable[[Service, Exchange], Awaitable[None]]


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


class App(Edge[Service]):
    """The ASGI callable of a service.

    Args:
        service: what stands behind it.
        admin: serve the operator's paths instead of the API's; its port is apart and has no keys.
    """

    def __init__(self, service: Service, *, admin: bool = False) -> None:
        config = service.config
        routes = dict(ADMIN if admin else API)
        if not admin and config.admin_port is None:
            routes |= ADMIN
        public = dict(PUBLIC)
        if config.ui and not admin:
            public["GET", "/ui"] = ui
        super().__init__(service, routes=routes, public=public, admin=admin)

    async def lifespan(self, receive: Receive, send: Send) -> None:
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
