"""The diagnosis: verdicts from known pictures, pictures from every source, and damaged sources."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import pytest

from outrider.backends.base import Answer, Ask
from outrider.backends.prometheus import parse
from outrider.errors import InvalidParameter
from outrider.evaluate.diagnose import (
    SHORT,
    Picture,
    amdahl,
    cost_at,
    diagnose,
    knee,
    lengths_from_buckets,
    lengths_of,
)
from outrider.evaluate.diagnose_probe import from_answers, probe_embedded, probe_server
from outrider.evaluate.diagnose_sources import (
    NoPicture,
    from_log,
    from_metrics,
    from_traces,
    read_documents,
)
from outrider.testing.fakes import TableTarget

LONG = lengths_of([100, 200, 300])


def picture(**changes: object) -> Picture:
    values: dict[str, object] = {
        "source": "test",
        "requests": 10,
        "seconds": {"queue": 1.0, "prefill": 9.0, "decode": 90.0},
        "lengths": LONG,
    }
    return Picture(**{**values, **changes})  # type: ignore[arg-type]


VERDICTS = [
    ({}, "speculate"),
    ({"seconds": {"queue": 50.0, "prefill": 10.0, "decode": 40.0}}, "fix queueing first"),
    ({"seconds": {"queue": 1.0, "prefill": 60.0, "decode": 39.0}}, "prefill-bound"),
    ({"lengths": lengths_of([3, 5, 8])}, "outputs too short"),
    ({"batch": 120.0}, "saturated"),
    ({"batch": 8.0}, "speculate"),
    ({"cache_use": 0.99}, "saturated"),
    ({"preemptions": 4}, "saturated"),
    ({"pass_cost": {1: 1.0, 4: 4.0, 8: 8.0}}, "saturated"),
    ({"pass_cost": {1: 1.0, 4: 1.05, 8: 1.1}}, "speculate"),
    ({"seconds": {"retrieval": 60.0, "tools": 25.0, "decode": 15.0}}, "pipeline-bound"),
    ({"seconds": {}, "missing": ("x_sum",)}, "unknown"),
    ({"requests": 0}, "unknown"),
]


@pytest.mark.parametrize(("changes", "verdict"), VERDICTS)
def test_the_verdict_of_a_picture(changes, verdict):
    found = diagnose(picture(**changes))
    assert found.verdict == verdict, found.why
    assert found.instead and found.why and found.to_text().startswith(verdict)
    json.dumps(found.to_dict(), allow_nan=False)


def test_amdahls_ceiling():
    found = diagnose(picture(), tau=3.0)
    assert found.ceiling == pytest.approx(1 / (0.1 + 0.9 / 3))
    assert amdahl(0.0, 5) == 1 and amdahl(1.0, 5) == 5
    costly = diagnose(picture(pass_cost={1: 1.0, 4: 1.2, 8: 2.0}), tau=3.0)
    assert costly.expected == pytest.approx(amdahl(0.9, 3.0 / 1.2))
    with pytest.raises(InvalidParameter, match="tau"):
        diagnose(picture(), tau=0.5)
    with pytest.raises(InvalidParameter, match="roofline"):
        diagnose(picture(), roofline=0.0)


def test_costs_between_and_beyond_what_was_measured():
    costs = {1: 1.0, 4: 1.3, 8: 2.0}
    assert cost_at(costs, 2.5) == pytest.approx(1.15)
    assert cost_at(costs, 16) == pytest.approx(4.0) and cost_at({}, 2) is None
    assert knee(costs) == pytest.approx(4 + 4 * 0.2 / 0.7)
    assert knee({1: 1.0, 8: 1.1}) is None and knee({1: 1.0}) is None


def test_lengths_from_values_and_from_buckets_agree():
    values = list(range(1, 101))
    exact = lengths_of(values)
    edges = {float(e): float(sum(v <= e for v in values)) for e in (10, 20, 50, 100)}
    found = lengths_from_buckets({**edges, math.inf: 100.0}, mean=50.5)
    assert exact is not None and found is not None
    assert found.p50 == pytest.approx(exact.p50, abs=1) and found.count == 100
    assert found.short == pytest.approx(exact.short, abs=0.02)
    assert lengths_of([]) is None and lengths_from_buckets({math.inf: 0.0}, mean=0) is None


# -- metrics ------------------------------------------------------------------------------------

VLLM = """\
# TYPE vllm:e2e_request_latency_seconds histogram
vllm:e2e_request_latency_seconds_sum {whole}
vllm:e2e_request_latency_seconds_count {count}
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_sum {queue}
vllm:request_queue_time_seconds_count {count}
# TYPE vllm:request_prefill_time_seconds histogram
vllm:request_prefill_time_seconds_sum {prefill}
vllm:request_prefill_time_seconds_count {count}
# TYPE vllm:request_decode_time_seconds histogram
vllm:request_decode_time_seconds_sum {decode}
vllm:request_decode_time_seconds_count {count}
# TYPE vllm:request_generation_tokens histogram
vllm:request_generation_tokens_bucket{{le="10"}} 0
vllm:request_generation_tokens_bucket{{le="100"}} {count}
vllm:request_generation_tokens_bucket{{le="+Inf"}} {count}
vllm:request_generation_tokens_sum {tokens}
vllm:request_generation_tokens_count {count}
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total {tokens}
vllm:generation_tokens_created 1.7e9
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running 6
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting 1
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc 0.5
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total 0
"""


def page(count: int, **changes: float) -> str:
    values = {"whole": 5, "queue": 0.2, "prefill": 0.8, "decode": 4.0, "tokens": 80}
    return VLLM.format(count=count, **{k: v * count for k, v in {**values, **changes}.items()})


def test_a_pair_of_vllm_pages():
    found = from_metrics(parse(page(10)), parse(page(30)))
    assert found.requests == 20 and found.batch == 6 and found.cache_use == 0.5
    assert found.shares()["decode"] == pytest.approx(0.8)
    assert found.lengths is not None and found.lengths.mean == 80
    assert found.tpot_ms == pytest.approx(50) and diagnose(found).verdict == "speculate"
    queued = from_metrics(parse(page(10)), parse(page(30, queue=6.0)))
    assert diagnose(queued).verdict == "fix queueing first"


SGLANG = """\
sglang:queue_time_seconds_sum {q}
sglang:queue_time_seconds_count {n}
sglang:time_to_first_token_seconds_sum {f}
sglang:time_to_first_token_seconds_count {n}
sglang:e2e_request_latency_seconds_sum {e}
sglang:e2e_request_latency_seconds_count {n}
sglang:generation_tokens_total {t}
sglang:num_running_reqs 200
sglang:num_queue_reqs 0
sglang:token_usage 0.4
"""


def test_a_pair_of_sglang_pages():
    before = parse(SGLANG.format(q=0, f=0, e=0, t=0, n=0))
    found = from_metrics(before, parse(SGLANG.format(q=1, f=4, e=24, t=1200, n=12)))
    assert found.seconds == {"queue": 1.0, "prefill": 3.0, "decode": 20.0}
    assert found.lengths is not None and found.lengths.mean == 100
    assert diagnose(found).verdict == "saturated"  # 200 sequences against 150 rows


def without(text: str, word: str) -> str:
    return "\n".join(line for line in text.splitlines() if word not in line) + "\n"


def test_metrics_that_are_missing_are_named():
    lame = [parse(without(page(n), "decode_time")) for n in (10, 30)]
    with pytest.raises(NoPicture, match="request_decode_time_seconds_sum"):
        from_metrics(*lame)
    fewer = [parse(without(page(n), "preemptions")) for n in (10, 30)]
    assert "vllm:num_preemptions_total" in from_metrics(*fewer).missing
    with pytest.raises(NoPicture, match="none of these engines"):
        from_metrics(parse("up 1\n"), parse("up 1\n"))


def test_pages_in_the_wrong_order_or_of_an_idle_server_are_refused():
    with pytest.raises(NoPicture, match="restarted"):
        from_metrics(parse(page(30)), parse(page(10)))
    with pytest.raises(NoPicture, match="no request finished"):
        from_metrics(parse(page(10)), parse(page(10)))


# -- logs ---------------------------------------------------------------------------------------


def test_a_request_log_with_damaged_lines():
    lines = [
        '{"manifest": {}}',
        json.dumps({"ttft_ms": 100, "e2e_ms": 1100, "queue_ms": 40, "completion_tokens": 51}),
        json.dumps({"ttft_ms": 100, "latency_ms": 1100, "retrieval_ms": 200, "tool_ms": 100}),
        "{half a line",
        json.dumps({"ttft_ms": 900, "e2e_ms": 100}),
        json.dumps({"e2e_ms": 100}),
        "",
    ]
    found = from_log(lines)
    assert found.requests == 2 and found.tpot_ms == pytest.approx(20)
    assert found.seconds["retrieval"] == 0.2 and found.seconds["queue"] == pytest.approx(0.04)
    assert "3 lines were left out" in found.notes[0] and "line 4 is no JSON" in found.notes[0]
    with pytest.raises(NoPicture, match="lacks ttft_ms"):
        from_log(['{"e2e_ms": 3}'])
    with pytest.raises(NoPicture, match="empty"):
        from_log([])


# -- traces -------------------------------------------------------------------------------------


def span(name: str, begin: float, end: float, *, parent: str = "p", trace: str = "1", **attributes):
    return {
        "traceId": trace,
        "parentSpanId": parent,
        "name": name,
        "startTimeUnixNano": str(int(begin * 1e9)),
        "endTimeUnixNano": str(int(end * 1e9)),
        "attributes": [
            {"key": key.replace("__", "."), "value": _wrapped(value)}
            for key, value in attributes.items()
        ],
    }


def _wrapped(value: object) -> dict[str, object]:
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": value}


def document(*spans) -> dict[str, object]:
    return {"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}


AGENT = document(
    span("agent", 0, 10, parent=""),
    span("vector search", 0, 3),
    span("execute_tool weather", 3, 5),
    span("retriever again", 4, 6),  # overlaps the tool by a second, which counts as the tool's
    span(
        "chat m", 6, 9,
        gen_ai__operation__name="chat",
        gen_ai__latency__time_in_queue=0.5,
        gen_ai__latency__time_to_first_token=1.0,
        gen_ai__usage__output_tokens=40,
    ),
)  # fmt: skip


def test_a_trace_adds_up_to_its_duration():
    found = from_traces([AGENT])
    assert found.seconds == pytest.approx(
        {"retrieval": 4, "tools": 2, "queue": 0.5, "prefill": 0.5, "decode": 2, "other": 1}
    )
    assert found.lengths is not None and found.lengths.p50 == 40 and not found.notes
    assert diagnose(found).verdict == "pipeline-bound"


def test_spans_that_do_not_divide_are_noted():
    kind = span("ChatOpenAI", 0, 2, parent="", openinference__span__kind="LLM")
    found = from_traces([document(kind)])
    assert found.seconds["decode"] == 2 and "ceiling is too high" in found.notes[0]
    with pytest.raises(NoPicture, match="no trace holds a span of a model"):
        from_traces([document(span("GET /", 0, 1, parent=""))])


def test_trace_files_in_every_form():
    one = json.dumps(AGENT)
    assert len(read_documents(one)) == 1 and len(read_documents(f"[{one}, {one}]")) == 2
    assert len(read_documents(f"{one}\n{one}\n")) == 2
    for text, told in (("{}", "no OTLP"), (f"{one}\n{{half", "line 2")):
        with pytest.raises(NoPicture, match=told):
            read_documents(text)


# -- probes -------------------------------------------------------------------------------------


def answer(first: float, end: float, *, tokens: int | None = 49, error: str | None = None):
    return Answer(0.0, end, completion_tokens=tokens, arrivals_s=(first, end), error=error)


def test_a_live_probe_measures_what_batches_cost():
    loads = {1: [answer(0.1, 1.06)], 8: [answer(0.2, 1.64)] * 8}
    answers = [a for group in loads.values() for a in group]
    found = from_answers(answers, loads)
    assert found.tpot_ms == pytest.approx(20) and found.pass_cost[8] == pytest.approx(1.5)
    assert "not your traffic" in found.notes[0]
    lost = from_answers([*answers, answer(0, 0, error="HTTP 500")], loads)
    assert "1 of 10 requests failed" in lost.notes[1]
    blind = from_answers([answer(0.1, 1.0, tokens=None)], {1: [answer(0.1, 1.0, tokens=None)]})
    assert blind.missing and blind.pass_cost == {}
    with pytest.raises(NoPicture, match="HTTP 500"):
        from_answers([answer(0, 0, error="HTTP 500")], {})


class Server:
    """Answers at once; its pages show far more traffic than the probe's."""

    def __init__(self, pages: list[str]) -> None:
        self.pages, self.asked = pages, 0

    async def answer(self, ask: Ask) -> Answer:
        self.asked += 1
        return answer(0.1, 1.06)

    async def scrape(self):
        return parse(self.pages.pop(0)) if self.pages else None


def test_a_busy_servers_own_traffic_counts():
    server = Server([page(100), page(500)])
    found = asyncio.run(probe_server(server))  # type: ignore[arg-type]
    assert server.asked == 13 and found.requests == 400 and "of others" in found.notes[-1]
    quiet = asyncio.run(probe_server(Server([])))  # type: ignore[arg-type]
    assert quiet.source == "a live probe" and quiet.requests == 13


def test_the_embedded_engine_is_timed():
    target = TableTarget(vocab_size=16, order=1, context_length=256)
    found = probe_embedded(target, [[1, 2, 3], [4, 5]])
    assert found.requests == 2 and found.pass_cost[1] == 1.0
    assert found.lengths is not None and found.lengths.p50 >= SHORT


# -- the verb -----------------------------------------------------------------------------------


def test_the_verb_reads_every_file(cli, tmp_path: Path):
    before, after, log, traces = (tmp_path / n for n in ("a.txt", "b.txt", "l.jsonl", "t.json"))
    before.write_text(page(10))
    after.write_text(page(30))
    log.write_text(json.dumps({"ttft_ms": 100, "e2e_ms": 2100, "completion_tokens": 90}))
    traces.write_text(json.dumps(AGENT))
    for words, verdict in (
        (("--metrics", str(before), str(after)), "speculate"),
        (("--log", str(log)), "speculate"),
        (("--traces", str(traces)), "pipeline-bound"),
    ):
        text, told = cli("diagnose", *words), cli("diagnose", *words, "--json")
        assert text.code == told.code == 0 and text.out.startswith(verdict), text.err
        assert json.loads(told.out)["verdict"] == verdict
    assert cli("diagnose", "--metrics", str(after), str(before)).code == 3


def test_the_verb_on_the_fake_model(cli):
    outcome = cli("diagnose", "--target", "fake", "--tau", "2")
    assert outcome.code == 0 and "the embedded engine" in outcome.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "one source is needed"),
        (("--log", "a", "--target", "fake"), "--log and --target given"),
        (("--log", "no-such-file"), "cannot be read"),
        (("--target", "fake", "--watch"), "--watch goes with --url"),
        (("--url", "http://127.0.0.1:9"), "cannot be reached"),
        (("--url", "http://x", "--seconds", "0"), "--seconds"),
    ],
)
def test_wrong_requests_are_one_line(cli, words, told):
    outcome = cli("diagnose", *words)
    assert outcome.code in (2, 3) and told in outcome.err and "Traceback" not in outcome.err
