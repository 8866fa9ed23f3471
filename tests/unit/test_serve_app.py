"""The server through its ASGI door: what it answers, refuses, and does when somebody leaves."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from outrider.drafters.replay import Recording, save_recordings
from outrider.engine import CostBudget, CostTable, FixedBudget
from outrider.errors import InvalidParameter
from outrider.models.cache import KVCache
from outrider.models.target import Forward, Segment
from outrider.serve.keys import hash_key
from outrider.serve.run import serve
from outrider.serve.service import Service
from outrider.testing.asgi import AsgiClient, Response, parse_events
from outrider.testing.fakes import ByteTokenizer, TableTarget
from outrider.testing.serving import (
    NAME,
    FakeModel,
    TextTarget,
    chat_body,
    fake_service,
    text_target,
    with_client,
)

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class EndingTarget(TextTarget):
    ends = True


def get(path: str, service: Service | None = None, **options: Any) -> Response:
    return with_client(service or fake_service(), lambda client: client.get(path), **options)


def post(
    path: str, body: Any, service: Service | None = None, headers: dict[str, str] | None = None
) -> Response:
    return with_client(
        service or fake_service(), lambda client: client.post(path, body, headers=headers or {})
    )


def refusal(response: Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and "\n" not in error["message"]
    return error


# -- what it answers ------------------------------------------------------------------------------


def test_health_and_readiness() -> None:
    assert get("/health").json() == {"status": "ok"}
    assert get("/ready").json() == {"status": "ready"}


def test_models_are_the_name_and_every_profile() -> None:
    models = get("/v1/models").json()
    assert [m["id"] for m in models["data"]] == [NAME, f"{NAME}@fast", f"{NAME}@baseline"]
    for model in models["data"]:
        assert model["object"] == "model" and model["owned_by"] and model["created"] > 0
        assert model["max_model_len"] == 1024
    assert get(f"/v1/models/{NAME}@baseline").json()["parent"] == NAME
    assert get("/v1/models/other").status == 404


def test_a_chat_completion_has_openais_form() -> None:
    answer = post(CHAT, chat_body()).json()
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    [choice] = answer["choices"]
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"]
    assert choice["message"]["refusal"] is None
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 24
    assert answer["model"] == NAME and answer["system_fingerprint"].startswith("fp_")


def test_the_answer_tells_of_its_speculation() -> None:
    told = post(CHAT, chat_body(max_tokens=60)).json()["metrics"]["speculative_decoding"]
    assert told["num_accepted_draft_tokens"] > 0 and told["lossless"] is True
    assert told["num_spec_steps"] == sum(told["acceptance_histogram"])
    assert told["mean_acceptance_length"] > 1 and told["reason"] is None
    assert (told["profile"], told["drafter"]) == ("fast", "suffix")
    assert "per_step_accepted" not in told
    detailed = post(CHAT, chat_body(), fake_service(details=True)).json()["metrics"]
    assert len(detailed["speculative_decoding"]["per_step_accepted"]) > 0
    plain = post(CHAT, chat_body(model=f"{NAME}@baseline")).json()["metrics"]
    assert plain["speculative_decoding"]["reason"] == "no drafter"
    assert post(CHAT, chat_body(n=2)).json()["metrics"] is None


def test_the_fingerprint_changes_with_profile_and_target() -> None:
    prints = {
        post(CHAT, chat_body(model=name)).json()["system_fingerprint"]
        for name in (NAME, f"{NAME}@fast", f"{NAME}@baseline")
    }
    assert len(prints) == 2
    other = FakeModel(text_target(kind=EndingTarget))
    other.target.fingerprint = "another"
    assert post(CHAT, chat_body(), fake_service(model=other)).json()["system_fingerprint"] not in (
        prints
    )


def test_the_fingerprint_changes_with_the_content_of_the_drafters_files(tmp_path: Path) -> None:
    file = tmp_path / "recorded.jsonl"

    def fingerprint(output: list[int]) -> str:
        save_recordings(file, [Recording.of([1, 2], output)])
        service = fake_service(profiles={"fast": {"drafter": f"replay:{file}"}})
        choice = service.profiles.choice("fast", model=NAME)
        service.stop()
        return choice.fingerprint

    one, two = fingerprint([3, 4]), fingerprint([3, 5])
    assert one != two and fingerprint([3, 4]) == one


def test_a_profile_is_chosen_by_header_or_by_name() -> None:
    by_header = post(CHAT, chat_body(), headers={"x-outrider-profile": "baseline"})
    assert by_header.headers["x-outrider-profile"] == "baseline"
    both = post(CHAT, chat_body(model=f"{NAME}@fast"), headers={"x-outrider-profile": "baseline"})
    assert both.status == 400
    assert post(CHAT, chat_body(), headers={"x-outrider-profile": "no"}).status == 400
    assert refusal(post(CHAT, chat_body(model=f"{NAME}@no")))["code"] == "model_not_found"
    closed = fake_service(choose_profile=False)
    assert post(CHAT, chat_body(model=f"{NAME}@baseline"), closed).status == 403


def test_profiles_have_rules_of_their_own() -> None:
    profiles = {
        "walking": {"drafter": "ngram"},
        "judged": {"drafter": "ngram", "rule": "block"},
    }
    service = fake_service(profiles=profiles)
    rules: dict[str, set[str]] = {}

    async def ask(client: AsgiClient) -> None:
        taken = service.worker.engine.take

        def noted(request: int) -> Any:
            done = taken(request)
            rules.setdefault(done.params.seed, set()).update(step.rule for step in done.steps)
            return done

        service.worker.engine.take = noted  # type: ignore[method-assign]
        asked = [
            client.post(CHAT, chat_body(model=f"{NAME}@{name}", seed=seed), headers={})
            for seed, name in enumerate((*profiles, "baseline"))
        ]
        assert {answer.status for answer in await asyncio.gather(*asked)} == {200}

    with_client(service, ask)
    assert rules == {0: {"walk"}, 1: {"block"}, 2: {"walk"}}


def test_a_rule_that_cannot_judge_its_profiles_drafter_is_refused_at_start() -> None:
    for settings in (
        {"profiles": {"fast": {"drafter": "suffix", "rule": "block"}}},
        {"engine": {"rule": "block"}},
    ):
        with pytest.raises(InvalidParameter, match="profile fast: rule block judges chains"):
            fake_service(**settings)
    fake_service(profiles={"fast": {"drafter": "suffix", "rule": "walk"}}, engine={"rule": "block"})


def test_several_answers_have_seeds_of_their_own() -> None:
    body = chat_body(n=3, temperature=1.5)
    choices = post(CHAT, body).json()["choices"]
    texts = [choice["message"]["content"] for choice in choices]
    assert [choice["index"] for choice in choices] == [0, 1, 2] and len(set(texts)) == 3
    assert (
        texts[0]
        == post(CHAT, chat_body(temperature=1.5)).json()["choices"][0]["message"]["content"]
    )


def test_logprobs_are_one_entry_per_token_also_where_a_step_brings_several() -> None:
    answer = post(CHAT, chat_body(logprobs=True, top_logprobs=3)).json()
    told = answer["metrics"]["speculative_decoding"]
    assert told["num_spec_steps"] < 24
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == 24
    assert (
        "".join(entry["token"] for entry in entries) == answer["choices"][0]["message"]["content"]
    )
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3 and entry["logprob"] <= 0
        assert bytes(entry["bytes"]).decode() == entry["token"]
    plain = post(CHAT, chat_body(logprobs=True, top_logprobs=3, model=f"{NAME}@baseline")).json()
    assert plain["choices"][0]["logprobs"]["content"] == entries


def test_completions_take_texts_and_tokens() -> None:
    body = {"model": NAME, "prompt": "hello", "max_tokens": 8, "seed": 1}
    one = post(TEXT, body).json()
    assert one["object"] == "text_completion" and one["choices"][0]["finish_reason"] == "length"
    tokens = post(TEXT, {**body, "prompt": list(b"hello")}).json()
    assert tokens["choices"][0]["text"] == one["choices"][0]["text"]
    both = post(TEXT, {**body, "prompt": ["hello", "other"], "n": 2}).json()
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert both["choices"][0]["text"] == one["choices"][0]["text"]
    assert both["usage"]["prompt_tokens"] == 10 and both["usage"]["completion_tokens"] == 32
    echo = post(TEXT, {**body, "echo": True}).json()
    assert echo["choices"][0]["text"] == "hello" + one["choices"][0]["text"]


def test_completions_tell_logprobs_in_their_own_form() -> None:
    body = {"model": NAME, "prompt": "hello", "max_tokens": 8, "logprobs": 2}
    choice = post(TEXT, body).json()["choices"][0]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"] and told["text_offset"] == list(range(8))
    assert all(len(top) == 2 for top in told["top_logprobs"]) and len(told["token_logprobs"]) == 8


NO_SPECIALS = {"256": -100, "257": -100, "258": -100}


def any_bytes() -> FakeModel:
    """A model whose tokens are parts of characters, more often than not."""
    return FakeModel(
        TableTarget(
            vocab_size=ByteTokenizer.vocab_size,
            order=1,
            sharpness=2.0,
            context_length=2048,
            end_tokens=ByteTokenizer.end_tokens,
            name=NAME,
        )
    )


@pytest.mark.parametrize("streamed", [False, True])
def test_log_probabilities_of_parts_of_characters_tell_their_bytes(streamed: bool) -> None:
    body = chat_body(logprobs=True, top_logprobs=5, return_token_ids=True, stream=streamed)
    body["logit_bias"] = NO_SPECIALS
    response = post(CHAT, body, fake_service(model=any_bytes()))
    if streamed:
        chunks = [c["choices"][0] for c in response.events if c != "[DONE]"]
        content = [e for c in chunks if c["logprobs"] for e in c["logprobs"]["content"]]
        ids = [token for c in chunks for token in c.get("token_ids", ())]
        text = "".join(c["delta"].get("content") or "" for c in chunks)
    else:
        [choice] = response.json()["choices"]
        content, ids = choice["logprobs"]["content"], choice["token_ids"]
        text = choice["message"]["content"]
    assert len(content) == len(ids) == 24 and max(ids) > 127
    assert [entry["bytes"] for entry in content] == [[token] for token in ids]
    assert bytes(b for e in content for b in e["bytes"]).decode(errors="replace") == text
    for entry in content:
        tops = [tuple(top["bytes"]) for top in entry["top_logprobs"]]
        assert len(set(tops)) == 5
        assert all(
            top["token"] == bytes(top["bytes"]).decode(errors="replace")
            for top in entry["top_logprobs"]
        )


@pytest.mark.parametrize("streamed", [False, True])
def test_older_log_probabilities_have_a_name_for_each_part_of_a_character(streamed: bool) -> None:
    body = {"model": NAME, "prompt": "aé", "max_tokens": 40, "seed": 3, "logprobs": 5}
    body |= {"stream": streamed, "return_token_ids": True, "logit_bias": NO_SPECIALS}
    response = post(TEXT, body, fake_service(model=any_bytes()))
    if streamed:
        parts = [c["choices"][0] for c in response.events if c != "[DONE]"]
    else:
        parts = response.json()["choices"]
    assert parts[0]["prompt_token_ids"] == list("aé".encode())
    assert not any("prompt_token_ids" in part for part in parts[1:])
    text = "".join(part["text"] for part in parts)
    told = [part["logprobs"] for part in parts]
    ids = [token for part in parts for token in part["token_ids"]]
    names = [name for entry in told for name in entry["tokens"]]
    assert len(ids) == len(names) == 40
    for token, name in zip(ids, names, strict=True):
        assert name == (chr(token) if token < 128 else f"bytes:\\x{token:02x}")
    assert all(len(top) == 5 for entry in told for top in entry["top_logprobs"])
    offsets = [at for entry in told for at in entry["text_offset"]]
    for index, at in enumerate(offsets):
        before = bytes(ids[:index]).decode(errors="replace")
        assert at in (len(before), len(before) - 1)  # an unfinished character is none yet
        assert text.startswith(before[:at])


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_tokens_may_be_told_by_their_ids(path: str) -> None:
    body: dict[str, Any] = {"max_tokens": 4, "logprobs": 2, "prompt": "a"}
    if path == CHAT:
        body = chat_body(max_tokens=4, logprobs=True, top_logprobs=2)
    body |= {"model": NAME, "return_tokens_as_token_ids": True, "return_token_ids": True}
    answer = post(path, body).json()
    [choice] = answer["choices"]
    named = [f"token_id:{token}" for token in choice["token_ids"]]
    told = choice["logprobs"]
    assert named == (told["tokens"] if path == TEXT else [e["token"] for e in told["content"]])
    place = answer if path == CHAT else choice
    assert len(place["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    plain = post(path, {k: v for k, v in body.items() if not k.startswith("return")}).json()
    assert "token_ids" not in plain["choices"][0] and "prompt_token_ids" not in plain


def test_tokens_there_and_back() -> None:
    tokens = post("/tokenize", {"prompt": "hé"}).json()
    assert tokens == {"count": 3, "max_model_len": 1024, "tokens": list("hé".encode())}
    assert post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "hé"}
    chat = post("/tokenize", {"messages": [{"role": "user", "content": "x"}]}).json()
    assert chat["count"] > 10


def test_a_stop_string_ends_the_answer() -> None:
    whole = post(CHAT, chat_body()).json()["choices"][0]["message"]["content"]
    cut = post(CHAT, chat_body(stop=[whole[9:12], "never"])).json()["choices"][0]
    assert (cut["message"]["content"], cut["finish_reason"]) == (
        whole[: whole.index(whole[9:12])],
        "stop",
    )


# -- streams --------------------------------------------------------------------------------------


def stream(body: dict[str, Any], service: Service | None = None) -> tuple[Response, list[Any]]:
    response = post(CHAT, {**body, "stream": True}, service)
    return response, response.events


def test_a_stream_has_openais_form() -> None:
    response, events = stream(chat_body())
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    *chunks, done = events
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({c["id"] for c in chunks}) == 1
    reasons = [c["choices"][0]["finish_reason"] for c in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert chunks[-1]["choices"][0]["delta"] == {}
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    assert text == post(CHAT, chat_body()).json()["choices"][0]["message"]["content"]
    assert all("usage" not in c for c in chunks)


def test_usage_comes_in_a_chunk_of_its_own_when_asked_for() -> None:
    _, events = stream(chat_body(stream_options={"include_usage": True}))
    *chunks, last, done = events
    assert done == "[DONE]" and all(c["usage"] is None for c in chunks)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 24
    assert last["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_usage_may_be_counted_in_every_chunk(path: str) -> None:
    tokens = 400  # so many that a loop that waits for its turn does not get them all at once
    body = chat_body() if path == CHAT else {"model": NAME, "prompt": "hello"}
    body |= {"max_tokens": tokens, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = post(path, {**body, "stream_options": options}).events
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == tokens == last["usage"]["completion_tokens"]
    assert 0 < counts[0] < tokens


def test_streamed_logprobs_are_one_entry_per_token() -> None:
    _, events = stream(chat_body(logprobs=True, top_logprobs=1))
    entries = [
        entry
        for chunk in events[:-1]
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    whole = post(CHAT, chat_body(logprobs=True, top_logprobs=1)).json()
    assert entries == whole["choices"][0]["logprobs"]["content"]


def test_several_answers_in_one_stream() -> None:
    _, events = stream(chat_body(n=2, temperature=1.2))
    texts = ["", ""]
    for chunk in events[:-1]:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    whole = post(CHAT, chat_body(n=2, temperature=1.2)).json()
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]


def test_a_streamed_completion_is_the_whole_one() -> None:
    body = {"model": NAME, "prompt": "hello", "max_tokens": 12, "logprobs": 1, "seed": 1}
    response = post(TEXT, {**body, "stream": True, "stream_options": {"include_usage": True}})
    *chunks, last, done = response.events
    whole = post(TEXT, body).json()["choices"][0]
    assert done == "[DONE]" and last["choices"] == []
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole["text"]
    tokens = [t for c in chunks for t in c["choices"][0]["logprobs"]["tokens"]]
    assert tokens == whole["logprobs"]["tokens"]


def test_padded_chunks_have_few_sizes() -> None:
    response, _ = stream(chat_body(stream_options={"include_obfuscation": True}))
    sizes = {len(block) + 2 for block in response.body.split(b"\n\n") if b"DONE" not in block}
    assert all(size % 256 == 0 for size in sizes - {2})


def test_a_profile_may_gather_what_it_streams() -> None:
    profiles = {"slow": {"drafter": "suffix", "interval_ms": 400, "pad": True}}
    _, events = stream(chat_body(), fake_service(profiles=profiles))
    assert len(events) <= 4 and "obfuscation" in events[0]
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in events[:-1])
    assert text == post(CHAT, chat_body()).json()["choices"][0]["message"]["content"]


def test_a_fault_in_a_stream_is_an_event_and_no_end_mark_follows() -> None:
    model = FakeModel(text_target(kind=FailingLater))
    response, events = stream(chat_body(), fake_service(model=model))
    assert response.status == 200
    assert events[-1]["error"]["code"] == "internal_error" and "[DONE]" not in events


def test_a_fault_before_the_first_byte_has_a_status() -> None:
    response, _ = stream(chat_body(max_tokens=1600))
    assert response.status == 400 and refusal(response)["code"] == "context_length_exceeded"


class FailingLater(TextTarget):
    """Fails every pass once twelve tokens are cached behind the prompt."""

    def forward(
        self, segments: Sequence[Segment], cache: KVCache, *, features: tuple[int, ...] = ()
    ) -> Forward:
        if any(cache.lengths[s.slot] > 34 for s in segments):
            raise RuntimeError("device lost at 0xdeadbeef")
        return super().forward(segments, cache, features=features)


# -- structured output and tools ------------------------------------------------------------------

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("add", "double")
]


@pytest.mark.parametrize("model", [NAME, f"{NAME}@baseline"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_json_schema_is_kept(model: str, streamed: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}, "size": {"type": "boolean"}},
        "required": ["colour", "size"],
        "additionalProperties": False,
    }
    body = chat_body(
        model=model,
        max_tokens=80,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    if streamed:
        _, events = stream(body)
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in events[:-1])
    else:
        text = post(CHAT, body).json()["choices"][0]["message"]["content"]
    assert set(json.loads(text)) == {"colour", "size"}


def test_regular_expressions_and_grammars_are_kept() -> None:
    formats = [
        ({"type": "regex", "regex": "[ab]{4}"}, 4),
        ({"type": "grammar", "grammar": 'start: "no"'}, 2),
    ]
    for wanted, length in formats:
        choice = post(CHAT, chat_body(response_format=wanted)).json()["choices"][0]
        assert len(choice["message"]["content"]) == length and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_forced_call_is_made_streamed_or_not(choice: Any) -> None:
    body = chat_body(max_tokens=200, tools=TOOLS, tool_choice=choice)
    answer = post(CHAT, body).json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] is None
    [call] = answer["message"]["tool_calls"]
    assert call["function"]["name"] in ("add", "double") and call["id"].startswith("call_")
    arguments = json.loads(call["function"]["arguments"])
    assert 0 <= arguments["a"] <= 9
    _, events = stream(body)
    deltas = [c["choices"][0]["delta"].get("tool_calls", [None])[0] for c in events[:-1]]
    first, *rest = [delta for delta in deltas if delta is not None]
    assert first["index"] == 0 and first["id"] and first["function"]["name"]
    assert all("id" not in delta for delta in rest)
    text = first["function"]["arguments"] + "".join(d["function"]["arguments"] for d in rest)
    assert text == call["function"]["arguments"]
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_tools_that_need_not_be_called() -> None:
    for choice in ("auto", "none"):
        answer = post(CHAT, chat_body(tools=TOOLS, tool_choice=choice)).json()["choices"][0]
        assert answer["message"]["content"] and answer["finish_reason"] == "length"


def test_a_conversation_with_calls_and_results_is_taken() -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1}'},
    }
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]
    assert post(CHAT, chat_body(messages=messages, tools=TOOLS)).status == 200


# -- what it refuses ------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"min_p": 2}, "min_p"),
    ({"top_k": -2}, "top_k"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": 5}, "n"),
    ({"n": 16384}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 5000}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"min_tokens": 100}, "min_tokens"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 9}, "stop"),
    ({"stop": "x" * 300}, "stop"),
    ({"seed": 2**64}, "seed"),
    ({"logit_bias": {"259": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"stop_token_ids": [300]}, "stop_token_ids"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS + TOOLS}, "tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, None),
    ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, None),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "regex", "regex": "("}}, "response_format"),
    ({"response_format": {"type": "regex", "regex": "a" * 70_000}}, "response_format"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages.0.content",
    ),
    ({"messages": [{"role": "user", "content": "x" * 1200}]}, "max_tokens"),
    ({"modalities": ["audio"]}, None),
    ({"cache_salt": "with space"}, "cache_salt"),
    ({"cache_salt": "é"}, "cache_salt"),
    ({"ignore_eos": True, "response_format": {"type": "json_object"}}, None),
    ({"store": True}, "store"),
    ({"prediction": {"type": "content"}}, "prediction"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"best_of": 2}, "best_of"),
    ({"temprature": 1}, "temprature"),
]


@pytest.mark.parametrize(("more", "param"), REFUSED, ids=lambda v: json.dumps(v)[:40])
def test_what_cannot_be_is_refused_by_name(more: dict[str, Any], param: str | None) -> None:
    response = post(CHAT, chat_body(**more))
    error = refusal(response)
    assert response.status == 400 and error["type"] == "invalid_request_error"
    assert response.headers["x-should-retry"] == "false"
    if param is not None:
        assert (error["param"] or "").startswith(param.partition(".")[0])


def test_an_unknown_name_gets_a_suggestion() -> None:
    assert "did you mean temperature?" in refusal(post(CHAT, chat_body(temprature=1)))["message"]


def test_names_that_ask_for_nothing_are_let_pass() -> None:
    nothing = {"store": False, "best_of": None, "audio": None, "functions": []}
    noted = {"user": "u", "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "k"}
    assert post(CHAT, chat_body(**nothing, **noted, verbosity="low")).status == 200
    text = {"model": NAME, "prompt": "a", "best_of": 1, "suffix": ""}
    assert post(TEXT, text).status == 200 and post(TEXT, text | {"best_of": 2}).status == 400
    assert post(CHAT, chat_body(unheard_of=1), fake_service(ignore_unknown=True)).status == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"model": NaN}',
        b'{"model": "\\ud800", "messages": []}',
        b'{"model":"fake","messages":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"model":"fake","messages":[{"role":"user","content":"x"}],"temperature":1e999}',
        b'{"model":"fake","messages":[{"role":"user","content":"x"}],"seed":' + b"9" * 5000 + b"}",
    ],
    ids=range(10),
)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
def test_a_body_that_is_no_request_is_a_400(path: str, body: bytes) -> None:
    assert post(path, body).status == 400


def test_other_paths_and_methods() -> None:
    assert get("/v1/nothing").status == 404
    wrong = get(CHAT)
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
    assert post("/health", {}).status in (404, 405)
    plain = post(CHAT, b"{}", headers={"content-type": "text/plain"})
    assert plain.status == 415


@pytest.mark.parametrize(
    "prompt", ["", [], [""], [[]], [[1, 999]], [300], ["a"] * 17, [1, "a"], {"a": 1}, None]
)
def test_prompts_that_cannot_be_completed(prompt: Any) -> None:
    assert post(TEXT, {"model": NAME, "prompt": prompt}).status == 400


# -- who may come in ------------------------------------------------------------------------------

KEY = "sk-0123456789"
KEYS = [
    {"name": "anna", "sha256": hash_key(KEY)},
    {"name": "bert", "sha256": hash_key("sk-bert-secret"), "profiles": ["baseline"]},
]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/version", "/nothing", "//v1/models"])
def test_all_paths_but_the_public_ones_need_a_key(path: str) -> None:
    service = fake_service(keys=KEYS)

    async def test(client: AsgiClient) -> None:
        for headers in ({}, bearer("wrong"), {"authorization": KEY}, bearer(hash_key(KEY))):
            response = await client.get(path, headers=headers)
            assert response.status == 401 and refusal(response)["code"] == "invalid_api_key"
        assert (await client.get(path, headers=bearer(KEY))).status in (200, 404)
        assert (await client.get("/health")).status == 200

    with_client(service, test)


def test_a_key_may_be_held_to_its_profiles() -> None:
    service = fake_service(keys=KEYS)

    async def test(client: AsgiClient) -> None:
        client.headers |= bearer("sk-bert-secret")
        answer = await client.post(CHAT, chat_body())
        assert answer.headers["x-outrider-profile"] == "baseline"
        assert (await client.post(CHAT, chat_body(model=f"{NAME}@fast"))).status == 403
        models = (await client.get("/v1/models")).json()["data"]
        assert [m["id"] for m in models] == [NAME, f"{NAME}@baseline"]

    with_client(service, test)


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "a b", "x" * 300, ""])
def test_a_local_server_answers_to_local_names_only(host: str) -> None:
    assert get("/v1/models", headers={"host": host}).status == 403
    assert get("/v1/models", headers={"host": "127.0.0.1:8000"}).status == 200


def test_metrics_may_have_a_port_of_their_own() -> None:
    apart = fake_service(keys=KEYS, admin_port=0)
    assert get("/metrics", apart, headers=bearer(KEY)).status == 404
    apart = fake_service(keys=KEYS, admin_port=0)
    assert get("/metrics", apart, admin=True).status == 200
    apart = fake_service(keys=KEYS, admin_port=0)
    assert get("/v1/models", apart, admin=True).status == 404


def test_browsers_are_let_in_where_the_configuration_says_so_only() -> None:
    origin = {"origin": "https://app.example"}
    closed = get("/v1/models", headers=origin)
    assert "access-control-allow-origin" not in closed.headers
    service = fake_service(cors_origins=["https://app.example"])
    assert (
        get("/v1/models", service, headers=origin).headers["access-control-allow-origin"]
        == "https://app.example"
    )


# -- limits ---------------------------------------------------------------------------------------


def test_a_body_that_is_too_large_is_not_read() -> None:
    service = fake_service(limits={"body_bytes": 1000})

    async def test(client: AsgiClient) -> None:
        assert (await client.post(CHAT, chat_body("x" * 2000))).status == 413
        lying = {"content-length": "10"}
        call = client.start("POST", CHAT, chat_body("x" * 2000), headers=lying, parts=20)
        assert (await call.message() or {})["status"] == 413
        await call.task

    with_client(service, test)


def test_a_body_that_never_comes_is_given_up() -> None:
    service = fake_service(limits={"body_s": 0.05})

    async def test(client: AsgiClient) -> None:
        call = client.start("POST", CHAT, chat_body("x" * 100), parts=4)

        async def stall() -> Any:
            await asyncio.sleep(10)

        scope = {
            "type": "http",
            "method": "POST",
            "path": CHAT,
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        }
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await client.app(scope, stall, send)
        assert sent[0]["status"] == 408
        call.leave()
        await call.task

    with_client(service, test)


def test_too_many_headers_are_refused() -> None:
    many = {f"x-{number}": "y" for number in range(100)}
    assert get("/v1/models", headers=many).status == 431
    assert get("/v1/models", headers={"x-big": "y" * 20_000}).status == 431


def test_a_full_queue_is_a_429_that_says_when_to_come_back() -> None:
    service = fake_service(engine={"slots": 1, "queue": 1})

    async def test(client: AsgiClient) -> None:
        body = chat_body(max_tokens=400)
        responses = await asyncio.gather(*(client.post(CHAT, body) for _ in range(6)))
        codes = sorted(response.status for response in responses)
        assert codes[:2] == [200, 200] and 429 in codes
        late = next(r for r in responses if r.status == 429)
        assert int(late.headers["retry-after"]) >= 1 and late.headers["x-should-retry"] == "true"

    with_client(service, test)


def test_too_long_in_the_queue_is_a_429_as_well() -> None:
    service = fake_service(engine={"slots": 1, "patience_s": 0.02})

    async def test(client: AsgiClient) -> None:
        body = chat_body(max_tokens=450)
        responses = await asyncio.gather(*(client.post(CHAT, body) for _ in range(3)))
        assert sorted(response.status for response in responses) == [200, 429, 429]

    with_client(service, test)


def test_what_takes_too_long_is_a_504() -> None:
    service = fake_service(limits={"request_s": 0.05}, model=FakeModel(text_target(kind=Hanging)))
    try:
        response = with_client_hanging(service)
    finally:
        Hanging.go.set()
    assert response.status == 504


class Hanging(TextTarget):
    """Waits in every pass until it is let go."""

    go = threading.Event()

    def forward(
        self, segments: Sequence[Segment], cache: KVCache, *, features: tuple[int, ...] = ()
    ) -> Forward:
        self.go.wait(20)
        return super().forward(segments, cache, features=features)


def with_client_hanging(service: Service) -> Response:
    async def test(client: AsgiClient) -> Response:
        response = await client.post(CHAT, chat_body())
        Hanging.go.set()
        return response

    Hanging.go.clear()
    return with_client(service, test)


# -- leaving --------------------------------------------------------------------------------------


async def idle(service: Service) -> None:
    """Wait until nothing runs or waits."""
    while (
        service.worker.load.running or service.worker.load.waiting or service.worker.engine.has_work
    ):
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("phase", ["at once", "while decoding"])
def test_work_ends_when_the_client_leaves(streamed: bool, phase: str) -> None:
    target = text_target()
    service = fake_service(
        model=FakeModel(target),
        budget=FixedBudget(0, 0),  # a pass for each token
        engine={"slots": 1, "context": 2048},
    )

    async def test(client: AsgiClient) -> None:
        call = client.start("POST", CHAT, chat_body(max_tokens=1900, stream=streamed))
        if phase == "while decoding":
            if streamed:
                while b"content" not in (await call.message() or {}).get("body", b""):
                    pass
            else:
                while not service.worker.load.running:
                    await asyncio.sleep(0.002)
        call.leave()
        await call.task
        await idle(service)
        assert target.passes < 1000, "it ran on to its end"
        assert (await client.post(CHAT, chat_body())).status == 200

    with_client(service, test)
    ended = service.metrics.registry.get_sample_value(
        "outrider_requests_total",
        {"profile": "fast", "prompt_type": "unknown", "outcome": "cancelled"},
    )
    assert ended == 1 or phase == "at once"


def test_leaving_while_waiting_frees_the_place_in_the_queue() -> None:
    service = fake_service(engine={"slots": 1, "queue": 1, "context": 2048})

    async def test(client: AsgiClient) -> None:
        first = client.start("POST", CHAT, chat_body(max_tokens=1500))
        while not service.worker.load.running:
            await asyncio.sleep(0.002)
        second = client.start("POST", CHAT, chat_body())
        while not service.worker.engine.load.waiting:
            await asyncio.sleep(0.002)
        second.leave()
        await second.task
        first.leave()
        await first.task
        await idle(service)
        assert (await client.post(CHAT, chat_body())).status == 200

    with_client(service, test)


def test_others_are_untouched_when_one_leaves() -> None:
    service = fake_service()
    alone = post(CHAT, chat_body("other", max_tokens=100)).json()["choices"][0]["message"]

    async def test(client: AsgiClient) -> Any:
        other = asyncio.ensure_future(client.post(CHAT, chat_body("other", max_tokens=100)))
        leaver = client.start("POST", CHAT, chat_body(max_tokens=300, stream=True))
        await leaver.message()
        leaver.leave()
        await leaver.task
        return (await other).json()["choices"][0]["message"]

    assert with_client(service, test) == alone


# -- when the engine fails ------------------------------------------------------------------------


class FailingTarget(TextTarget):
    """Fails all passes while told to."""

    failing = True

    def forward(
        self, segments: Sequence[Segment], cache: KVCache, *, features: tuple[int, ...] = ()
    ) -> Forward:
        if self.failing:
            raise RuntimeError("device lost at 0xdeadbeef")
        return super().forward(segments, cache, features=features)


def test_a_failing_engine_is_a_500_and_unhealthy_until_it_recovers() -> None:
    target = text_target(kind=FailingTarget)
    service = fake_service(model=FakeModel(target))

    async def test(client: AsgiClient) -> None:
        for _ in range(2):
            response = await client.post(CHAT, chat_body())
            assert response.status == 500 and "0xdead" not in response.body.decode()
        assert (await client.get("/health")).status == 503
        assert (await client.get("/ready")).status == 503
        target.failing = False
        assert (await client.post(CHAT, chat_body())).status == 200
        assert (await client.get("/health")).status == 200

    with_client(service, test)


class DyingTarget(TextTarget):
    """Ends the engine's thread."""

    def forward(
        self, segments: Sequence[Segment], cache: KVCache, *, features: tuple[int, ...] = ()
    ) -> Forward:
        raise SystemExit("killed")


def test_a_dead_engine_is_a_503_and_nobody_waits_for_it() -> None:
    service = fake_service(model=FakeModel(text_target(kind=DyingTarget)))

    async def test(client: AsgiClient) -> None:
        assert (await client.post(CHAT, chat_body())).status == 503
        assert (await client.post(CHAT, chat_body())).status == 503
        assert (await client.get("/health")).status == 503

    with_client(service, test)


def test_a_draining_server_takes_nothing_new() -> None:
    service = fake_service()

    async def test(client: AsgiClient) -> None:
        service.draining = True
        response = await client.post(CHAT, chat_body())
        assert response.status == 503 and response.headers["retry-after"]
        assert (await client.get("/ready")).status == 503
        assert (await client.get("/health")).status == 200

    with_client(service, test)


# -- seeing it ------------------------------------------------------------------------------------


def test_metrics_count_tokens_steps_and_outcomes() -> None:
    service = fake_service()

    async def test(client: AsgiClient) -> str:
        headers = {"x-outrider-prompt-type": "code"}
        await client.post(CHAT, chat_body(), headers=headers)
        await client.post(CHAT, chat_body(stream=True), headers={"x-outrider-prompt-type": "x\ny"})
        await client.post(CHAT, chat_body(n=99))
        return (await client.get("/metrics")).body.decode()

    text = with_client(service, test)
    value = service.metrics.registry.get_sample_value
    for kind in ("code", "other"):
        labels = {"profile": "fast", "prompt_type": kind, "outcome": "length"}
        assert value("outrider_requests_total", labels) == 1
    assert value("outrider_output_tokens_total", {"profile": "fast"}) == 48
    assert value("outrider_refused_total", {"status": "400"}) == 1
    labels = {"profile": "fast", "prompt_type": "code"}
    assert value("gen_ai_server_time_to_first_token_seconds_count", labels) == 1
    assert value("outrider_inter_token_seconds_count", {**labels, "prompt_type": "other"}) >= 20
    accepted = value("outrider_spec_decode_accepted_tokens_total", {"profile": "fast"})
    positions = sum(
        value(
            "outrider_spec_decode_accepted_tokens_per_pos_total",
            {"profile": "fast", "position": str(p)},
        )
        or 0
        for p in range(8)
    )
    assert accepted == positions > 0
    assert "outrider_kv_cache_usage_ratio" in text and "outrider_batch_size_bucket" in text


def test_request_ids_come_back_where_they_are_fit() -> None:
    assert get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    for bad in ("a b", "x" * 200, 'a"b'):
        assert get("/health", headers={"x-request-id": bad}).headers["x-request-id"] != bad


def test_the_log_holds_no_text_and_no_forged_lines(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("outrider").propagate = True
    with caplog.at_level(logging.INFO, logger="outrider"):
        post(CHAT, chat_body("my secret prompt"), headers=bearer("sk-my-secret-key"))
        get("/v1/models\n00:00:00 info forged")
    from outrider.serve.logs import JsonLines, TextLines

    lines = [f.format(r) for f in (JsonLines(), TextLines()) for r in caplog.records]
    assert lines and all("\n" not in line for line in lines)
    assert not any("secret" in line for line in lines)


def test_events_are_told_apart_from_comments() -> None:
    assert parse_events(b': keep-alive\n\ndata: {"a":1}\n\ndata: [DONE]\n\n') == [
        {"a": 1},
        "[DONE]",
    ]


def test_a_waiting_stream_is_kept_alive() -> None:
    model = FakeModel(text_target(kind=Hanging))
    service = fake_service(model=model, limits={"keep_alive_s": 0.02})

    async def test(client: AsgiClient) -> bytes:
        call = client.start("POST", CHAT, chat_body(stream=True))
        body = b""
        async for message in call.messages():
            body += message.get("body", b"")
            if body.count(b": keep-alive") == 2:
                Hanging.go.set()
        return body

    Hanging.go.clear()
    body = with_client(service, test)
    assert body.startswith(b": keep-alive\n\n") and body.endswith(b"data: [DONE]\n\n")


# -- work outside the event loop ------------------------------------------------------------------


class SlowTokenizer(ByteTokenizer):
    """Renders until it is let go."""

    go = threading.Event()

    def chat(self, *args: Any, **options: Any) -> list[int]:
        self.go.wait(20)
        return super().chat(*args, **options)


def test_a_template_that_hangs_is_given_up_and_the_loop_goes_on() -> None:
    model = FakeModel(tokenizer=SlowTokenizer())
    service = fake_service(model=model, limits={"template_s": 0.1})

    async def test(client: AsgiClient) -> None:
        hanging = asyncio.ensure_future(client.post(CHAT, chat_body()))
        other = {"model": NAME, "prompt": "hello", "max_tokens": 4}
        assert (await client.post(TEXT, other)).status == 200
        assert not hanging.done()
        response = await hanging
        assert response.status == 400 and "0.1 s" in refusal(response)["message"]

    SlowTokenizer.go.clear()
    try:
        with_client(service, test)
    finally:
        SlowTokenizer.go.set()


def test_a_grammar_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    service = fake_service(limits={"grammar_s": 0.1})
    go = threading.Event()
    monkeypatch.setattr(service, "_follow", lambda *_: go.wait(20))

    async def test(client: AsgiClient) -> None:
        body = chat_body(response_format={"type": "json_object"})
        response = await client.post(CHAT, body)
        assert response.status == 400 and refusal(response)["code"] == "invalid_grammar"
        assert (await client.post(CHAT, chat_body())).status == 200

    try:
        with_client(service, test)
    finally:
        go.set()


def test_guessing_shrinks_as_the_batch_grows() -> None:
    """A row costs little until eight and much beyond: a request guesses more alone than not."""
    costs = CostTable({1: 10.0, 8: 10.5, 9: 60.0, 64: 600.0})
    proposed: dict[int, float] = {}
    for crowd in (1, 8):
        service = fake_service(
            budget=CostBudget(costs, nodes=16, depth=8), engine={"slots": 8}, details=True
        )

        async def test(client: AsgiClient, crowd: int = crowd) -> list[Any]:
            body = chat_body(max_tokens=100)
            answers = await asyncio.gather(*(client.post(CHAT, body) for _ in range(crowd)))
            return [answer.json()["metrics"]["speculative_decoding"] for answer in answers]

        told = with_client(service, test)
        steps = sum(answer["num_spec_steps"] for answer in told)
        proposed[crowd] = sum(answer["num_draft_tokens"] for answer in told) / steps
    assert proposed[1] > 2 * proposed[8]


def test_signals_do_afterwards_what_they_did_before() -> None:
    heard: list[int] = []

    def handler(number: int, frame: object) -> None:
        heard.append(number)

    addresses: list[str] = []

    async def run() -> None:
        task = asyncio.ensure_future(serve(fake_service(), listening=addresses.append))
        while not addresses:
            await asyncio.sleep(0.01)
        signal.raise_signal(signal.SIGINT)
        await task

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            signal.signal(number, handler)
        asyncio.run(run())
        assert all(signal.getsignal(number) is handler for number in before)
        assert heard == []  # the server ended by it, and nobody else was told
    finally:
        for number, was in before.items():
            signal.signal(number, was)


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_turns_out_too_complex_is_the_requests_own_fault(stream: bool) -> None:
    wanted = {"type": "regex", "regex": "(a{1000}){1000}"}
    response = post(CHAT, chat_body(response_format=wanted, stream=stream))
    body = response.events[-1] if response.status == 200 else response.json()
    error = body["error"]
    assert error["code"] == "too_complex" and "use a simpler one" in error["message"]
    assert error["type"] == "invalid_request_error"
    if not stream:
        assert response.status == 400 and response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"stop": 5}, "stop"),
    ],
)
def test_faults_are_named_as_the_request_names_them(wrong: dict[str, Any], param: str) -> None:
    response = post(CHAT, chat_body(**wrong))
    error = refusal(response)
    assert (response.status, error["param"]) == (400, param)
    assert error["message"].startswith(param)


def test_a_number_of_thousands_of_digits_is_refused() -> None:
    long = (
        b'{"model": "fake", "messages": [], "tool_choice": {"type": 1}, "x": ' + b"9" * 5000 + b"}"
    )
    for lenient in (False, True):
        service = fake_service(ignore_unknown=lenient)
        assert post(CHAT, long, service).status == 400


def test_a_model_with_an_empty_profile_is_not_here() -> None:
    response = post(CHAT, chat_body(model=f"{NAME}@"))
    assert (response.status, refusal(response)["code"]) == (404, "model_not_found")
