"""Our engine and others on the same prompts, one request at a time, interleaved.

    python benchmarks/peers/run.py --prompts 4 --max-tokens 96 --json FILE

Every side (an engine in one precision and mode) is a process of its own that sleeps until it is
asked. All start and warm up first; then each prompt goes to all of them, in an order that turns by
one from prompt to prompt, so that other load hits all alike. All read the same token ids and give
the same number of greedy tokens. Medians over prompts; nothing is averaged with warm-up.

A side that is missing or fails keeps its row, with the reason. More in
docs/how-to/compare-with-peers.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from catalogue import Side, Wanted, all_sides
from process import PeerFailed, PeerProcess
from report import OURS, Row, Run, ratio_lines, ratios, table

from outrider.evaluate.workloads import load_workload
from outrider.models.load import find_source
from outrider.models.tokenizer import Tokenizer
from outrider.records.files import write_json
from outrider.records.manifest import load_average, run_manifest

ROOT = Path(__file__).resolve().parents[2]
PREFILL_REPEATS = 3
WARM_UP_TOKENS = 12
PASS_ROWS = (1, 2, 4, 8, 16)
IDLE_S = 3.0
MARGIN = 64  # positions beyond prompt and answer, for guesses


class Field:
    """All sides that still run, and a row for each that was asked for."""

    def __init__(self, sides: Sequence[Side], logs: Path) -> None:
        self.rows = {s.name: Row(s.name, s.peer, s.mode, reason=s.missing) for s in sides}
        self.running: dict[str, PeerProcess] = {}
        for side in sides:
            if not side.missing:
                self._start(side, logs)

    def _start(self, side: Side, logs: Path) -> None:
        _say(f"starting {side.name}")
        row = self.rows[side.name]
        try:
            process = PeerProcess(side, logs / f"{side.name.replace(' ', '_')}.log")
        except PeerFailed as fault:
            row.reason = f"did not start: {fault}"
            return
        self.running[side.name] = process
        about, installed = process.about, side.installed
        row.versions = {**about["versions"], **_mapping(installed.get("versions"))}
        row.build_flags = [*about["build_flags"], *_list(installed.get("build_flags"))]
        row.note = about["note"]

    def ask(self, name: str, request: dict[str, Any]) -> dict[str, Any] | None:
        """The answer, or `None`: the side failed and is out, with the reason in its row."""
        try:
            return self.running[name].ask(request)
        except PeerFailed as fault:
            self.rows[name].reason = f"failed: {fault}"
            self.running.pop(name).close()
            return None

    def in_turn(self, number: int) -> list[str]:
        """The running sides, starting with another one each time."""
        names = list(self.running)
        turn = number % max(1, len(names))
        return names[turn:] + names[:turn]

    def close(self) -> None:
        for process in self.running.values():
            process.close()


def warm_up(field: Field, prompt: list[int], long_prompt: list[int]) -> None:
    for tokens in (prompt, long_prompt):
        for name in field.in_turn(0):
            field.ask(name, _generate(tokens, WARM_UP_TOKENS))


def watch_idle(field: Field) -> None:
    """Processor time of every side while nobody is asked: sides must sleep, not spin."""
    time.sleep(1)
    before = {name: process.cpu_seconds() for name, process in field.running.items()}
    time.sleep(IDLE_S)
    for name, process in field.running.items():
        field.rows[name].idle_cores = (process.cpu_seconds() - before[name]) / IDLE_S


def answer_prompts(
    field: Field, prompts: Sequence[tuple[str, str, list[int]]], max_tokens: int, repeats: int
) -> None:
    for number, (repeat, (workload, prompt, tokens)) in enumerate(
        (repeat, item) for repeat in range(repeats) for item in prompts
    ):
        _say(f"{workload} {prompt} ({number + 1} of {repeats * len(prompts)})")
        answers = {}
        for name in field.in_turn(number):
            answer = field.ask(name, _generate(tokens, max_tokens))
            if answer is not None:
                answers[name] = answer
        ours = next((answers[n]["tokens"] for n in _ours_plain(field) if n in answers), None)
        for name, a in answers.items():
            same = None if ours is None else _agreement(ours, a["tokens"])
            times = (a["ttft_ms"], a["total_ms"], same)
            run = Run(name, workload, prompt, repeat, len(tokens), a["n"], *times)
            field.rows[name].runs.append(run)


def read_prompts(field: Field, text: list[int], length: int) -> None:
    """Time to the first token behind ``length`` tokens, another stretch of the text each time."""
    times: dict[str, list[float]] = {}
    for repeat in range(PREFILL_REPEATS):
        _say(f"prompts of {length} tokens ({repeat + 1} of {PREFILL_REPEATS})")
        tokens = text[repeat * 97 : repeat * 97 + length]
        for name in field.in_turn(repeat):
            answer = field.ask(name, _generate(tokens, 2))
            if answer is not None:
                times.setdefault(name, []).append(answer["ttft_ms"])
    for name, values in times.items():
        field.rows[name].prefill_ms = statistics.median(values)


def measure_passes(field: Field) -> None:
    """What a pass costs by number of rows. Not being able to tell does not put a side out."""
    for name, process in field.running.items():
        _say(f"passes of {name}")
        try:
            answer = process.ask({"op": "pass_ms", "rows": list(PASS_ROWS)})
        except PeerFailed as fault:
            field.rows[name].pass_method = f"not measured: {fault}"
            continue
        field.rows[name].pass_ms = {int(n): ms for n, ms in answer["pass_ms"].items()}
        field.rows[name].pass_method = answer["method"]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark; returns the document and prints the table."""
    workloads = options.workloads.split(",")
    tokenizer = Tokenizer.load(find_source(options.target).folder)
    prompts = [
        (workload, prompt.id, tokenizer.chat(prompt.chat()))
        for workload in workloads
        for prompt in load_workload(f"builtin:{workload}", limit=options.prompts)
    ]
    text = [t for p in load_workload("builtin:summarize") for t in tokenizer.chat(p.chat())]
    warm = tokenizer.chat(load_workload("builtin:creative", limit=1)[0].chat())
    longest = max(options.prefill, *(len(tokens) for _, _, tokens in prompts))
    wanted = Wanted(
        options.target,
        options.threads,
        tuple(options.weights.split(",")),
        tuple(options.drafters.split(",")),
        (ROOT / options.folder).resolve(),
        context=-(-(longest + options.max_tokens + MARGIN) // 256) * 256,
    )
    manifest = run_manifest(
        seed=None, threads=options.threads, options={k: str(v) for k, v in vars(options).items()}
    )
    sides = [s for s in all_sides(wanted) if _chosen(s.name, options.only)]
    field = Field(sides, wanted.folder / "logs")
    try:
        warm_up(field, warm, text[-options.prefill :])
        watch_idle(field)
        loads = [load_average()]
        answer_prompts(field, prompts, options.max_tokens, options.repeats)
        read_prompts(field, text, options.prefill)
        loads.append(load_average())
        measure_passes(field)
    finally:
        field.close()
    rows = list(field.rows.values())
    found = ratios(rows, workloads)
    print(table(rows, workloads, options.prefill))
    print(ratio_lines(found))
    print(f"load averages before and after the prompts: {loads}")
    return {
        "manifest": manifest.finish().to_dict(),
        "load_around_prompts": loads,
        "workloads": workloads,
        "max_tokens": options.max_tokens,
        "prefill_tokens": options.prefill,
        "ratios": [asdict(r) for r in found],
        "sides": [row.to_dict(workloads) for row in rows],
    }


def _generate(tokens: list[int], max_tokens: int) -> dict[str, Any]:
    return {"op": "generate", "prompt_tokens": tokens, "max_tokens": max_tokens}


def _ours_plain(field: Field) -> list[str]:
    return [row.side for row in field.rows.values() if row.peer == OURS and row.mode == "plain"]


def _agreement(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _chosen(name: str, only: str) -> bool:
    return not only or any(part in name for part in only.split(","))


def _mapping(value: object) -> dict[str, str]:
    return dict(value) if isinstance(value, dict) else {}


def _list(value: object) -> list[str]:
    return list(value) if isinstance(value, list) else []


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--weights", default="int8", help="ours; the ratios are the first one's")
    parser.add_argument("--drafters", default="suffix", help="ours, beside plain decoding")
    parser.add_argument("--workloads", default="edit,agent,chat", help="built-in families")
    parser.add_argument("--prompts", type=int, default=4, help="per workload")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the prefill figure")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", default="", help="sides whose name holds one of these, by comma")
    parser.add_argument("--folder", type=Path, default=Path(".peers"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    default = ROOT / "benchmarks" / "scratch" / f"peers-{date.today().isoformat()}.json"
    path = options.json or default
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, run(options))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
