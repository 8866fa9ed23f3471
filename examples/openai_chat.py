"""The openai package: a stream, two profiles with one seed, and an answer with a given form."""

from __future__ import annotations

import os
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel

MODEL = os.environ.get("OUTRIDER_MODEL", "smollm2-135m")
client = OpenAI(
    base_url=os.environ.get("OUTRIDER_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OUTRIDER_API_KEY", "none"),
)

print("A stream:")
stream = client.chat.completions.create(
    model=MODEL,
    messages=[{"role": "user", "content": "Say hello in three languages."}],
    max_tokens=60,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    elif chunk.usage:
        print(f"\n[{chunk.usage.completion_tokens} tokens]")

print("\nThe same seed, with guesses and without:")
answers = [
    client.chat.completions.create(
        model=name,
        messages=[{"role": "user", "content": "Write one line about the sea."}],
        max_tokens=40,
        seed=7,
    )
    for name in (MODEL, f"{MODEL}@baseline")
]
for answer in answers:
    told = answer.model_extra["metrics"]["speculative_decoding"]
    print(f"{answer.model}: {told['mean_acceptance_length']:.2f} tokens per step")
print("equal:", answers[0].choices[0].message.content == answers[1].choices[0].message.content)


class Review(BaseModel):
    """What the model is asked to fill in."""

    mood: Literal["good", "bad"]
    recommended: bool


parsed = client.chat.completions.parse(
    model=MODEL,
    messages=[{"role": "user", "content": "Review: 'A lovely film.' Answer as JSON."}],
    max_tokens=60,
    response_format=Review,
)
print("\nA given form:", parsed.choices[0].message.parsed)
