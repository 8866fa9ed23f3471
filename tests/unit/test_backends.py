"""The engine clients against our own server and against servers that answer as told."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from outrider.backends import llamacpp, sglang, tensorrt_llm, vllm, wire
from outrider.backends.base import Ask, Counters, EngineUnfit, UnsupportedOption, between
from outrider.backends.connect import connect
from outrider.backends.embedded import EmbeddedBackend
from outrider.backends.openai import read_any
from outrider.backends.prometheus import parse
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine import Engine, EngineConfig, FixedBudget
from outrider.serve.tool_use import ServersChats
from outrider.testing.fakes import ByteTokenizer
from outrider.testing.serving import (
    FakeModel,
    TextTarget,
    chat_body,
    fake_service,
    running_server,
    text_target,
    with_client,
)
from tool_fakes import TOOLS as CALLABLE
from tool_fakes import WRITTEN, A, W, script_model

N = 72
CHAT = ({"role": "user", "content": "hello hello hello"},)


def ask(**more):
    given = {"prompt": CHAT, "max_tokens": N, "seed": 7, "temperature": 0.0, **more}
    return Ask(**given)


@pytest.fixture(scope="module")
def own():
    with running_server(fake_service()) as address:
        yield address


def with_backend(address, test, **options):
    async def run():
        backend = await connect(address, **options)
        try:
            return await test(backend)
        finally:
            await backend.close()

    return asyncio.run(run())


def test_our_own_server_is_recognised_and_tells_everything(own):
    async def test(backend):
        return backend.info, await backend.answer(ask()), await backend.counters()

    info, answer, counters = with_backend(own, test)
    assert (info.kind, info.model) == ("outrider", "fake")
    assert info.abilities >= {"tokenize", "metrics", "acceptance in counters"}
    assert answer.error is None and answer.completion_tokens == N
    assert answer.acceptance.accepted > 0 and answer.acceptance.counts_plain_steps
    assert answer.acceptance.target_steps(N) == answer.acceptance.steps
    assert answer.acceptance.record(N).num_spec_steps == answer.acceptance.steps
    assert answer.acceptance.told["profile"] == "fast"
    assert answer.ttft_s > 0 and answer.tpot_s > 0
    assert answer.arrivals_s == tuple(sorted(answer.arrivals_s))
    assert counters.output_tokens >= N


def test_a_plain_prompt_and_a_whole_answer_say_the_same(own):
    async def test(backend):
        streamed = await backend.answer(Ask("abcabc", max_tokens=12, seed=3))
        whole = await backend.answer(Ask("abcabc", max_tokens=12, seed=3, stream=False))
        tokens = await backend.answer(
            Ask(await backend.tokenize("abcabc"), max_tokens=12, seed=3, logprobs=2)
        )
        return streamed, whole, tokens

    streamed, whole, tokens = with_backend(own, test)
    assert streamed.text == whole.text == tokens.text
    assert whole.ttft_s is None and whole.tpot_s is None and whole.end_s > 0
    assert whole.acceptance.accepted == streamed.acceptance.accepted
    assert len(tokens.logprobs) == 12 and len(tokens.logprobs[0].top) == 2


def test_counters_tell_the_same_as_the_answer(own):
    async def test(backend):
        before = await backend.counters()
        answer = await backend.answer(ask())
        after, why = await backend._settled(before)
        assert not why
        return answer, between(before, after, engine="outrider")[0]

    answer, counted = with_backend(own, test)
    assert counted.source == "counters"
    assert counted.accepted == answer.acceptance.accepted
    assert counted.drafted == answer.acceptance.drafted
    assert counted.positions() == answer.acceptance.positions()
    # Counters know steps with a guess alone; with the plain ones added the records agree.
    assert (
        counted.record(N).acceptance_histogram == answer.acceptance.record(N).acceptance_histogram
    )


def test_idle_connections_are_closed_before_a_server_does_it(monkeypatch):
    """A server that closes an idle one while a request is on its way loses that request."""
    monkeypatch.setattr(wire, "KEEP_ALIVE_S", 0.05)
    ports = []

    async def answer(request):
        ports.append(request.transport.get_extra_info("peername")[1])
        return web.json_response({})

    async def run():
        app = web.Application()
        app.router.add_get("/v1/models", answer)
        async with TestServer(app) as server:
            line = wire.Wire(str(server.make_url("/")))
            for pause in (0, 0, 0.5):
                await asyncio.sleep(pause)
                await line.get("/v1/models")
            await line.close()

    asyncio.run(run())
    assert ports[0] == ports[1] != ports[2]


def test_a_refused_request_is_an_answer_with_the_servers_words(own):
    async def test(backend):
        refused = await backend.answer(ask(temperature=-1.0))
        return refused, await backend.answer(ask(cancel_after_s=0.0))

    refused, cancelled = with_backend(own, test)
    assert refused.status == 400 and "temperature" in refused.error
    assert cancelled.finish_reason == "cancelled" and cancelled.error is None


def test_what_cannot_be_used_is_refused_in_one_line(own):
    async def nothing(backend):
        return None

    for address, options, words in (
        ("http://127.0.0.1:1", {}, "cannot be reached"),
        ("127.0.0.1:8000", {}, "is no address"),
        (own, {"model": "other"}, "has no model 'other'; it serves fake"),
        (own, {"kind": "vllm"}, "is outrider, not vllm"),
        (own, {"kind": "vlm"}, "engine 'vlm' is unknown"),
    ):
        with pytest.raises(EngineUnfit, match=words):
            with_backend(address, nothing, **options)


def test_the_embedded_engine_answers_like_any_other():
    engine = Engine(
        text_target(context=512),
        drafters={"suffix": SuffixDrafter()},
        tokenizer=ByteTokenizer(),
        config=EngineConfig(slots=2, context=512, reuse_prefix=False),
        budget=FixedBudget(nodes=8, depth=6),
    )

    async def test():
        backend = EmbeddedBackend(engine, ByteTokenizer(), drafter="suffix")
        try:
            both = await asyncio.gather(backend.answer(ask()), backend.answer(ask()))
            cancelled = await backend.answer(ask(max_tokens=400, cancel_after_s=0.01))
            with pytest.raises(UnsupportedOption, match="tool_choice"):
                await backend.answer(ask(tool_choice="required"))
            long = await backend.answer(ask(max_tokens=5000))
            return *both, cancelled, long, await backend.counters()
        finally:
            await backend.close()

    first, second, cancelled, long, counters = asyncio.run(test())
    assert first.tokens == second.tokens and len(first.tokens) == N
    assert sum(first.tokens_at) == N and len(first.tokens_at) == len(first.arrivals_s)
    assert first.acceptance.accepted > 0 and first.acceptance.told["verify_ms"] > 0
    assert first.acceptance.record(N) is not None
    assert cancelled.finish_reason == "cancelled"
    assert "context" in long.error or "exceeds" in long.error
    assert counters.requests == 3 and counters.running == 0


class EndingTarget(TextTarget):
    ends = True


FORMATS = [
    {"type": "json_object"},
    {
        "type": "json_schema",
        "json_schema": {
            "name": "answer",
            "schema": {
                "type": "object",
                "properties": {"ok": {"type": "boolean"}, "tag": {"enum": ["red", "green"]}},
                "required": ["ok", "tag"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "regex", "regex": "[a-c]{3}-[0-9]{5}"},
    {"type": "grammar", "grammar": 'start: "yes" | "no" | "maybe " /[0-9]{3}/'},
    {"type": "text"},
]


@pytest.mark.parametrize("wanted", FORMATS, ids=lambda f: f["type"])
def test_the_embedded_engine_follows_the_grammars_that_the_server_follows(wanted):
    """One seed, one text, whether it is asked here or over HTTP."""
    asked = {"max_tokens": 200, "seed": 5, "temperature": 0.8, "response_format": wanted}
    model = FakeModel(text_target(context=1024, kind=EndingTarget))

    async def here(drafter):
        engine = Engine(
            model.target,
            drafters={"suffix": SuffixDrafter()},
            tokenizer=model.tokenizer,
            config=EngineConfig(slots=2, context=1024),
            budget=FixedBudget(nodes=8, depth=6),
        )
        backend = EmbeddedBackend(engine, model.tokenizer, drafter=drafter)
        try:
            messages = ({"role": "user", "content": "hello"},)
            return await backend.answer(Ask(messages, **asked))
        finally:
            await backend.close()

    answers = [asyncio.run(here(drafter)) for drafter in ("none", "suffix")]
    served = with_client(
        fake_service(model=model), lambda c: c.post("/v1/chat/completions", chat_body(**asked))
    ).json()["choices"][0]
    assert {answer.text for answer in answers} == {served["message"]["content"]}
    text = answers[0].text
    if wanted["type"] == "json_object":
        assert text.startswith('{"')  # it may go on for ever
    if wanted["type"] == "json_schema":
        assert set(json.loads(text)) == {"ok", "tag"}
    if wanted["type"] == "regex":
        assert re.fullmatch(wanted["regex"], text)
    if wanted["type"] == "grammar":
        assert re.fullmatch(r"yes|no|maybe \d{3}", text)


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"type": "xml"}, "use one of text, json_object"),
        ({"type": "regex"}, "lacks regex"),
        ({"type": "regex", "regex": "("}, "the regex cannot be used"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}, "cannot be used"),
        ({"type": "json_schema", "json_schema": {"schema": float("nan")}}, "no JSON"),
    ],
)
def test_what_is_no_grammar_is_refused_here_as_well(wanted, why):
    engine = Engine(text_target(context=64), tokenizer=ByteTokenizer(), budget=FixedBudget(0, 0))
    backend = EmbeddedBackend(engine, ByteTokenizer())
    with pytest.raises(UnsupportedOption, match=why):
        asyncio.run(backend.answer(ask(response_format=wanted)))


TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "boolean"}},
                "required": ["x"],
            },
        },
    }
    for name in ("first", "second")
)
SECOND = {"type": "function", "function": {"name": "second"}}


def with_tools(model=None, **more):
    model = model or FakeModel(text_target(context=1024))
    drafters = {"suffix": SuffixDrafter()}
    engine = Engine(
        model.target,
        drafters=drafters,
        tokenizer=model.tokenizer,
        config=EngineConfig(slots=2, context=1024, reuse_prefix=False),
        budget=FixedBudget(nodes=8, depth=6),
    )
    tools = ServersChats(model.tokenizer)
    backend = EmbeddedBackend(engine, model.tokenizer, drafter="suffix", render=tools)

    async def run():
        try:
            return await backend.answer(ask(**{"tools": TOOLS, **more}))
        finally:
            await backend.close()

    return asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("choice", ["required", SECOND], ids=["required", "named"])
def test_a_forced_tool_call_is_the_one_that_the_server_gives(own, choice, stream):
    """The embedded engine is handed the server's rules: same prompt, same grammar, same call."""
    answer = with_tools(tool_choice=choice, stream=stream)

    async def test(backend):
        return await backend.answer(ask(tools=TOOLS, tool_choice=choice, stream=stream))

    served = with_backend(own, test)
    [(name, arguments)] = answer.tool_calls
    assert answer.tool_calls == served.tool_calls
    assert answer.prompt_tokens == served.prompt_tokens
    assert answer.finish_reason == served.finish_reason == "tool_calls"
    assert name in {"first", "second"} if choice == "required" else name == "second"
    assert isinstance(json.loads(arguments)["x"], bool) and answer.text == ""


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_tools_that_may_be_used_are_told_as_on_the_server(own, choice):
    answer = with_tools(tool_choice=choice)

    async def test(backend):
        return await backend.answer(ask(tools=TOOLS, tool_choice=choice))

    served = with_backend(own, test)
    assert answer.prompt_tokens == served.prompt_tokens
    assert (answer.text, answer.tool_calls) == (served.text, served.tool_calls)
    assert answer.finish_reason == served.finish_reason
    assert (answer.prompt_tokens > 2 * with_tools(tools=()).prompt_tokens) is (choice != "none")


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_read_in_every_format(name):
    template, text, content = WRITTEN[name]
    answer = with_tools(script_model(text, template), tools=CALLABLE, max_tokens=600)
    calls = [(name, json.loads(arguments)) for name, arguments in answer.tool_calls]
    assert calls == [("weather", json.loads(W)), ("add", json.loads(A))]
    assert answer.text == (content or "") and answer.finish_reason == "tool_calls"


def test_reasoning_is_kept_apart_and_calls_in_it_are_none():
    template, text, _ = WRITTEN["hermes"]
    thought = f"<think>Perhaps {text.removeprefix('Let me see.')}?</think>\n"
    answer = with_tools(
        script_model(f"{thought}Hello", f"{template} </think>"), tools=CALLABLE, max_tokens=900
    )
    assert (answer.text, answer.tool_calls, answer.finish_reason) == ("Hello", (), "stop")
    assert "weather" in answer.reasoning and "think" not in answer.reasoning
    alone = with_tools(script_model(f"{thought}Hello", "</think>"), tools=(), max_tokens=900)
    assert alone.text == "Hello" and alone.reasoning == answer.reasoning


def test_a_choice_of_none_reads_no_calls():
    template, text, _ = WRITTEN["hermes"]
    answer = with_tools(
        script_model(text, template), tools=CALLABLE, tool_choice="none", max_tokens=600
    )
    assert answer.text == text and not answer.tool_calls and answer.finish_reason == "stop"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"prompt": "plain"}, "tools"),
        ({"tool_choice": "required", "tools": ()}, "without tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "no"}}}, "names 'no'"),
        ({"tool_choice": "required", "prompt": "plain", "tools": ()}, "tool_choice"),
        (
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format together",
        ),
    ],
)
def test_a_choice_of_tools_that_cannot_be_is_refused(more, why):
    with pytest.raises(UnsupportedOption, match=why):
        with_tools(**more)


VLLM = {
    "metrics": {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + 7 / 3,
            "draft_acceptance_rate": 7 / 12,
            "acceptance_histogram": [0, 1, 0, 2, 0],
            "num_spec_steps": 3,
            "num_accepted_draft_tokens": 7,
            "num_draft_tokens": 12,
            "num_spec_tokens": 4,
        }
    }
}


def test_vllm_steps_without_a_guess_are_added():
    told = vllm.read_acceptance(VLLM)
    assert told.target_steps(12) == 5  # three steps with 10 tokens and two plain ones
    record = told.record(12)
    assert record.acceptance_histogram == {0: 2, 1: 1, 3: 2}
    assert record.mean_acceptance_length == 1 + 7 / 5
    assert told.positions() == (3, 2, 2)
    assert told.rejections() == (0, 1, 0, 2)  # every step was four wide: exact


def test_a_payload_that_contradicts_itself_is_no_payload():
    broken = {"metrics": {"speculative_decoding": dict(VLLM["metrics"]["speculative_decoding"])}}
    broken["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] = 8
    assert vllm.read_acceptance(broken) is None
    assert vllm.read_acceptance({"metrics": {"speculative_decoding": None}}) is None


def test_each_engines_words_become_ours():
    sg = sglang.read_acceptance(
        {
            "sglext": {
                "spec_tokens_details": {
                    "spec_verify_ct": 3,
                    "spec_num_correct_drafts": 4,
                    "spec_num_proposed_drafts": 9,
                    "spec_correct_drafts_histogram": [0, 2, 1, 0],
                }
            }
        }
    )
    assert (sg.accepted, sg.steps, sg.drafted_is_nominal) == (4, 3, True)
    assert sg.rejections() is None  # the width is nominal
    trt = tensorrt_llm.read_acceptance(
        {
            "choices": [
                {
                    "speculative_decoding": {
                        "total_accepted_draft_tokens": 4,
                        "total_draft_tokens": 9,
                        "num_spec_steps": 3,
                        "acceptance_histogram": [0, 2, 1, 0],
                        "num_spec_tokens": 3,
                    }
                }
            ]
        }
    )
    assert (trt.accepted, trt.drafted, trt.rejections()) == (4, 9, (0, 2, 1))
    ll = llamacpp.read_acceptance(
        {"timings": {"predicted_n": 20, "draft_n": 12, "draft_n_accepted": 9}}
    )
    assert (ll.accepted, ll.drafted, ll.steps, ll.histogram) == (9, 12, None, None)
    assert ll.target_steps(20) == 11 and ll.record(20) is None
    plain = llamacpp.read_acceptance({"timings": {"predicted_n": 5}})
    assert plain.record(5).mean_acceptance_length == 1.0


def test_an_unknown_servers_payload_is_read_where_only_one_engine_claims_it():
    assert read_any(VLLM).engine == "openai"
    assert read_any({**VLLM, "timings": {"predicted_n": 5}}) is None
    assert read_any({}) is None


PAGE = """# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0"} 3.0
vllm:spec_decode_num_drafts_total{engine="1"} 4.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e+09
"""


def test_counters_are_read_by_exact_name_over_all_engines():
    page = parse(PAGE)
    assert page.total("vllm:spec_decode_num_drafts_total") == 7
    assert page.total("vllm:spec_decode_num_drafts") is None
    assert page.by_label("vllm:spec_decode_num_drafts_total", "engine") == {"0": 3, "1": 4}


def test_counters_that_went_back_tell_nothing():
    before = Counters(at=0, drafts=5, drafted=20, accepted=9, per_position={0: 5, 1: 4})
    after = Counters(at=1, drafts=1, drafted=4, accepted=2, per_position={0: 1, 1: 1})
    assert between(before, after, engine="x") == (
        None,
        "a counter went back: the engine was restarted in between",
    )
    assert between(Counters(at=0), Counters(at=1), engine="x")[0] is None
