"""LangChain and LiteLLM against our server."""

from __future__ import annotations

import asyncio
from typing import Any

import litellm
import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

KEY = "sk-client-test-key"


def langchain(server: str, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model="fake", base_url=server, api_key=SecretStr(KEY), max_retries=0, seed=5, **more
    )


@tool
def both(a: bool, b: bool) -> bool:
    """Are both true?"""
    return a and b


class Point(BaseModel):
    """A point of a grid."""

    left: bool
    top: bool


def test_langchain_answers_streams_and_batches(server: str) -> None:
    chat = langchain(server, max_tokens=20)
    whole = chat.invoke("hello")
    assert whole.content and whole.response_metadata["finish_reason"] == "length"
    streamed = "".join(str(chunk.content) for chunk in chat.stream("hello"))
    assert streamed == whole.content
    assert [m.content for m in chat.batch(["hello", "hello"])] == [whole.content] * 2
    assert asyncio.run(chat.ainvoke("hello")).content == whole.content


def test_langchain_calls_tools_and_gets_structures(server: str) -> None:
    chat = langchain(server, max_tokens=200)
    called = chat.bind_tools([both], tool_choice="any").invoke("are they?")
    assert called.tool_calls[0]["name"] == "both"
    assert set(called.tool_calls[0]["args"]) == {"a", "b"}
    for method in ("json_schema", "function_calling"):
        found = chat.with_structured_output(Point, method=method).invoke("where?")  # type: ignore[arg-type]
        assert isinstance(found, Point)


def litellm_options(server: str, **more: Any) -> dict[str, Any]:
    return {
        "model": "openai/fake",
        "api_base": server,
        "api_key": KEY,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 20,
        "seed": 5,
        "num_retries": 0,
        **more,
    }


def test_litellm_answers_and_streams(server: str) -> None:
    whole: Any = litellm.completion(**litellm_options(server))
    assert whole.usage.completion_tokens == 20
    text = whole.choices[0].message.content
    stream: Any = litellm.completion(**litellm_options(server, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
    again: Any = asyncio.run(litellm.acompletion(**litellm_options(server)))
    assert again.choices[0].message.content == text


def test_litellm_tells_of_errors_in_its_own_classes(server: str) -> None:
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        litellm.completion(**litellm_options(server, top_p=7))
