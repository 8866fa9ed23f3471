"""From an address to a backend: who is there, which version, which model, and what it can do.

An unknown server is a generic one: less is known of it, and its notes say so. A server that is not
the engine that the caller named, or older than what we know, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.backends.base import EngineInfo, EngineUnfit
from outrider.backends.dialect import Dialect, count, version_tuple
from outrider.backends.llamacpp import LLAMACPP
from outrider.backends.openai import GENERIC, OpenAIBackend, models_of
from outrider.backends.own import OWN
from outrider.backends.sglang import SGLANG
from outrider.backends.tensorrt_llm import TENSORRT_LLM
from outrider.backends.vllm import VLLM
from outrider.backends.wire import Timeouts, Wire

DIALECTS: Mapping[str, Dialect] = {
    dialect.kind: dialect for dialect in (OWN, VLLM, SGLANG, TENSORRT_LLM, LLAMACPP, GENERIC)
}
AUTO = "auto"


async def connect(
    url: str,
    *,
    kind: str = AUTO,
    model: str | None = None,
    api_key: str | None = None,
    timeouts: Timeouts | None = None,
) -> OpenAIBackend:
    """Find out who is at an address.

    Args:
        url: with or without `/v1`.
        kind: one of `DIALECTS`, or `AUTO`.
        model: which of its models; `None` for the only or first one.

    Raises:
        EngineUnfit: it cannot be reached, is not of that kind, is too old, or has no such model.
    """
    if kind != AUTO and kind not in DIALECTS:
        raise EngineUnfit(f"engine {kind!r} is unknown; use one of {', '.join(DIALECTS)}")
    wire = Wire(url, api_key=api_key, timeouts=timeouts)
    try:
        models = models_of(await wire.get("/v1/models"), root=wire.root)
        dialect = await _who(wire, models) if kind == AUTO else DIALECTS[kind]
        version = await _version(wire, dialect)
        _refuse(wire.root, dialect, version, models, named=kind != AUTO)
        chosen = _choose(models, model, root=wire.root)
        info = await _info(wire, dialect, version, models, chosen)
        return OpenAIBackend(wire, dialect, info)
    except BaseException:
        await wire.close()
        raise


async def _who(wire: Wire, models: Sequence[Mapping[str, Any]]) -> Dialect:
    """By the owner of its models; else by the one path that only one engine has."""
    owner = str(models[0].get("owned_by", "")).lower()
    for dialect in DIALECTS.values():
        if owner in dialect.owners:
            return dialect
    for dialect in (SGLANG, LLAMACPP):
        if await _version(wire, dialect) is not None:
            return dialect
    return GENERIC


async def _version(wire: Wire, dialect: Dialect) -> str | None:
    for path in dialect.version_paths:
        reply = await wire.get(path)
        version = dialect.read_version(reply.object) if reply.status == 200 else None
        if version is not None:
            return version
    return None


def _refuse(
    root: str,
    dialect: Dialect,
    version: str | None,
    models: Sequence[Mapping[str, Any]],
    *,
    named: bool,
) -> None:
    owner = str(models[0].get("owned_by", "")).lower()
    others = [d.kind for d in DIALECTS.values() if owner in d.owners and d is not dialect]
    if named and others and dialect is not GENERIC:
        raise EngineUnfit(f"{root} is {others[0]}, not {dialect.kind}; name the right engine")
    if version is not None and dialect.oldest is not None:
        number = version_tuple(version)
        if number and number < dialect.oldest:
            oldest = ".".join(map(str, dialect.oldest))
            raise EngineUnfit(
                f"{root} is {dialect.kind} {version}; versions from {oldest} on are understood: "
                "update it, or call it --engine openai to measure times alone"
            )


def _choose(
    models: Sequence[Mapping[str, Any]], wanted: str | None, *, root: str
) -> Mapping[str, Any]:
    if wanted is None:
        return models[0]
    for model in models:
        if model["id"] == wanted:
            return model
    names = ", ".join(str(m["id"]) for m in models[:8])
    raise EngineUnfit(f"{root} has no model {wanted!r}; it serves {names}")


async def _info(
    wire: Wire,
    dialect: Dialect,
    version: str | None,
    models: Sequence[Mapping[str, Any]],
    chosen: Mapping[str, Any],
) -> EngineInfo:
    notes = list(dialect.notes(version))
    info = EngineInfo(
        kind=dialect.kind,
        version=version,
        models=tuple(str(m["id"]) for m in models),
        model=str(chosen["id"]),
        max_model_len=count(chosen.get("max_model_len")),
    )
    backend = OpenAIBackend(wire, dialect, info)
    abilities = {"tokenize"} if await _tokenizes(backend) else set()
    counters = await backend.counters()
    if counters is not None:
        abilities.add("metrics")
        if counters.accepted is not None:
            abilities.add("acceptance in counters")
    elif dialect.counters is not None:
        notes.append(f"{wire.root}{dialect.metrics_path} cannot be read: no counters, no load")
    if dialect is GENERIC:
        notes.append("the engine is not known: acceptance is read where it is recognised")
    return EngineInfo(
        kind=info.kind,
        version=version,
        models=info.models,
        model=info.model,
        max_model_len=info.max_model_len,
        abilities=frozenset(abilities),
        notes=tuple(notes),
    )


async def _tokenizes(backend: OpenAIBackend) -> bool:
    try:
        return await backend.tokenize("a") is not None
    except EngineUnfit:
        return False
