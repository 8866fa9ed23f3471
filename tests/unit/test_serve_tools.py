"""Tool calls and reasoning end to end: a target that writes a given text, guessed and streamed.

The drafter has seen the text before, so steps bring many tokens at once and end anywhere in a call.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.serve.text import KeepMarkers
from outrider.serve.tools import FORMATS, find_format, knows_tools
from outrider.testing.asgi import AsgiClient
from outrider.testing.fakes import END
from outrider.testing.serving import chat_body, fake_service, with_client
from tool_fakes import MARK, ONE, TOOLS, WRITTEN, A, SpecialTokenizer, W, script_model


def ask(text: str, template: str, **more: Any) -> dict[str, Any]:
    """The message of an answer whose text is given: whole, and twice as a stream, which must agree;
    the second stream's drafter knows the first answer."""
    service = fake_service(
        model=script_model(text, template),
        engine={"context": 2048},
        profiles={"fast": {"drafter": "suffix", "max_depth": 6}},
    )
    body = chat_body("go", max_tokens=600, **more)

    async def run(client: AsgiClient) -> dict[str, Any]:
        whole = (await client.post("/v1/chat/completions", body)).json()
        for _ in range(2):
            streamed = await client.post("/v1/chat/completions", {**body, "stream": True})
            assert put_together(streamed.events) == without_ids(whole["choices"][0])
        again = (await client.post("/v1/chat/completions", body)).json()
        assert again["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
        choice = whole["choices"][0]
        return {**choice["message"], "finish_reason": choice["finish_reason"]}

    return with_client(service, run)


def put_together(events: list[Any]) -> dict[str, Any]:
    *chunks, end = events
    assert end == "[DONE]"
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None}
    for chunk in chunks:
        [choice] = chunk["choices"]
        delta = choice["delta"]
        found["content"] += delta.get("content") or ""
        found["reasoning"] += delta.get("reasoning_content") or ""
        found["finish"] = choice["finish_reason"] or found["finish"]
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(found["calls"]) and call["type"] == "function"
                found["calls"].append([call["function"]["name"], ""])
            found["calls"][call["index"]][1] += call["function"]["arguments"]
    return found


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice["message"]
    calls = message.get("tool_calls") or []
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content") or "",
        "calls": [[call["function"]["name"], call["function"]["arguments"]] for call in calls],
        "finish": choice["finish_reason"],
    }


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_read_whole_and_streamed_alike(name: str) -> None:
    template, text, content = WRITTEN[name]
    message = ask(text, template, tools=TOOLS)
    assert message["finish_reason"] == "tool_calls" and message["content"] == content
    calls = message["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["weather", "add"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [
        json.loads(W),
        json.loads(A),
    ]
    ids = {call["id"] for call in calls}
    assert len(ids) == 2
    if name.startswith("mistral"):
        assert all(len(found) == 9 and found.isalnum() for found in ids)
    else:
        assert all(found.startswith("call_") for found in ids)


def test_one_call_where_one_was_asked_for() -> None:
    template, text, _ = WRITTEN["hermes"]
    message = ask(text, template, tools=TOOLS, parallel_tool_calls=False)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]


def test_without_tools_the_text_is_the_models_own() -> None:
    template, text, _ = WRITTEN["hermes"]
    message = ask(text, template)
    assert message["content"] == text and "tool_calls" not in message
    assert message["finish_reason"] == "stop"


def test_reasoning_is_apart_from_the_answer_and_from_calls() -> None:
    template = "tools <tool_call> <think></think>"
    text = f"<think>\nHm, the weather?\n</think>\n\nI look.\n<tool_call>\n{ONE}\n</tool_call>"
    message = ask(text, template, tools=TOOLS)
    assert message["reasoning_content"] == "Hm, the weather?\n"
    assert message["content"] == "I look." and len(message["tool_calls"]) == 1
    assert "reasoning_content" not in ask("Just yes.", template)


def asked(template: str, **more: Any) -> SpecialTokenizer:
    """The tokenizer after a request, with what it was told."""
    made = script_model("yes", template)
    with_client(
        fake_service(model=made, engine={"context": 2048}),
        lambda client: client.post("/v1/chat/completions", chat_body(**more)),
    )
    assert isinstance(made.tokenizer, SpecialTokenizer)
    return made.tokenizer


def test_a_template_with_a_place_for_tools_gets_them_and_others_a_message() -> None:
    told = asked("{{ tools }}", tools=TOOLS)
    assert [tool["function"]["name"] for tool in told.told] == ["weather", "add"]
    assert [message["role"] for message in told.messages] == ["user"]
    told = asked("no place", tools=TOOLS)
    assert told.told is None and told.messages[0]["role"] == "system"
    assert "weather" in told.messages[0]["content"]
    assert asked("{{ tools }}", tools=TOOLS, tool_choice="none").told is None


def test_reasoning_effort_is_all_that_a_request_may_tell_the_template() -> None:
    assert not asked("x").variables
    assert asked("x", reasoning_effort="low").variables == {"reasoning_effort": "low"}
    none = asked("x", reasoning_effort="none").variables
    assert none == {"reasoning_effort": "none", "enable_thinking": False}
    held = asked("x", response_format={"type": "regex", "regex": "a"}).variables
    assert held == {"enable_thinking": False}


def test_arguments_go_back_as_objects() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    sent = asked("{{ tools }}", messages=turns).messages
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{%- if tools %}<tool_call>", "hermes"),
        ("<|start_header_id|> ipython", "llama3"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("nothing that is known", "hermes"),
    ],
)
def test_the_format_is_read_off_the_template(template: str, name: str) -> None:
    assert find_format("auto", template) is FORMATS[name]
    assert find_format("llama3", template) is FORMATS["llama3"]
    assert not knows_tools("messages") and knows_tools("if tools is defined")


def test_markers_show_in_the_text_and_other_special_tokens_do_not() -> None:
    decoder = KeepMarkers(SpecialTokenizer(""), {MARK: "[TOOL_CALLS]"})
    assert decoder.decode([*b"a", MARK, *b"b", END, MARK]) == "a[TOOL_CALLS]b[TOOL_CALLS]"
    assert decoder.decode([]) == ""
