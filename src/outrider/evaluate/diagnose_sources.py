"""Pictures from what others recorded: pairs of metrics pages, request logs, OpenTelemetry traces.

Pure functions from parsed pages and lines; the command line opens the files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from outrider.backends.prometheus import Scrape
from outrider.errors import OutriderError
from outrider.evaluate.diagnose import (
    Lengths,
    Picture,
    Stage,
    lengths_from_buckets,
    lengths_of,
)


class NoPicture(OutriderError):
    """A source does not tell enough, or is damaged; names what is missing."""

    exit_code = 3


# -- metrics ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PageNames:
    """Names on an engine's page; histograms without `_sum`, `_count`, `_bucket`.

    Attributes:
        engine: whose.
        queue, prefill, decode: histograms of seconds per request; `prefill` and `decode` are empty
            where they follow from `first` (queue included) and `whole`.
        output: histogram of output tokens; `tokens`: their counter.
        requests: a counter of finished requests.
    """

    engine: str
    queue: str
    first: str
    whole: str
    tokens: str
    requests: str
    running: str
    waiting: str
    prefill: str = ""
    decode: str = ""
    output: str = ""
    cache_use: str = ""
    preemptions: str = ""
    batch: str = ""


PAGES = (
    PageNames(
        "vllm",
        queue="vllm:request_queue_time_seconds",
        prefill="vllm:request_prefill_time_seconds",
        decode="vllm:request_decode_time_seconds",
        first="vllm:time_to_first_token_seconds",
        whole="vllm:e2e_request_latency_seconds",
        tokens="vllm:generation_tokens_total",
        output="vllm:request_generation_tokens",
        requests="vllm:request_success_total",
        running="vllm:num_requests_running",
        waiting="vllm:num_requests_waiting",
        cache_use="vllm:kv_cache_usage_perc",
        preemptions="vllm:num_preemptions_total",
    ),
    PageNames(
        "sglang",
        queue="sglang:queue_time_seconds",
        first="sglang:time_to_first_token_seconds",
        whole="sglang:e2e_request_latency_seconds",
        tokens="sglang:generation_tokens_total",
        requests="sglang:num_requests_total",
        running="sglang:num_running_reqs",
        waiting="sglang:num_queue_reqs",
        cache_use="sglang:token_usage",
    ),
    PageNames(
        "outrider",
        queue="outrider_queue_seconds",
        first="gen_ai_server_time_to_first_token_seconds",
        whole="gen_ai_server_request_duration_seconds",
        tokens="outrider_output_tokens_total",
        requests="outrider_requests_total",
        running="outrider_requests_running",
        waiting="outrider_requests_waiting",
        cache_use="outrider_kv_cache_usage_ratio",
        batch="outrider_batch_size",
    ),
)


def from_metrics(before: Scrape, after: Scrape) -> Picture:
    """The picture between two pages of one engine.

    Raises:
        NoPicture: the engine is not known, a counter went back, nothing finished, or the page lacks
            what it takes; names it.
    """
    names = _whose(after)
    pair = _Pair(before, after)
    missing: list[str] = []
    seconds = _stages(pair, names, missing)
    requests = pair.count(names.whole) or pair.counter(names.requests)
    if missing:
        raise NoPicture(
            f"the {names.engine} page lacks {', '.join(missing)}: start the engine with its "
            "metrics on, or use a request log"
        )
    if not requests:
        raise NoPicture(
            f"no request finished between the two {names.engine} pages; wait longer between them"
        )
    tokens = pair.counter(names.tokens)
    decode = seconds.get("decode", 0.0)
    absent = [
        n for n in (names.output, names.cache_use, names.preemptions) if n and not pair.has(n)
    ]
    return Picture(
        source=f"metrics of {names.engine}, {requests:,.0f} finished requests",
        requests=round(requests),
        seconds=seconds,
        lengths=pair.lengths(names.output) if names.output else _mean_length(tokens, requests),
        batch=_batch(pair, names),
        waiting=pair.gauge(names.waiting),
        cache_use=pair.gauge(names.cache_use) if names.cache_use else None,
        preemptions=_whole(pair.counter(names.preemptions)) if names.preemptions else None,
        tpot_ms=1000 * decode / tokens if tokens else None,
        missing=tuple(absent),
    )


def _whose(page: Scrape) -> PageNames:
    for names in PAGES:
        if any(page.has(name) for name in (f"{names.whole}_sum", names.running)):
            return names
    engines = ", ".join(names.engine for names in PAGES)
    raise NoPicture(f"the page is of none of these engines: {engines}; use a request log instead")


def _stages(pair: _Pair, names: PageNames, missing: list[str]) -> dict[Stage, float]:
    """Seconds by stage, added up over the finished requests."""

    def seconds(name: str) -> float:
        found = pair.sum(name)
        if found is None:
            missing.append(f"{name}_sum")
        return found or 0.0

    queue = seconds(names.queue)
    if names.prefill:
        return {
            "queue": queue,
            "prefill": seconds(names.prefill),
            "decode": seconds(names.decode),
        }
    first, whole = seconds(names.first), seconds(names.whole)
    return {
        "queue": queue,
        "prefill": max(0.0, first - queue),
        "decode": max(0.0, whole - first),
    }


def _batch(pair: _Pair, names: PageNames) -> float | None:
    """Sequences at once: by the engine's own histogram, else the mean of both gauges."""
    if names.batch:
        total, count = pair.sum(names.batch), pair.count(names.batch)
        if total is not None and count:
            return total / count
    return pair.gauge(names.running)


def _mean_length(tokens: float | None, requests: float) -> Lengths | None:
    if not tokens or not requests:
        return None
    mean = tokens / requests
    return Lengths(round(requests), mean, mean, mean, mean, float(mean < 16))


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


@dataclass(frozen=True)
class _Pair:
    """Differences between two pages, by exact name."""

    before: Scrape
    after: Scrape

    def has(self, name: str) -> bool:
        return any(self.after.has(n) for n in (name, f"{name}_sum"))

    def counter(self, name: str) -> float | None:
        now = self.after.total(name)
        if now is None:
            return None
        then = self.before.total(name) or 0.0
        if now < then:
            raise NoPicture(
                f"{name} went from {then:g} to {now:g}: the engine was restarted in between, or "
                "the pages are in the wrong order"
            )
        return now - then

    def sum(self, name: str) -> float | None:
        return self.counter(f"{name}_sum")

    def count(self, name: str) -> float | None:
        return self.counter(f"{name}_count")

    def gauge(self, name: str) -> float | None:
        found = [v for v in (self.before.total(name), self.after.total(name)) if v is not None]
        return sum(found) / len(found) if found else None

    def lengths(self, name: str) -> Lengths | None:
        total, count = self.sum(name), self.count(name)
        if not total or not count:
            return None
        now = self.after.by_label(f"{name}_bucket", "le")
        then = self.before.by_label(f"{name}_bucket", "le")
        buckets = {_edge(le): value - then.get(le, 0.0) for le, value in now.items()}
        return lengths_from_buckets(buckets, mean=total / count)


def _edge(le: str) -> float:
    return math.inf if le in ("+Inf", "inf") else float(le)


# -- request logs -----------------------------------------------------------------------------

# Names that a line may use for a thing, in milliseconds; the first that is there counts.
_QUEUE = ("queue_ms", "queue_time_ms", "time_in_queue_ms")
_FIRST = ("ttft_ms", "time_to_first_token_ms")
_WHOLE = ("e2e_ms", "latency_ms", "duration_ms", "e2e_latency_ms")
_RETRIEVAL = ("retrieval_ms", "search_ms")
_TOOLS = ("tools_ms", "tool_ms")
_TOKENS = ("completion_tokens", "output_tokens", "generation_tokens")


@dataclass(frozen=True)
class LogLine:
    """A request of a log that could be used."""

    queue: float
    first: float
    whole: float
    retrieval: float
    tools: float
    tokens: int | None


def from_log(lines: Iterable[str]) -> Picture:
    """The picture of a log: JSON lines with a time to the first token and an end-to-end time.

    Our own records are such lines. Lines that are damaged or lack these are counted and named.

    Raises:
        NoPicture: no line can be used; names what the first lacks.
    """
    used: list[LogLine] = []
    skipped: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        found = _log_line(line)
        if isinstance(found, LogLine):
            used.append(found)
        elif found:
            skipped.append(f"line {number} {found}")
    if not used:
        first = skipped[0] if skipped else "it is empty"
        raise NoPicture(
            f"no request of the log can be used ({first}); a line needs ttft_ms and e2e_ms"
        )
    seconds: dict[Stage, float] = {
        "queue": sum(r.queue for r in used) / 1000,
        "retrieval": sum(r.retrieval for r in used) / 1000,
        "tools": sum(r.tools for r in used) / 1000,
        "prefill": sum(max(0.0, r.first - r.queue) for r in used) / 1000,
        "decode": sum(max(0.0, r.whole - r.first) for r in used) / 1000,
    }
    tokens = [r.tokens for r in used if r.tokens is not None]
    notes = [] if not skipped else [f"{len(skipped)} lines were left out, the first: {skipped[0]}"]
    rates = [(r.whole - r.first) / (r.tokens - 1) for r in used if r.tokens and r.tokens > 1]
    return Picture(
        source=f"a log of {len(used):,} requests",
        requests=len(used),
        seconds=seconds,
        lengths=lengths_of(tokens),
        tpot_ms=sum(rates) / len(rates) if rates else None,
        notes=tuple(notes),
        missing=() if tokens else ("completion_tokens",),
    )


def _log_line(line: str) -> LogLine | str:
    """The request of a line, or why there is none; empty for a line about something else."""
    try:
        entry = json.loads(line)
    except ValueError:
        return "is no JSON"
    if not isinstance(entry, dict):
        return "is no JSON object"
    if "manifest" in entry or "manifest_end" in entry:
        return ""
    first, whole = _number(entry, _FIRST), _number(entry, _WHOLE)
    if first is None or whole is None:
        return f"lacks {'ttft_ms' if first is None else 'e2e_ms'}"
    if whole < first:
        return f"has e2e {whole:g} before the first token at {first:g} (a clock that jumped?)"
    tokens = _number(entry, _TOKENS)
    return LogLine(
        queue=min(first, _number(entry, _QUEUE) or 0.0),
        first=first,
        whole=whole,
        retrieval=_number(entry, _RETRIEVAL) or 0.0,
        tools=_number(entry, _TOOLS) or 0.0,
        tokens=None if tokens is None else int(tokens),
    )


def _number(entry: Mapping[str, Any], names: Sequence[str]) -> float | None:
    for name in names:
        value = entry.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value) if math.isfinite(value) and value >= 0 else None
    return None


# -- traces -----------------------------------------------------------------------------------

_LLM_OPERATIONS = ("chat", "text_completion", "generate_content", "completion")
_KINDS: Mapping[str, Stage] = {
    "RETRIEVER": "retrieval",
    "EMBEDDING": "retrieval",
    "RERANKER": "retrieval",
    "TOOL": "tools",
    "LLM": "decode",
}
_WORDS: tuple[tuple[str, Stage], ...] = (
    ("retriev", "retrieval"),
    ("rerank", "retrieval"),
    ("vector", "retrieval"),
    ("embed", "retrieval"),
    ("execute_tool", "tools"),
    ("tool_call", "tools"),
)
# Attributes of a span about a model's answer, in seconds.
_QUEUE_S = ("gen_ai.latency.time_in_queue",)
_FIRST_S = ("gen_ai.latency.time_to_first_token", "gen_ai.server.time_to_first_token")
_PREFILL_S = ("gen_ai.latency.time_in_model_prefill",)
_OUTPUT = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
_ORDER: tuple[Stage, ...] = ("decode", "tools", "retrieval")


@dataclass(frozen=True)
class Span:
    """A span of interest, times in seconds."""

    trace: str
    stage: Stage | None
    begin: float
    end: float
    root: bool
    attributes: Mapping[str, Any]


def from_traces(documents: Iterable[Mapping[str, Any]]) -> Picture:
    """The picture of OTLP's JSON form: one document per export, as collectors write them.

    A moment in which several spans run belongs to the model first, then to tools, then to
    retrieval, so that the stages of a trace add up to its duration.

    Raises:
        NoPicture: no trace holds a span of a model.
    """
    traces: dict[str, list[Span]] = {}
    for span in _spans(documents):
        traces.setdefault(span.trace, []).append(span)
    seconds: dict[Stage, float] = {"queue": 0.0, "prefill": 0.0}
    lengths: list[int] = []
    used = undivided = 0
    for spans in traces.values():
        models = [span for span in spans if span.stage == "decode"]
        if not models:
            continue
        used += 1
        for stage, value in _owned(spans).items():
            seconds[stage] = seconds.get(stage, 0.0) + value
        for span in models:
            queue, prefill = _before_first(span)
            undivided += queue is None and prefill is None
            _move(seconds, "queue", queue or 0.0)
            _move(seconds, "prefill", prefill or 0.0)
            tokens = _first(span.attributes, _OUTPUT)
            if tokens is not None:
                lengths.append(int(tokens))
    if not used:
        raise NoPicture(
            "no trace holds a span of a model (gen_ai.operation.name, or openinference.span.kind "
            "LLM); instrument the pipeline, or use a request log"
        )
    notes = []
    if undivided:
        notes.append(
            f"{undivided} model spans do not tell queue and prefill: all their time counts as "
            "decoding, so the ceiling is too high"
        )
    return Picture(
        source=f"{used:,} traces",
        requests=used,
        seconds=seconds,
        lengths=lengths_of(lengths),
        notes=tuple(notes),
        missing=() if lengths else ("gen_ai.usage.output_tokens",),
    )


def _move(seconds: dict[Stage, float], stage: Stage, part: float) -> None:
    """Take time of a model's span out of decoding."""
    moved = min(part, seconds.get("decode", 0.0))
    seconds[stage] = seconds.get(stage, 0.0) + moved
    seconds["decode"] = seconds.get("decode", 0.0) - moved


def _spans(documents: Iterable[Mapping[str, Any]]) -> Iterable[Span]:
    for document in documents:
        for resource in document.get("resourceSpans") or ():
            for scope in resource.get("scopeSpans") or ():
                for raw in scope.get("spans") or ():
                    span = _span(raw)
                    if span is not None:
                        yield span


def _span(raw: Mapping[str, Any]) -> Span | None:
    try:
        begin, end = int(raw["startTimeUnixNano"]), int(raw["endTimeUnixNano"])
    except (KeyError, TypeError, ValueError):
        return None
    if end < begin:
        return None
    attributes = {str(a.get("key")): _value(a.get("value")) for a in raw.get("attributes") or ()}
    return Span(
        str(raw.get("traceId")),
        _stage(str(raw.get("name", "")), attributes),
        begin / 1e9,
        end / 1e9,
        not raw.get("parentSpanId"),
        attributes,
    )


def _value(value: Any) -> Any:
    """An OTLP value without its wrapping."""
    if isinstance(value, Mapping) and value:
        [inner, *_] = value.values()
        if "intValue" in value:
            return int(inner)
        return inner
    return value


def _stage(name: str, attributes: Mapping[str, Any]) -> Stage | None:
    """What a span is about; `None` for anything else, whose time is its children's or "other"."""
    operation = str(attributes.get("gen_ai.operation.name", ""))
    if operation in _LLM_OPERATIONS:
        return "decode"
    if operation == "execute_tool":
        return "tools"
    if operation == "embeddings":
        return "retrieval"
    kind = str(attributes.get("openinference.span.kind", "")).upper()
    if kind in _KINDS:
        return _KINDS[kind]
    if name == "llm_request" or any(key.startswith("gen_ai.latency.") for key in attributes):
        return "decode"
    lowered = name.lower()
    return next((stage for word, stage in _WORDS if word in lowered), None)


def _owned(spans: Sequence[Span]) -> dict[Stage, float]:
    """Seconds of a trace by stage, each moment counted once."""
    begin, end = min(s.begin for s in spans), max(s.end for s in spans)
    roots = [s for s in spans if s.root]
    if roots:
        begin, end = min(s.begin for s in roots), max(s.end for s in roots)
    edges = sorted({begin, end, *(t for s in spans if s.stage for t in (s.begin, s.end))})
    owned: dict[Stage, float] = {}
    for low, high in pairwise(edges):
        if low < begin or high > end:
            continue
        active = {s.stage for s in spans if s.stage and s.begin <= low and s.end >= high}
        stage: Stage = next((wanted for wanted in _ORDER if wanted in active), "other")
        owned[stage] = owned.get(stage, 0.0) + high - low
    return owned


def _before_first(span: Span) -> tuple[float | None, float | None]:
    """Seconds of queue and prefill inside a model's span, where it tells."""
    queue, first = _first(span.attributes, _QUEUE_S), _first(span.attributes, _FIRST_S)
    prefill = _first(span.attributes, _PREFILL_S)
    if prefill is None and first is not None:
        prefill = max(0.0, first - (queue or 0.0))
    return queue, prefill


def _first(attributes: Mapping[str, Any], names: Sequence[str]) -> float | None:
    for name in names:
        value = attributes.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None


def read_documents(text: str) -> list[Mapping[str, Any]]:
    """OTLP documents of a file: one object, a list of them, or one per line.

    Raises:
        NoPicture: it holds none; names the line.
    """
    try:
        whole = json.loads(text)
        found = whole if isinstance(whole, list) else [whole]
    except ValueError:
        found = []
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                try:
                    found.append(json.loads(line))
                except ValueError:
                    raise NoPicture(
                        f"line {number} of the traces is no JSON; export them as OTLP JSON"
                    ) from None
    documents = [d for d in found if isinstance(d, Mapping) and "resourceSpans" in d]
    if not documents:
        raise NoPicture("the file holds no OTLP traces (resourceSpans); export them as OTLP JSON")
    return documents
