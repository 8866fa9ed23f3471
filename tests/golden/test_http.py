"""Through HTTP: the same seed gives the same text, whoever guesses, streamed, in any company.

A real server on a real socket; the targets' rows do not depend on their neighbours, so `==` holds.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from outrider.models.config import ModelConfig
from outrider.models.load import load_model, smollm2_path
from outrider.models.one_row import OneRowAtATime
from outrider.models.tiny import tiny_raw
from outrider.models.transformer import Transformer
from outrider.testing.asgi import parse_events
from outrider.testing.fakes import ByteTokenizer
from outrider.testing.serving import FakeModel, fake_service, running_server, text_target

PROFILES = {
    "suffix": {"drafter": "suffix"},
    "ngram": {"drafter": "ngram", "max_depth": 3},
    "hybrid": {"drafter": "hybrid", "max_nodes": 5},
}
PLAIN = "fake@baseline"
PROMPTS = [f"{'la ' * (3 + i)}count {i}: 1, 2, 3, 1, 2, 3, 1, 2" for i in range(16)]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
    {"temperature": 1.0, "min_p": 0.02, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    {"temperature": 0.7, "repetition_penalty": 1.1, "logit_bias": {"65": 3, "66": -3}},
    {"temperature": 0.9, "response_format": {"type": "regex", "regex": "[a-z ,]{10,40}"}},
    {"temperature": 1.1, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0.6, "stop": ["e", "zz"], "min_tokens": 5},
    {"temperature": 1.0, "n": 2},
]


def table() -> FakeModel:
    target = text_target(context=1024)
    target.ripple = 0.05
    return FakeModel(target)


def tiny() -> FakeModel:
    raw = {**tiny_raw("llama"), "vocab_size": ByteTokenizer.vocab_size}
    model = Transformer.random(ModelConfig.from_hf(raw), 3)
    model.end_tokens = ByteTokenizer.end_tokens
    return FakeModel(OneRowAtATime(model))


@pytest.fixture(scope="module", params=[(table, 16), (tiny, 5)], ids=["table", "tiny"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    """An address, and how many requests at once are quick enough there."""
    make: Callable[[], FakeModel]
    make, number = request.param
    settings = {"slots": 16, "context": 448, "busy_chunk": 16}
    service = fake_service(model=make(), profiles=PROFILES, engine=settings)
    with running_server(service) as found:
        yield found, number


def ask(address: str, body: dict[str, Any], *, model: str = PLAIN) -> list[Any]:
    """What was said, per answer: text, finish reason, log-probabilities."""
    given = json.dumps({"model": model, **body}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/chat/completions", given, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            content = response.read()
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()) from None
    if not body.get("stream"):
        return [
            (c["message"]["content"], c["finish_reason"], (c["logprobs"] or {}).get("content", []))
            for c in json.loads(content)["choices"]
        ]
    found: dict[int, list[Any]] = {}
    *chunks, end = parse_events(content)
    assert end == "[DONE]"
    for chunk in chunks:
        [choice] = chunk["choices"]
        said = found.setdefault(choice["index"], ["", None, []])
        said[0] += choice["delta"].get("content", "")
        said[1] = choice["finish_reason"] or said[1]
        said[2] += (choice["logprobs"] or {"content": []})["content"]
    return [tuple(found[index]) for index in sorted(found)]


def body(number: int, **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": PROMPTS[number]}],
        "max_tokens": 40,
        "seed": 100 + number,
        **SAMPLING[number % len(SAMPLING)],
        **more,
    }


def test_the_same_seed_gives_the_same_text(served: tuple[str, int]) -> None:
    """Every request alone and plain; then all at once, under every profile and streamed."""
    address, count = served
    alone = [ask(address, body(number)) for number in range(count)]
    assert len({said[0][0] for said in alone}) > count / 2
    with ThreadPoolExecutor(count) as pool:
        for profile in (*PROFILES, "baseline"):
            for stream in (False, True):
                jobs = [
                    pool.submit(ask, address, body(n, stream=stream), model=f"fake@{profile}")
                    for n in range(count)
                ]
                for number, job in enumerate(jobs):
                    assert job.result() == alone[number], (profile, stream, number)


def test_profiles_share_a_batch_and_speculation_runs(served: tuple[str, int]) -> None:
    address, _ = served
    names = [*PROFILES, "baseline"]
    with ThreadPoolExecutor(8) as pool:
        jobs = [
            pool.submit(ask, address, body(1, max_tokens=100), model=f"fake@{names[i % 4]}")
            for i in range(8)
        ]
        assert len({json.dumps(job.result()) for job in jobs}) == 1
    with urllib.request.urlopen(f"{address}/metrics", timeout=20) as response:
        lines = response.read().decode().splitlines()
    accepted = {
        line.split("{")[1].split("}")[0]: float(line.split()[-1])
        for line in lines
        if line.startswith("outrider_spec_decode_accepted_tokens_total{")
    }
    assert sum(accepted.values()) > 0


@pytest.mark.model
@pytest.mark.skipif(smollm2_path() is None, reason="the demo model is not installed")
def test_the_demo_model_says_the_same_with_and_without_guesses() -> None:
    loaded = load_model("smollm2-135m")
    service = fake_service(
        model=loaded,  # type: ignore[arg-type]
        profiles={"suffix": {"drafter": "suffix"}},
        engine={"slots": 3, "context": 512},
    )
    asked = {
        "messages": [{"role": "user", "content": "Repeat: the cat, the dog, the cat, the dog"}],
        "max_tokens": 24,
        "seed": 11,
        "temperature": 0.6,
    }
    with running_server(service) as address, ThreadPoolExecutor(3) as pool:
        plain = ask(address, asked)
        models = [(PLAIN, False), ("fake@suffix", True), ("fake@suffix", False)]
        jobs = [
            pool.submit(ask, address, {**asked, "stream": stream}, model=model)
            for model, stream in models
        ]
        assert [job.result() for job in jobs] == [plain] * 3
