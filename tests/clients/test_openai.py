"""The `openai` package against our server: sync, async, streams, errors, tools, structures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

KEY = "sk-client-test-key"
MESSAGES: list[Any] = [{"role": "user", "content": "hello there"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "enum": ["here", "there"]}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def client(server: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=server, api_key=KEY, max_retries=0, timeout=60) as found:
        yield found


def test_models(client: OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["fake", "fake@fast", "fake@baseline"]
    assert client.models.retrieve("fake@baseline").owned_by == "outrider"


def test_a_chat_and_its_stream_say_the_same(client: OpenAI) -> None:
    given: Any = {"model": "fake", "messages": MESSAGES, "max_tokens": 30, "seed": 3}
    whole = client.chat.completions.create(**given)
    assert whole.choices[0].finish_reason == "length" and whole.usage is not None
    assert whole.usage.completion_tokens == 30 and whole._request_id
    assert whole.metrics["speculative_decoding"]["num_spec_steps"] > 0  # type: ignore[attr-defined]
    stream = client.chat.completions.create(
        **given, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices


def test_the_stream_helper_understands_our_events(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="fake", messages=MESSAGES, max_tokens=200, stop=["q"]
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content


def test_many_at_once_with_the_asynchronous_client(server: str) -> None:
    async def run() -> list[str | None]:
        async with AsyncOpenAI(base_url=server, api_key=KEY, max_retries=0) as client:

            async def one(number: int) -> str | None:
                made = await client.chat.completions.create(
                    model=("fake", "fake@baseline")[number % 2],
                    messages=MESSAGES,
                    max_tokens=30,
                    seed=number // 2,
                )
                return made.choices[0].message.content

            return await asyncio.gather(*(one(number) for number in range(8)))

    texts = asyncio.run(run())
    assert texts[0::2] == texts[1::2] and len(set(texts)) > 1


def test_leaving_a_stream_early(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=3000, stream=True
    )
    for _, _ in zip(range(3), stream, strict=False):
        pass
    stream.close()
    assert client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=4)


def test_logprobs(client: OpenAI) -> None:
    made = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=12, logprobs=True, top_logprobs=2
    )
    told = made.choices[0].logprobs
    assert told is not None and told.content is not None and len(told.content) == 12
    assert "".join(entry.token for entry in told.content) == made.choices[0].message.content


class Answer(BaseModel):
    mood: Literal["good", "bad"]
    sure: bool


def test_structured_output_is_parsed(client: OpenAI) -> None:
    made = client.chat.completions.parse(
        model="fake", messages=MESSAGES, max_tokens=100, response_format=Answer
    )
    assert isinstance(made.choices[0].message.parsed, Answer)


def test_a_tool_call_there_and_back(client: OpenAI) -> None:
    made = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=100, tools=[TOOL], tool_choice="required"
    )
    message = made.choices[0].message
    assert message.tool_calls and made.choices[0].finish_reason == "tool_calls"
    call: Any = message.tool_calls[0]
    assert json.loads(call.function.arguments)["place"] in ("here", "there")
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    again = client.chat.completions.create(
        model="fake",
        messages=[*MESSAGES, message, result],  # the SDK's own object goes back as it is
        max_tokens=10,
        tools=[TOOL],
    )
    assert again.choices[0].message.content


def test_a_streamed_tool_call(client: OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    with client.chat.completions.stream(
        model="fake", messages=MESSAGES, max_tokens=100, tools=[TOOL], tool_choice=named
    ) as stream:
        final = stream.get_final_completion()
    [call] = final.choices[0].message.tool_calls or []
    assert call.function.name == "weather" and json.loads(call.function.arguments)


def test_completions(client: OpenAI) -> None:
    made = client.completions.create(model="fake", prompt=["a", "b"], max_tokens=5, logprobs=1)
    assert [choice.index for choice in made.choices] == [0, 1]
    stream = client.completions.create(model="fake", prompt="a", max_tokens=5, stream=True, seed=1)
    text = "".join(chunk.choices[0].text for chunk in stream)
    whole = client.completions.create(model="fake", prompt="a", max_tokens=5, seed=1)
    assert text == whole.choices[0].text


def test_errors_are_the_clients_own_classes(client: OpenAI, server: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model="fake", messages=MESSAGES, temperature=-1)
    assert refusal.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    with (
        OpenAI(base_url=server, api_key="sk-wrong-key", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_a_profile_by_header(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="fake",
        messages=MESSAGES,
        max_tokens=4,
        extra_headers={"x-outrider-profile": "baseline"},
    )
    assert raw.headers["x-outrider-profile"] == "baseline"
