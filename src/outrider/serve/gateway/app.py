"""The gateway's two ASGI applications: OpenAI's interface for clients, the rollout for operators.

They listen apart and have keys apart. The page at `/ui/rollout` is public on the operators' port;
what it shows and does goes through the operators' paths like everything else.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider import __version__
from outrider.errors import InvalidParameter, OutriderError
from outrider.rollout.config import share
from outrider.rollout.ramp import Manual
from outrider.serve.config import Key, ServerConfig
from outrider.serve.edge import Edge, Handler
from outrider.serve.errors import ApiError, bad_request
from outrider.serve.exchange import Exchange
from outrider.serve.gateway.flow import checked_body
from outrider.serve.gateway.gateway import Gateway
from outrider.serve.gateway.metrics import EdgeCounts
from outrider.serve.gateway.status import history, status
from outrider.serve.gateway.ui import page, policy
from outrider.serve.keys import KeyRing, hash_key

ADMIN_KEYS = "OUTRIDER_ADMIN_KEYS"  # NAME=KEY, separated by commas; hashed at start
WHO = re.compile(r"[\w.@ -]{1,64}")
ORDERS = ("set", "hold", "promote", "rollback", "arm", "shadow")
STARTS = ("set", "promote", "arm", "shadow")  # orders that bring a profile back


@dataclass(frozen=True)
class Front:
    """One port: its settings, keys and figures, and the gateway behind it."""

    gateway: Gateway
    config: ServerConfig
    keys: KeyRing
    metrics: EdgeCounts

    def refuse_if_away(self) -> None:
        """Raises:
        ApiError: 503 while the gateway ends."""
        if self.gateway.draining:
            raise ApiError(503, "the gateway is shutting down", code="draining", retry_after=5)


async def health(front: Front, exchange: Exchange) -> None:
    """Is the process in order?"""
    await exchange.reply({"status": "ok"})


async def ready(front: Front, exchange: Exchange) -> None:
    """Does it take requests? The baseline must be well."""
    good = front.gateway.ready
    await exchange.reply({"status": "ready" if good else "not ready"}, status=200 if good else 503)


async def version(front: Front, exchange: Exchange) -> None:
    await exchange.reply({"version": __version__})


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


async def answer(front: Front, exchange: Exchange) -> None:
    """A completion, of a chat or a text."""
    body = checked_body(exchange.body, lambda d: json.loads(d, parse_constant=_refuse_constant))
    await front.gateway.flow.answer(exchange, body)


def _models(front: Front, exchange: Exchange) -> list[dict[str, Any]]:
    stage = front.gateway.stage
    names = [stage.model]
    if stage.config.force:
        usable = [p for p in stage.config.profiles if exchange.caller.may_use(p)]
        names += [f"{stage.model}@{profile}" for profile in usable]
    return [
        {
            "id": name,
            "object": "model",
            "created": front.gateway.created,
            "owned_by": "outrider",
        }
        for name in names
    ]


async def models(front: Front, exchange: Exchange) -> None:
    await exchange.reply({"object": "list", "data": _models(front, exchange)})


async def model(front: Front, exchange: Exchange) -> None:
    name = exchange.path.removeprefix("/v1/models/")
    for known in _models(front, exchange):
        if known["id"] == name:
            await exchange.reply(known)
            return
    raise ApiError(404, "there is no such model here", param="model", code="model_not_found")


async def metrics(front: Front, exchange: Exchange) -> None:
    shown = front.gateway.metrics
    await exchange.reply_bytes(shown.text(), kind=shown.CONTENT_TYPE)


async def show(front: Front, exchange: Exchange) -> None:
    await exchange.reply(status(front.gateway))


async def show_history(front: Front, exchange: Exchange) -> None:
    await exchange.reply(history(front.gateway))


async def ui(front: Front, exchange: Exchange) -> None:
    headers = {"content-security-policy": policy(), "x-content-type-options": "nosniff"}
    await exchange.reply_bytes(page(), kind="text/html; charset=utf-8", headers=headers)


async def order(front: Front, exchange: Exchange) -> None:
    """A person's word on one profile."""
    told = _object(exchange)
    action = exchange.path.rsplit("/", 1)[1]
    profile = _text(told, "profile")
    weight = None
    if action == "set":
        try:
            weight = share(told.get("share"))
        except ValueError as fault:
            raise bad_request(f"share: {fault}", param="share") from None
    word = Manual(
        action=action,  # type: ignore[arg-type]  # the paths are ORDERS
        who=_who(exchange, told),
        why=_text(told, "why", default="")[:300],
        weight=weight,
        force=told.get("force") is True,
    )
    try:
        change = front.gateway.controller.manual(profile, word)
    except InvalidParameter as fault:
        raise ApiError(409, str(fault), code="not_possible") from None
    if action in STARTS:  # a person vouches for it: what failed before does not count against it
        front.gateway.stage.lanes[profile].breaker.succeeded()
    front.gateway.tick()
    await exchange.reply({"change": None if change is None else change.to_dict()})


async def kill(front: Front, exchange: Exchange) -> None:
    """Everything to the baseline at once, or an end of that."""
    told = _object(exchange)
    on = told.get("on")
    if not isinstance(on, bool):
        raise bad_request("on is true or false", param="on")
    change = front.gateway.controller.switch(
        on=on, who=_who(exchange, told), why=_text(told, "why", default="")[:300]
    )
    front.gateway.tick()
    await exchange.reply({"change": None if change is None else change.to_dict()})


async def reload(front: Front, exchange: Exchange) -> None:
    """Read the rollout's file again."""
    try:
        await front.gateway.reload()
    except OutriderError as fault:
        raise ApiError(409, str(fault), code="not_reloaded") from None
    await exchange.reply({"status": "reloaded"})


def _object(exchange: Exchange) -> dict[str, Any]:
    try:
        told = json.loads(exchange.body)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise bad_request("the body is no JSON object", code="invalid_json")
    return told


def _text(told: Mapping[str, Any], name: str, *, default: str | None = None) -> str:
    value = told.get(name, default)
    if not isinstance(value, str):
        raise bad_request(f"{name} is missing or no text", param=name)
    return value


def _who(exchange: Exchange, told: Mapping[str, Any]) -> str:
    """The key's owner where there are keys: a name that is only claimed proves nothing then."""
    if exchange.caller.tenant:
        return exchange.caller.tenant
    name = _text(told, "who", default="somebody")
    if not WHO.fullmatch(name):
        raise bad_request("who is no name", param="who")
    return name


PUBLIC: Mapping[tuple[str, str], Handler[Front]] = {
    ("GET", "/health"): health,
    ("GET", "/ready"): ready,
}
API: Mapping[tuple[str, str], Handler[Front]] = {
    ("POST", "/v1/chat/completions"): answer,
    ("POST", "/v1/completions"): answer,
    ("GET", "/v1/models"): models,
    ("GET", "/v1/models/{id}"): model,
    ("GET", "/version"): version,
}
ADMIN: Mapping[tuple[str, str], Handler[Front]] = {
    ("GET", "/metrics"): metrics,
    ("GET", "/version"): version,
    ("GET", "/rollout"): show,
    ("GET", "/rollout/history"): show_history,
    ("POST", "/rollout/kill"): kill,
    ("POST", "/rollout/reload"): reload,
    **{("POST", f"/rollout/{action}"): order for action in ORDERS},
}


class GatewayApp(Edge[Front]):
    """The clients' application."""

    def __init__(self, gateway: Gateway, config: ServerConfig) -> None:
        front = Front(gateway, config, KeyRing(config), gateway.metrics.edge("api"))
        super().__init__(front, routes=API, public=PUBLIC)


class AdminApp(Edge[Front]):
    """The operators' application.

    Args:
        gateway: what it works on.
        config: of its own port, with the operators' keys.
    """

    def __init__(self, gateway: Gateway, config: ServerConfig) -> None:
        front = Front(gateway, config, KeyRing(config), gateway.metrics.edge("admin"))
        super().__init__(front, routes=ADMIN, public={**PUBLIC, ("GET", "/ui/rollout"): ui})


def admin_keys() -> tuple[Key, ...]:
    """The operators' keys that the environment names.

    Raises:
        InvalidParameter: one has no name, or is too short to be a secret.
    """
    found = []
    for entry in os.environ.get(ADMIN_KEYS, "").split(","):
        if not entry.strip():
            continue
        name, equals, key = entry.strip().partition("=")
        if not equals or len(key) < 8:
            raise InvalidParameter(f"{ADMIN_KEYS} holds NAME=KEY, a key of 8 characters at least")
        found.append(Key(name=name, sha256=hash_key(key)))
    return tuple(found)
