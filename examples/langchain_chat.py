"""LangChain: an answer, and a tool that the model must call."""

from __future__ import annotations

import os
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

chat = ChatOpenAI(
    model=os.environ.get("OUTRIDER_MODEL", "smollm2-135m"),
    base_url=os.environ.get("OUTRIDER_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OUTRIDER_API_KEY", "none"),
    max_tokens=60,
    seed=1,  # the same seed, the same answer, with guesses or without
)


@tool
def light(room: Literal["kitchen", "hall"], on: bool) -> str:
    """Switch the light of a room on or off."""
    return f"the light in the {room} is {'on' if on else 'off'}"


for part in chat.stream("Name two birds."):
    print(part.content, end="", flush=True)
print()

called = chat.bind_tools([light], tool_choice="light").invoke("It is dark in the kitchen.")
for call in called.tool_calls:
    print(call["name"], call["args"], "->", light.invoke(call["args"]))
