"""Thousands of mixed requests on a server with a real model: nothing lost, crossed, or kept.

The server is its own process with four profiles (plain, suffix, EAGLE-3, hybrid); this one is the
client. Requests are plain, streamed, left early and late, wrong in many ways, held to grammars and
tools, as long as the context and longer, for several answers, with log-probabilities and stop
strings, greedy and with seeds, and turns of conversations. Checked are

- the status of each, and that an answer is whole: a finish reason, `[DONE]`, what its kind promises
- that a body is answered alike every time, whatever the profile, streamed or whole (greedy and with
  a seed), which a crossed answer is not
- that nothing runs, waits or holds cache rows at the end, and that the server wrote no error
- the server's resident memory from the first fifth of the requests on

    python benchmarks/soak.py --requests 10000 --json FILE
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from prometheus_client.parser import text_string_to_metric_families
from served import Server, outrider_serve
from soak_requests import (
    BODY_BYTES,
    TURNS,
    Json,
    Material,
    Request,
    draw,
    joined,
    turn,
    whole,
)

from outrider.evaluate.workloads import load_workload
from outrider.models.load import load_model
from outrider.records.files import write_json
from outrider.records.manifest import TargetIdentity, run_manifest

DRAFTERS = {"suffix": "suffix", "eagle3": "eagle3", "hybrid": "hybrid:suffix+eagle3"}
GROWTH = 1.02
SAMPLES = 20  # of the memory
TOLD = 20  # faults that are printed
IDLE_S = 60


class Soak:
    """The requests under way and what was found.

    Attributes:
        statuses: how many requests of a kind got a status; 0 for those that were left.
        faults: what was wrong, in words.
        memory: resident MiB of the server, by the number of requests that were over.
    """

    def __init__(self, server: Server, material: Material, requests: int) -> None:
        self.server, self.material, self.requests = server, material, requests
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.profiles: Counter[str] = Counter()
        self.tokens = self.compared = 0
        self.faults: list[str] = []
        self.memory: dict[int, dict[str, float]] = {}
        self._answers: dict[str, tuple[bytes, str]] = {}
        self._begun = self._over = 0
        self._start = time.monotonic()

    async def run(self, clients: int) -> None:
        timeout = aiohttp.ClientTimeout(total=900)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            self.server.root, connector=connector, timeout=timeout
        ) as session:
            await asyncio.gather(*(self._client(session) for _ in range(clients)))

    async def _client(self, session: aiohttp.ClientSession) -> None:
        """One of those who ask at the same time: one request after another."""
        while self._begun < self.requests:
            drawn = draw(self.material)
            if drawn is None:
                await self._talk(session)
            else:
                await self._ask(session, drawn[0])

    async def _talk(self, session: aiohttp.ClientSession) -> None:
        """A conversation; each turn may have another profile and begins with what was said."""
        history: list[Json] = []
        for number in range(TURNS):
            request = turn(self.material, history, number)
            answer = await self._ask(session, request)
            if answer is None or not answer["choices"] or self._begun >= self.requests:
                return
            assert isinstance(request.body, dict)
            said = {"role": "assistant", "content": answer["choices"][0]["text"]}
            history = [*request.body["messages"], said]

    async def _ask(self, session: aiohttp.ClientSession, request: Request) -> Json | None:
        self._begun += 1
        answer = None
        try:
            status, answer = await self._exchange(session, request)
        except Exception as fault:
            status = -1
            self._fault(request, f"lost: {type(fault).__name__} {fault}")
        self.statuses[request.kind, status] += 1
        self._over += 1
        if self._over % max(self.requests // SAMPLES, 1) == 0:
            self._sample()
        return answer

    async def _exchange(
        self, session: aiohttp.ClientSession, request: Request
    ) -> tuple[int, Json | None]:
        """Send it and look at what comes; 0 and nothing where the client leaves."""
        body = request.body
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = session.post(request.path, data=data, headers={"content-type": "application/json"})
        if request.leave == "early":
            wait = self.material.rng.random() ** 3 * 0.5
            try:
                async with asyncio.timeout(wait), sent:
                    await asyncio.sleep(wait)
            except TimeoutError:
                pass
            return 0, None
        async with sent as response:
            if response.status != request.status:
                self._fault(request, f"{response.status}: {(await response.text())[:300]}")
                return response.status, None
            if request.leave == "late":
                for _ in range(1 + self.material.rng.randrange(4)):
                    await response.content.readany()
                response.close()
                return 0, None
            text = await response.text()
        return response.status, self._read(request, text)

    def _read(self, request: Request, text: str) -> Json | None:
        """What an answer says, after all checks."""
        body = request.body
        if request.status != 200:
            if "message" not in json.loads(text)["error"]:
                self._fault(request, f"a refusal without a message: {text[:300]}")
            return None
        assert isinstance(body, dict)
        answer = joined(list(_events(text))) if body.get("stream") else whole(json.loads(text))
        self.tokens += answer["tokens"]
        self.profiles[str(body.get("model", "@")).split("@")[1]] += 1
        if any(choice["finish"] is None for choice in answer["choices"]):
            self._fault(request, "an answer without an end")
        prompts = body.get("prompt")
        many = isinstance(prompts, list) and not isinstance(prompts[0], int)
        wanted = body.get("n", 1) * (len(prompts) if many else 1)
        if request.path != "/tokenize" and len(answer["choices"]) != wanted:
            self._fault(request, f"{len(answer['choices'])} answers of {wanted}")
        if wrong := request.check(answer):
            self._fault(request, wrong)
        self._compare(request, answer)
        return answer

    def _compare(self, request: Request, answer: Json) -> None:
        said = json.dumps(answer, sort_keys=True).encode()
        digest = hashlib.blake2b(said, digest_size=16).digest()
        model = str(request.body["model"]) if "model" in request.body else ""
        first = request.key not in self._answers
        before, other = self._answers.setdefault(request.key, (digest, model))
        if before != digest:
            self._fault(request, f"{model} and {other} answer otherwise: {said[:300]!r}")
        self.compared += before == digest and not first

    def _fault(self, request: Request, what: str) -> None:
        self.faults.append(f"{request.kind}: {what}")
        if len(self.faults) <= TOLD:
            print(f"fault: {self.faults[-1]}\n  body: {str(request.body)[:500]}", flush=True)

    def _sample(self) -> None:
        names = {"resident_mb": "VmRSS", "anonymous_mb": "RssAnon"}
        found = {name: round(self.server.memory_mb(line), 1) for name, line in names.items()}
        self.memory[self._over] = found
        seconds = time.monotonic() - self._start
        print(f"{self._over} requests, {seconds:.0f} s, {found}", flush=True)

    def growth(self) -> float:
        """Resident memory at the end over that after the first fifth."""
        counts = sorted(self.memory)
        first = next(count for count in counts if 5 * count >= self.requests)
        return self.memory[counts[-1]]["resident_mb"] / self.memory[first]["resident_mb"]


def _events(text: str) -> Iterator[Json]:
    """The events of a stream.

    Raises:
        ValueError: the stream is not whole, or brings an error.
    """
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    if not lines or lines[-1] != "[DONE]":
        raise ValueError(f"a stream without its end: {text[-300:]!r}")
    for line in lines[:-1]:
        event = json.loads(line)
        if "error" in event:
            raise ValueError(f"an error in a stream: {line[:300]}")
        yield event


async def metrics(session: aiohttp.ClientSession) -> dict[str, float]:
    """The server's samples by name, those of all labels together."""
    async with session.get("/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    found: Counter[str] = Counter()
    for family in families:
        for sample in family.samples:
            labels = sample.labels
            apart = labels.get("outcome") or labels.get("status")
            found[f"{sample.name}{{{apart}}}" if apart else sample.name] += sample.value
    return dict(found)


async def at_rest(root: str) -> dict[str, Any]:
    """What the server says of itself once nothing is asked; waits for the last cancels."""
    busy = ("outrider_requests_running", "outrider_requests_waiting")
    busy += ("outrider_kv_cache_usage_ratio", "outrider_http_in_flight")
    async with aiohttp.ClientSession(root) as session:
        for _ in range(10 * IDLE_S):
            found = await metrics(session)
            if sum(found[name] for name in busy[:3]) == 0 and found[busy[3]] <= 1:
                break
            await asyncio.sleep(0.1)
    told = ("outrider_requests_total", "outrider_refused_total", "outrider_spec_decode")
    told += ("outrider_engine_failures_total", "outrider_output_tokens_total")
    kept = {name: n for name, n in found.items() if name.startswith(told) and "created" not in name}
    return {**{name: found[name] for name in busy}, **dict(sorted(kept.items()))}


async def book(root: str) -> list[int]:
    """Tokens of a long text."""
    prompts = [p.chat()[0]["content"] for p in load_workload("builtin:all") if p.words > 600]
    async with (
        aiohttp.ClientSession(root) as session,
        session.post("/tokenize", json={"prompt": "\n\n".join(prompts[:8])}) as response,
    ):
        return list((await response.json())["tokens"])


def settings(options: argparse.Namespace) -> Json:
    return {
        "target": options.target,
        "profiles": {name: {"drafter": drafter} for name, drafter in DRAFTERS.items()},
        "engine": {"slots": options.slots, "context": options.context, "patience_s": 600},
        "limits": {"body_bytes": BODY_BYTES, "request_s": 900},
        "log_level": "warning",
    }


def verdict(soak: Soak, rest: dict[str, Any], log: str) -> list[str]:
    """What does not hold."""
    found = [f"{len(soak.faults)} faults"] if soak.faults else []
    unasked = {key: n for key, n in soak.statuses.items() if key[1] >= 500}
    if unasked:
        found.append(f"5xx: {unasked}")
    idle = [name for name in list(rest)[:3] if rest[name]]
    if idle or rest["outrider_http_in_flight"] > 1:
        found.append(f"not at rest: {rest}")
    if rest.get("outrider_engine_failures_total"):
        found.append("steps of the engine failed")
    if "Traceback" in log or " error " in log:
        found.append("the server wrote errors")
    if soak.growth() > GROWTH:
        found.append(f"memory grew by {100 * (soak.growth() - 1):.1f} %")
    return found


def soak(options: argparse.Namespace, folder: Path) -> tuple[Soak, dict[str, Any], str]:
    """Run it; what was found, the server at rest, and what the server wrote."""
    config, log = folder / "server.yaml", folder / "server.log"
    config.write_text(yaml.safe_dump(settings(options)))
    command = [str(config), "--threads", str(options.threads)]
    with log.open("w") as output, outrider_serve(command, log=output) as server:
        name = Path(options.target).name
        tokens = asyncio.run(book(server.root))
        material = Material(name, context=options.context, book=tokens, seed=options.seed)
        run = Soak(server, material, options.requests)
        asyncio.run(run.run(options.clients))
        rest = asyncio.run(at_rest(server.root))
    return run, rest, log.read_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    target = load_model(options.target).target
    manifest = run_manifest(
        seed=options.seed,
        threads=options.threads,
        target=TargetIdentity(target.name, target.fingerprint, target.precision),
        options={k: str(v) for k, v in vars(options).items() if k != "json"},
    )
    del target
    before, begin = os.getloadavg(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run, rest, log = soak(options, Path(folder))
    wrong = verdict(run, rest, log)
    kinds = sorted(run.statuses.items())
    document = {
        "manifest": manifest.finish().to_dict(),
        "load_before": before,
        "seconds": round(time.monotonic() - begin, 1),
        "requests": sum(run.statuses.values()),
        "statuses": {f"{kind}: {status or 'left'}": count for (kind, status), count in kinds},
        "answered_by_profile": dict(run.profiles),
        "output_tokens": run.tokens,
        "distinct_bodies": len(run._answers),
        "answers_compared": run.compared,
        "faults": run.faults[:100],
        "memory": run.memory,
        "memory_growth": round(run.growth(), 4),
        "at_rest": rest,
        "server_log_lines": len(log.splitlines()),
        "wrong": wrong,
    }
    print(json.dumps({k: v for k, v in document.items() if k != "manifest"}, indent=1))
    if log:
        print(f"the server wrote:\n{log[-3000:]}")
    if options.json:
        write_json(options.json, document)
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
