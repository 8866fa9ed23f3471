"""Tokens per second of the server with speculation on and off, at several concurrencies, and what
the server adds to the engine's own step.

The server is its own process; this one is the client. Both profiles answer the same prompts in
turns, so that a slow minute meets both. No prompt is asked twice of a profile: the server remembers
what it said, and a second answer would be a copy of the first. The server's overhead is the time
between a plain stream's tokens as the client sees it, from the first to the end of the answer, less
the engine's own time per token for the same prompt in this process, taken in turns as well while
the server idles.

The client shares the cores with the server, so it does nothing while an answer comes but note when
bytes came: HTTP and JSON are read at the end. Its own time per token is told beside the overhead,
which includes what of it the server had to wait for.

    python benchmarks/serving.py --json FILE
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import socket
import statistics
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from served import outrider_serve

from outrider.core.sampling import SamplingParams
from outrider.engine import Engine, EngineConfig
from outrider.evaluate.workloads import Prompt, load_workload
from outrider.models.load import LoadedModel, load_model
from outrider.records.files import write_json
from outrider.records.manifest import TargetIdentity, run_manifest

BASELINE = "baseline"


@dataclass(frozen=True)
class Answer:
    """Attributes:
    tokens: that were generated.
    seconds: from sending the request to the end of the answer.
    first, last: times of the first text and of the answer's end, from `time.perf_counter`.
    cpu: seconds that this process worked while the answer came.
    text: the answer.
    """

    tokens: int
    seconds: float
    first: float
    last: float
    cpu: float
    text: str

    @property
    def token_ms(self) -> float:
        """Milliseconds between tokens, the first one's wait left out."""
        return 1000 * (self.last - self.first) / max(self.tokens - 1, 1)


@dataclass(frozen=True)
class Received:
    """A response as it came off the socket.

    Attributes:
        raw: all of it.
        ends: of the pieces in which it came, in bytes from its start.
        stamps: when they came.
    """

    raw: bytes
    ends: list[int]
    stamps: list[float]

    def events(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """The JSON of each event, and when its last byte came.

        The server puts no event into two parts of a chunked body, so an event is a line.
        """
        place = 0
        for line in self.raw.splitlines(keepends=True):
            place += len(line)
            if line.startswith(b"data: {"):
                yield self.stamps[bisect_left(self.ends, place)], json.loads(line[6:])


def exchange(root: str, body: bytes) -> Received:
    """Post a chat and take in the response; nothing of it is looked at while it comes."""
    host, port = root.removeprefix("http://").split(":")
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    pieces, stamps = [], []
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        while piece := connection.recv(1 << 16):
            stamps.append(time.perf_counter())
            pieces.append(piece)
    return Received(b"".join(pieces), list(itertools.accumulate(map(len, pieces))), stamps)


def ask(root: str, model: str, prompt: Prompt, tokens: int) -> Answer:
    """One streamed greedy answer."""
    body = {
        "model": model,
        "messages": prompt.chat(),
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    data = json.dumps(body).encode()
    begin, cpu = time.perf_counter(), time.thread_time()
    received = exchange(root, data)
    end, cpu = time.perf_counter(), time.thread_time() - cpu
    if not received.raw.startswith(b"HTTP/1.1 200 "):
        raise SystemExit(received.raw.decode(errors="replace"))
    text, stamps, last, count = [], [], end, 0
    for stamp, event in received.events():
        for choice in event["choices"]:
            if choice["delta"].get("content"):
                stamps.append(stamp)
                text.append(choice["delta"]["content"])
            if choice["finish_reason"]:
                last = stamp
        if event.get("usage"):
            count = event["usage"]["completion_tokens"]
    return Answer(count, end - begin, stamps[0], last, cpu, "".join(text))


def load(
    root: str, model: str, prompts: Sequence[Prompt], *, clients: int, tokens: int
) -> tuple[list[Answer], float]:
    """All prompts' answers, so many at a time, and the seconds that they took together."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda prompt: ask(root, model, prompt, tokens), prompts))
    return answers, time.perf_counter() - begin


def shares(prompts: Sequence[Prompt], clients: Sequence[int]) -> list[Sequence[Prompt]]:
    """Prompts for each concurrency: more where more are asked at once."""
    weights = [max(count, 4) for count in clients]
    ends = [len(prompts) * sum(weights[: i + 1]) // sum(weights) for i in range(len(weights))]
    return [prompts[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def figures(rounds: Sequence[tuple[list[Answer], float]]) -> dict[str, float]:
    """Tokens per second in all, and as a user sees them, medians over rounds and answers."""
    total = [sum(a.tokens for a in answers) / seconds for answers, seconds in rounds]
    user = [a.tokens / a.seconds for answers, _ in rounds for a in answers]
    return {
        "tokens_per_s": round(statistics.median(total), 2),
        "tokens_per_s_user": round(statistics.median(user), 2),
    }


def concurrency(
    root: str, name: str, prompts: Sequence[Prompt], *, clients: int, tokens: int, rounds: int
) -> dict[str, Any]:
    """Both profiles at one concurrency, in turns; every round has prompts of its own."""
    size = len(prompts) // rounds
    both: dict[str, list[tuple[list[Answer], float]]] = {BASELINE: [], "speculative": []}
    models = {BASELINE: f"{name}@{BASELINE}", "speculative": name}
    for number in range(rounds):
        work = prompts[number * size : (number + 1) * size]
        for side in sorted(both, reverse=bool(number % 2)):
            both[side].append(load(root, models[side], work, clients=clients, tokens=tokens))
    plain, fast = figures(both[BASELINE]), figures(both["speculative"])
    texts = {side: [a.text for done, _ in found for a in done] for side, found in both.items()}
    return {
        "clients": clients,
        "requests": size * rounds,
        "plain": plain,
        "speculative": fast,
        "ratio_total": round(fast["tokens_per_s"] / plain["tokens_per_s"], 3),
        "ratio_user": round(fast["tokens_per_s_user"] / plain["tokens_per_s_user"], 3),
        "texts_identical": sum(map(str.__eq__, *texts.values())),
    }


def overhead(
    root: str, name: str, model: LoadedModel, prompts: Sequence[Prompt], *, tokens: int
) -> dict[str, float]:
    """Milliseconds per token of a plain stream, of the engine alone, and of the client itself."""
    engine = Engine(
        model.target,
        config=EngineConfig(slots=1, context=2048, max_nodes=0, max_depth=0, reuse_prefix=False),
        tokenizer=model.tokenizer,
    )
    params = SamplingParams(temperature=0.0, max_tokens=tokens)
    alone, served, client = [], [], []
    for prompt in [prompts[0], *prompts]:  # the first one warms up
        [result] = engine.generate([model.tokenizer.chat(prompt.chat())], params)
        assert result.ttft_s is not None
        alone.append(1000 * (result.e2e_s - result.ttft_s) / max(len(result.tokens) - 1, 1))
        answer = ask(root, f"{name}@{BASELINE}", prompt, tokens)
        served.append(answer.token_ms)
        client.append(1000 * answer.cpu / answer.tokens)
    added = [b - a for a, b in zip(alone[1:], served[1:], strict=True)]
    return {
        "engine_ms_per_token": round(statistics.median(alone[1:]), 3),
        "served_ms_per_token": round(statistics.median(served[1:]), 3),
        "added_ms_per_token": round(statistics.median(added), 3),
        "client_cpu_ms_per_token": round(statistics.median(client[1:]), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default="hybrid:suffix+eagle3")
    parser.add_argument("--clients", default="1,4,16")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    clients = [int(word) for word in options.clients.split(",")]
    prompts = list(load_workload("builtin:all"))
    random.Random(0).shuffle(prompts)
    warm, single, prompts = prompts[:2], prompts[2:8], prompts[8:]
    parts = shares(prompts, clients)
    model = load_model(options.target)
    manifest = run_manifest(
        seed=0,
        threads=torch.get_num_threads(),
        target=TargetIdentity(model.target.name, model.target.fingerprint, model.target.precision),
        options={k: str(v) for k, v in vars(options).items()},
    )
    before = os.getloadavg()
    command = [options.target, "--drafter", options.drafter, "--slots", str(max(clients))]
    with outrider_serve(command) as served:
        root = served.root
        for model_name in (options.target, f"{options.target}@{BASELINE}"):
            load(root, model_name, warm, clients=1, tokens=options.max_tokens)
        cells = []
        for count, part in zip(clients, parts, strict=True):
            tokens, rounds = options.max_tokens, options.rounds
            cells.append(
                concurrency(root, options.target, part, clients=count, tokens=tokens, rounds=rounds)
            )
            print(json.dumps(cells[-1]), flush=True)
        added = overhead(root, options.target, model, single, tokens=options.max_tokens)
        print(json.dumps(added), flush=True)
    plain = {cell["clients"]: cell["plain"]["tokens_per_s"] for cell in cells}
    document = {
        "manifest": manifest.finish().to_dict(),
        "load_before": before,
        "concurrency": cells,
        "overhead": added,
        "plain_throughput_last_over_first": round(plain[clients[-1]] / plain[clients[0]], 2),
    }
    if options.json:
        write_json(options.json, document)


if __name__ == "__main__":
    main()
