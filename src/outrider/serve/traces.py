"""Traces of requests over OTLP: a span per request, and in it its wait, its prompt, its decoding.

Names follow OpenTelemetry's GenAI conventions; what these do not have carries our prefix. No text
of a prompt or an answer is in a span. Needs the extra `otel`; the module is imported only where
traces are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from outrider import __version__
from outrider.engine import Completion
from outrider.records.request import accepted_in_output, is_verify_step

SECOND = 1_000_000_000
Value = str | int | float | bool | Sequence[str]


@dataclass(frozen=True)
class Finished:
    """A request that is over.

    Attributes:
        operation: "chat" or "text_completion".
        traceparent: the caller's trace, as its header names it.
        begin_ns, end_ns: Unix times.
        error: what it failed with; empty where it did not.
    """

    operation: str
    model: str
    profile: str
    request_id: str
    traceparent: str | None
    prompt_tokens: int
    completions: Sequence[Completion]
    begin_ns: int
    end_ns: int
    error: str


class Traces:
    """Sends spans."""

    def __init__(self, endpoint: str, *, exporter: SpanExporter | None = None) -> None:
        """Args:
        endpoint: where OTLP over HTTP is taken, such as http://127.0.0.1:4318/v1/traces.
        exporter: takes the spans instead, for tests.
        """
        resource = Resource.create({"service.name": "outrider", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=endpoint))
        )
        self._tracer = self._provider.get_tracer("outrider", __version__)

    def finished(self, request: Finished) -> None:
        """Record a request."""
        carrier = {"traceparent": request.traceparent} if request.traceparent else {}
        parent = TraceContextTextMapPropagator().extract(carrier)
        span = self._tracer.start_span(
            f"{request.operation} {request.model}",
            context=parent,
            kind=trace.SpanKind.SERVER,
            start_time=request.begin_ns,
            attributes=_attributes(request),
        )
        if request.error:
            span.set_status(trace.StatusCode.ERROR, request.error)
        inside = trace.set_span_in_context(span)
        for completion in request.completions:
            for name, begin_s, end_s in _parts(completion):
                part = self._tracer.start_span(
                    name, context=inside, start_time=request.begin_ns + round(begin_s * SECOND)
                )
                part.end(request.begin_ns + round(end_s * SECOND))
        span.end(request.end_ns)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _parts(completion: Completion) -> list[tuple[str, float, float]]:
    """Name, begin and end, in seconds from the request's arrival."""
    queue, first, end = completion.queue_s, completion.ttft_s, completion.e2e_s
    if first is None:
        return [("queue", 0.0, queue), ("prefill", queue, end)]
    return [("queue", 0.0, queue), ("prefill", queue, first), ("decode", first, end)]


def _attributes(request: Finished) -> dict[str, Value]:
    steps = [s for c in request.completions for s in c.steps if is_verify_step(s)]
    found: dict[str, Value] = {
        "gen_ai.operation.name": request.operation,
        "gen_ai.provider.name": "outrider",
        "gen_ai.request.model": request.model,
        "gen_ai.response.model": request.model,
        "gen_ai.usage.input_tokens": request.prompt_tokens,
        "gen_ai.usage.output_tokens": sum(len(c.tokens) for c in request.completions),
        "gen_ai.response.finish_reasons": [c.finish_reason for c in request.completions],
        "outrider.request_id": request.request_id,
        "outrider.profile": request.profile,
        "outrider.steps": len(steps),
        "outrider.draft_tokens": sum(step.proposed for step in steps),
        "outrider.accepted_draft_tokens": sum(accepted_in_output(step) for step in steps),
    }
    if request.error:
        found["error.type"] = request.error
    return found
