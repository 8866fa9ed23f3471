"""Real vLLM on CPU behind the gateway: what samples wrongly is taken back, what is right is not.

    python benchmarks/interop/vllm_gateway.py        # some minutes on two cores

`outrider serve rollout.yaml` is attached to a plain server (`baseline`), starts and supervises one
with the shipped EAGLE-3 head (`eagle`), and has the plain server once more as `twin`; those two are
in shadow. Greedy traffic comes first: no answer may differ beyond a tie, since vLLM's greedy path
is right. Then traffic at temperature 0.5: up to 0.33 vLLM's CPU build samples wrongly when it
speculates (vLLM issue 55005), so the law probes must take `eagle` back, and must leave `twin` alone
over at least as many tokens. vLLM's CPU build is installed into .peers/ if it is not there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "peers"), str(HERE.parent), str(HERE)]

from install import vllm_python  # noqa: E402
from served import free_port  # noqa: E402
from vllm_heads import for_vllm  # noqa: E402
from vllm_server import DTYPE, NAME, OWN, server  # noqa: E402

from outrider.backends.base import Ask, Backend  # noqa: E402
from outrider.backends.connect import connect  # noqa: E402
from outrider.backends.launch import VLLM_PYTHON  # noqa: E402
from outrider.backends.prometheus import Scrape, parse  # noqa: E402
from outrider.drafters.heads import shipped_head  # noqa: E402
from outrider.evaluate.load import Job, Load, run_load  # noqa: E402
from outrider.evaluate.workloads import load_workload  # noqa: E402
from outrider.models.heads.fit import folder_facts  # noqa: E402
from outrider.models.load import find_source  # noqa: E402

BASELINE, EAGLE, TWIN = "baseline", "eagle", "twin"
START_S, END_S = 900.0, 60.0
GUESSES = 3
ANSWER = 12  # tokens
AT_ONCE = 2  # of ours; each becomes five, with copies and probes
BATCH = 8
TEMPERATURE = 0.5
LONGEST = 250  # words of a prompt
WORDS = (
    *("--dtype", DTYPE, "--enforce-eager", "--max-model-len", "768"),
    *("--max-num-seqs", "16", "--max-num-batched-tokens", "768"),
)


def rollout(model: Path, head: Path, plain: str, *, state: Path) -> dict[str, Any]:
    """The rollout's file. No look is taken at speed: it says nothing on a shared machine.

    Args:
        plain: address of the plain server.
    """
    attached = {"engine": "vllm", "url": plain, "model": NAME}
    started = {"engine": "vllm", "model": NAME, "args": list(WORDS)}
    eagle = {"speculative": True, "method": "eagle3", "drafter": str(head)}
    eagle |= {"num_speculative_tokens": GUESSES, "backend": started}
    return {
        "target": str(model),
        "name": NAME,
        "state": str(state),
        "port": free_port(),
        "admin_port": free_port(),
        "ramp": {"start": "shadow"},
        "verdict": {"every_s": 86_400},
        "profiles": {
            BASELINE: {"speculative": False, "backend": attached},
            EAGLE: {"shadow": "100%", **eagle},
            TWIN: {"speculative": False, "shadow": "100%", "backend": attached},
        },
    }


@dataclass(frozen=True)
class Gateway:
    """A gateway that runs: where clients ask and where operators look."""

    api: str
    admin: str

    def status(self) -> dict[str, Any]:
        """What is in force, by profile."""
        told: dict[str, Any] = json.loads(_get(f"{self.admin}/rollout"))
        return {"baseline": told["baseline"], **told["profiles"]}

    def metrics(self) -> Scrape:
        return parse(_get(f"{self.admin}/metrics").decode())

    def tested(self, profile: str) -> int:
        """Tokens that the law probes of a profile have held against their laws."""
        name = "outrider_gateway_law_tokens_total"
        return round(self.metrics().total(name, profile=profile, outcome="tested") or 0)

    def compared(self, profile: str) -> dict[str, int]:
        """Greedy copies of a profile, by how they agree with their originals."""
        name, page = "outrider_gateway_compared_total", self.metrics()
        return {
            agreement: round(page.total(name, profile=profile, agreement=agreement) or 0)
            for agreement in ("same", "tie", "different", "unknown")
        }


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as reply:
        found: bytes = reply.read()
    return found


@contextlib.contextmanager
def gateway(values: dict[str, Any], folder: Path, python: Path) -> Iterator[Gateway]:
    """`outrider serve` of a rollout; it and the engines that it started end with the block.

    Raises:
        SystemExit: it ended, or took too long.
    """
    file, log = folder / "rollout.yaml", folder / "gateway.log"
    file.write_text(json.dumps(values, indent=2))  # JSON is YAML
    found = Gateway(*(f"http://127.0.0.1:{values[port]}" for port in ("port", "admin_port")))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "outrider", "serve", str(file)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **OWN, VLLM_PYTHON: str(python)},
        )
    try:
        _wait(found, process, log)
        yield found
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(found: Gateway, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise SystemExit(f"the gateway ended: {' '.join(last)[:200]}; see {log}")
        with contextlib.suppress(OSError):
            found.status()
            return
        time.sleep(1)
    raise SystemExit(f"the gateway was not ready within {START_S:.0f} s; see {log}")


async def send(backend: Backend, *, count: int, first: int, temperature: float) -> list[str]:
    """Ask so many of the built-in prompts in turn; returns the errors."""
    prompts = [p for p in load_workload("builtin:all") if p.words <= LONGEST]
    jobs = []
    for i in range(first, first + count):
        prompt = prompts[i % len(prompts)]
        ask = Ask(tuple(prompt.chat()), max_tokens=ANSWER, temperature=temperature)
        jobs.append(Job(prompt.id, i // len(prompts), ask))
    outcome = await run_load(backend, jobs, Load(concurrency=AT_ONCE, warm_up=0), watch=False)
    return [shot.answer.error for shot in outcome.shots if shot.answer.error]


async def greedy(front: Gateway, backend: Backend, requests: int) -> list[str]:
    """What is wrong with greedy traffic."""
    faults = await send(backend, count=requests, first=0, temperature=0.0)
    await settled(front)
    for profile in (EAGLE, TWIN):
        found = front.compared(profile)
        print(f"greedy, {profile}: {found}", flush=True)
        if not found["same"]:
            faults.append(f"greedy: no copy of {profile} agreed: {found}")
        if found["different"] or front.status()[profile]["phase"] != "shadow":
            faults.append(f"greedy: {profile} {found}, {front.status()[profile]['why']}")
    return faults


async def settled(front: Gateway, *, most_s: float = 60.0) -> None:
    """Until no copy or probe is under way."""
    end = time.monotonic() + most_s
    while time.monotonic() < end and any(p["running"] for p in front.status().values()):
        await asyncio.sleep(0.5)


async def sampled(front: Gateway, backend: Backend, *, tokens: int, most_s: float) -> list[str]:
    """What is wrong with traffic at a temperature above 0.

    Args:
        tokens: of `twin` that must have been tested at least.
    """
    begin, sent, faults, condemned = time.monotonic(), 0, [], None
    while time.monotonic() < begin + most_s:
        faults += await send(backend, count=BATCH, first=sent, temperature=TEMPERATURE)
        sent += BATCH
        state = front.status()
        if condemned is None and state[EAGLE]["phase"] == "rolled_back":
            condemned = front.tested(EAGLE)
            seconds = time.monotonic() - begin
            print(f"{EAGLE} taken back after {sent} requests, {condemned} tokens, {seconds:.0f} s")
            print(f"  {state[EAGLE]['why']}", flush=True)
        seen = front.tested(TWIN)
        if state[TWIN]["phase"] == "rolled_back":
            break
        if condemned is not None and seen >= max(tokens, condemned):
            break
    await settled(front)
    state, seen = front.status(), front.tested(TWIN)
    evidence = front.metrics().total("outrider_gateway_law_evidence_nats", profile=TWIN)
    print(f"{TWIN}: {state[TWIN]['phase']} after {seen} tokens, evidence {evidence:.1f} nats")
    if condemned is None:
        seen = front.tested(EAGLE)
        faults.append(f"sampled: {EAGLE} was not taken back within {seen} tokens")
    elif "do not follow the law" not in state[EAGLE]["why"]:
        faults.append(f"sampled: {EAGLE} was taken back for another cause: {state[EAGLE]['why']}")
    if state[TWIN]["phase"] != "shadow":
        faults.append(f"sampled: {TWIN} is {state[TWIN]['phase']}: {state[TWIN]['why']}")
    elif condemned is not None and front.tested(TWIN) < max(tokens, condemned):
        faults.append(f"sampled: of {TWIN} only {front.tested(TWIN)} tokens were tested")
    return faults


async def drive(front: Gateway, options: argparse.Namespace) -> list[str]:
    """All traffic; returns what is wrong."""
    backend = await connect(front.api, kind="openai", model=NAME)
    try:
        faults = await greedy(front, backend, options.greedy)
        most = options.most_minutes * 60
        return faults + await sampled(front, backend, tokens=options.tokens, most_s=most)
    finally:
        await backend.close()


def main() -> int:
    """Run all; 0 where everything is as it must be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--greedy", type=int, default=16, help="greedy requests")
    parser.add_argument("--tokens", type=int, default=800, help="to test of the right engine")
    parser.add_argument("--most-minutes", type=float, default=10.0, help="of sampled traffic")
    parser.add_argument("--out", type=Path, help="for logs and state; default: a new folder")
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="vllm-gateway-"))
    out.mkdir(parents=True, exist_ok=True)
    python, model = vllm_python(), find_source(options.model).folder
    head, name = out / "head", options.model
    if not head.exists():
        for_vllm(shipped_head("eagle3", folder_facts(model, name=name)), head, model, name=name)
    with server(python, model, out / "plain.log", speculate=False, more=WORDS) as plain:
        state = Path(tempfile.mkdtemp(dir=out))
        with gateway(rollout(model, head, plain, state=state), out, python) as front:
            faults = asyncio.run(drive(front, options))
    print("\n".join(faults) or "everything is as it must be")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
