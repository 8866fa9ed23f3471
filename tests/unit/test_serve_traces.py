"""Spans of requests: names, times and attributes, the caller's trace, and no text."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from outrider.errors import InvalidParameter
from outrider.serve.traces import Traces
from outrider.testing.asgi import AsgiClient
from outrider.testing.serving import (
    NAME,
    FakeModel,
    TextTarget,
    chat_body,
    fake_service,
    text_target,
    with_client,
)

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}


def spans(
    path: str, body: Any, headers: dict[str, str] | None = None, *, model: FakeModel | None = None
) -> Sequence[ReadableSpan]:
    service = fake_service(model=model)
    exporter = InMemorySpanExporter()
    service.traces = Traces("unused", exporter=exporter)

    async def test(client: AsgiClient) -> None:
        await client.post(path, body, headers=headers or {})

    with_client(service, test)
    return exporter.get_finished_spans()


def test_a_request_is_a_span_with_its_parts_inside() -> None:
    found = {
        span.name: span
        for span in spans("/v1/chat/completions", chat_body("my secret", max_tokens=80))
    }
    assert set(found) == {f"chat {NAME}", "queue", "prefill", "decode"}
    root = found[f"chat {NAME}"]
    assert root.attributes is not None and root.context is not None
    assert root.attributes["gen_ai.usage.output_tokens"] == 80
    assert root.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert root.attributes["outrider.profile"] == "fast"
    assert int(str(root.attributes["outrider.accepted_draft_tokens"])) > 0
    assert not any("secret" in str(value) for value in root.attributes.values())
    for name in ("queue", "prefill", "decode"):
        part = found[name]
        assert part.parent is not None and part.parent.span_id == root.context.span_id
        assert part.start_time is not None and part.end_time is not None
        assert root.start_time is not None and root.start_time <= part.start_time <= part.end_time
    assert found["prefill"].end_time == found["decode"].start_time


def test_the_callers_trace_goes_on() -> None:
    body = {"model": NAME, "prompt": "hello", "max_tokens": 4}
    for span in spans("/v1/completions", body, PARENT):
        assert span.context is not None and f"{span.context.trace_id:032x}" == TRACE


class Failing(TextTarget):
    """Fails every pass."""

    def forward(self, *args: Any, **options: Any) -> Any:
        raise RuntimeError("device lost")


def test_a_failure_is_told_in_the_span() -> None:
    model = FakeModel(text_target(kind=Failing))
    root = spans("/v1/chat/completions", chat_body(), model=model)[-1]
    assert root.status.status_code is StatusCode.ERROR
    assert root.attributes is not None and root.attributes["error.type"] == "error"


def test_without_the_extra_the_server_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *more: Any) -> Any:
        if name == "outrider.serve.traces":
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(InvalidParameter, match=r"outrider\[otel\]"):
        fake_service(traces="http://127.0.0.1:4318/v1/traces")
