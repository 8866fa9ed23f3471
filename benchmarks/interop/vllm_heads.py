"""Serves draft heads in vLLM on CPU and compares what is accepted per position with ours.

    python benchmarks/interop/vllm_heads.py                    # the shipped EAGLE-3 and 3.1 heads
    python benchmarks/interop/vllm_heads.py DIR --limit 2      # a head of your own

Same target (bf16), same head (bf16, Speculators layout), same prompts, greedy, chains of 4, no
budget that cuts. vLLM's CPU build is installed into .peers/ if it is not there. Three comparisons:
the counters of both engines on their own answers; ours along vLLM's very tokens (by replay, so
that a near-tie that parts two answers is no difference between drafters); and ours along the same
tokens with the drafter's refresh switched off, which is what vLLM's issue 14649 says it lacks.
The switch is here and nowhere else.

Shapes: R rows, F features, H head width.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "peers"))

from install import FOLDER, environment, install  # noqa: E402

from outrider.core.sampling import SamplingParams  # noqa: E402
from outrider.drafters.base import Commit  # noqa: E402
from outrider.drafters.eagle import EagleDrafter  # noqa: E402
from outrider.drafters.growth import Growth, TreeShape  # noqa: E402
from outrider.drafters.heads import make_drafter, shipped_heads, style_in  # noqa: E402
from outrider.engine import CostTable, Engine, EngineConfig, FixedBudget  # noqa: E402
from outrider.evaluate.replay import BudgetPlan, Replay, Side  # noqa: E402
from outrider.evaluate.trace import TracedRequest, TraceFacts  # noqa: E402
from outrider.evaluate.workloads import load_workload  # noqa: E402
from outrider.models.heads.files import Head, read_head, write_head  # noqa: E402
from outrider.models.heads.fit import check_fit, folder_facts  # noqa: E402
from outrider.models.load import LoadedModel, load_model  # noqa: E402
from outrider.records.files import write_json  # noqa: E402
from outrider.records.manifest import TargetIdentity, run_manifest  # noqa: E402
from outrider.records.step import StepRecord  # noqa: E402
from outrider.train.features import compute_features  # noqa: E402

WORKLOADS = "builtin:chat,builtin:code"
TOLERANCE = 0.02
WORKER_S = 3600.0
NATIVE_STYLES = ("eagle3", "eagle3.1")


class UnrefreshedDrafter(EagleDrafter):
    """EAGLE as vLLM's issue 14649 describes it: accepted rows keep the head's own states.

    The states that the head guessed from stay where its guess was accepted; only a position that
    it never made a row for gets the target's true state. Chains only.
    """

    def __init__(self, plain: EagleDrafter, *, length: int) -> None:
        """The same head as another drafter, for one sequence."""
        super().__init__(
            plain._model, subset=plain._subset, shape=plain.shape, sequences=1, length=length
        )
        self.guessed: dict[int, Tensor] = {}

    def _grow_natively(self, growths: Sequence[Growth]) -> None:
        """Not here: a tree that is grown in one call keeps no states."""

    def _expand(self, growths: Sequence[Growth], states: dict[int, Tensor]) -> None:
        super()._expand(growths, states)
        self.guessed = {**self.guessed, **states}

    def observe(self, commits: Sequence[Commit]) -> None:
        super().observe(commits)
        for commit in commits:
            guessed = self.guessed.pop(commit.sequence, None)
            if guessed is None or commit.features is None:
                continue
            # Row j of a chain's last pass stands for the state of the root's position + j; the
            # last guess was never a row of a pass.
            count = min(len(commit.tokens) - 1, len(guessed) - 1)
            known = self._known[commit.sequence]
            states = known.pending(self._model).clone()
            newest = states[len(states) - len(commit.features) :]
            newest[:count] = guessed[:count]
            known.states = states


@dataclass(frozen=True)
class Counts:
    """Drafts, and how many of them were accepted as deep as 1, 2, ... k."""

    drafts: int
    accepted: tuple[int, ...]

    @classmethod
    def of(cls, accepted: Sequence[int], k: int) -> Counts:
        """From the accepted guesses of each draft."""
        return cls(len(accepted), tuple(sum(a > i for a in accepted) for i in range(k)))

    def share(self, position: int) -> float:
        return self.accepted[position] / self.drafts if self.drafts else 0.0

    @property
    def length(self) -> float:
        """Tokens per step, the next token included."""
        return 1 + sum(self.accepted) / self.drafts if self.drafts else 1.0

    def to_dict(self) -> dict[str, Any]:
        shares = [self.share(i) for i in range(len(self.accepted))]
        return {"drafts": self.drafts, "accepted_by_position": list(self.accepted)} | {
            "shares": shares,
            "acceptance_length": self.length,
        }


def whole_windows(steps: Sequence[tuple[int, int, bool]], k: int) -> list[int]:
    """Accepted guesses of the drafts whose k guesses and next token all fit into the answer.

    At an answer's end engines differ in what they guess and count, so those drafts say nothing.

    Args:
        steps: of each step what it emitted, what it accepted, and whether it had a draft.
    """
    total = sum(emitted for emitted, _, _ in steps)
    done, found = 0, []
    for emitted, accepted, drafted in steps:
        if drafted and done + k + 1 <= total:
            found.append(accepted)
        done += emitted
    return found


def of_vllm(steps: Sequence[int]) -> list[tuple[int, int, bool]]:
    """vLLM's steps: the first is the prefill's, without a draft."""
    return [(emitted, emitted - 1, i > 0) for i, emitted in enumerate(steps)]


def of_ours(steps: Sequence[StepRecord]) -> list[tuple[int, int, bool]]:
    return [(s.emitted, min(s.accepted, s.emitted), s.proposed > 0) for s in steps if s.emitted]


@dataclass(frozen=True)
class Found:
    """What a head got accepted, four ways; see the module's head."""

    vllm: Counts
    ours: Counts
    ours_same_text: Counts
    unrefreshed_same_text: Counts


def near(a: Counts, b: Counts) -> bool:
    """Shares per position within 2 points, and acceptance length within 2 %?"""
    shares = all(abs(a.share(i) - b.share(i)) <= TOLERANCE for i in range(len(a.accepted)))
    return shares and abs(a.length / b.length - 1) <= TOLERANCE


def judge(found: Found) -> tuple[bool, str]:
    """Is ours equal on the same text, or higher for the cause that the switch shows?"""
    ours, theirs, off = found.ours_same_text, found.vllm, found.unrefreshed_same_text
    if theirs.drafts == 0 or sum(theirs.accepted) == 0:
        return False, "nothing was accepted in vLLM: the head does not work there"
    if near(ours, theirs):
        if near(off, theirs):
            return True, "equal; with this head the refresh makes no difference"
        return True, "equal; vLLM refreshes its drafter's states too: without that, ours differs"
    if ours.length < theirs.length:
        return False, "vLLM accepts more than we do"
    if near(off, theirs):
        return True, "ours is higher because it refreshes its states; without that it is equal"
    return False, "ours is higher, and the refresh does not explain it"


@dataclass(frozen=True)
class Question:
    """What both engines do."""

    k: int
    max_tokens: int
    context: int
    prompts: tuple[tuple[str, tuple[int, ...]], ...]
    folder: Path


def ask_vllm(loaded: LoadedModel, head: Path, question: Question) -> dict[str, Any]:
    """vLLM's answers, steps and counters; raises SystemExit with the log's place if it fails."""
    facts = install("vllm", (question.folder / "vllm").resolve(), os.cpu_count() or 1)
    if not facts["ok"]:
        raise SystemExit(f"vLLM: {facts['reason']}")
    job = {
        "model": str(loaded.source.resolve()),
        "head": str(head),
        "k": question.k,
        "context": question.context,
        "max_tokens": question.max_tokens,
        "end_tokens": sorted(loaded.target.end_tokens),
        "prompts": [list(ids) for _, ids in question.prompts],
    }
    log = question.folder / "logs" / "vllm-heads.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    (head.parent / "job.json").write_text(json.dumps(job))
    python = environment((question.folder / "vllm").resolve())
    result = head.parent / "result.json"
    command = [python, HERE / "vllm_worker.py", head.parent / "job.json", result]
    with log.open("wb") as file:
        done = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, timeout=WORKER_S, check=False
        )
    if done.returncode:
        raise SystemExit(f"vLLM failed with this head; see {log}")
    answer: dict[str, Any] = json.loads(result.read_text())
    return answer


def drafter(
    head: Head, loaded: LoadedModel, question: Question, *, refreshed: bool = True
) -> EagleDrafter:
    """Our drafter for a chain; with the refresh switched off for the comparison alone."""
    made = make_drafter(
        head,
        loaded.target,
        source=loaded.source,
        shape=TreeShape(branching=1, beam=1),
        sequences=1,
        length=question.context,
    )
    assert isinstance(made, EagleDrafter)
    return made if refreshed else UnrefreshedDrafter(made, length=question.context)


def answer_ourselves(
    head: Head, loaded: LoadedModel, question: Question
) -> tuple[list[tuple[int, ...]], list[Sequence[StepRecord]]]:
    """Our engine's answers and steps with a fixed budget of a chain."""
    engine = Engine(
        loaded.target,
        drafters={"head": drafter(head, loaded, question)},
        config=EngineConfig(slots=1, context=question.context, reuse_prefix=False),
        budget=FixedBudget(question.k, question.k),
    )
    params = SamplingParams(temperature=0, max_tokens=question.max_tokens, seed=0)
    answers, runs = [], []
    for _, ids in question.prompts:
        [done] = engine.generate([ids], params, drafter="head")
        if done.error is not None or any("fault" in step.reason for step in done.steps):
            raise SystemExit(f"our engine failed: {done.error or 'the drafter did'}")
        answers.append(tuple(done.tokens))
        runs.append(done.steps)
    return answers, runs


def replay_along(
    answers: Sequence[Sequence[int]],
    head: Head,
    loaded: LoadedModel,
    question: Question,
    *,
    refreshed: bool,
) -> list[Sequence[StepRecord]]:
    """Our drafter along given answers, whoever wrote them."""
    target = loaded.target
    # The limit lies behind the answer, so that the last drafts are whole.
    params = SamplingParams(temperature=0, max_tokens=question.max_tokens + question.k + 1, seed=0)
    facts = TraceFacts(
        vocab_size=target.vocab_size,
        end_tokens=target.end_tokens,
        context=question.context,
        prefill_chunk=EngineConfig().prefill_chunk,
        verify_ms={1: 1.0},
        host_ms=0.0,
    )
    side = Side(
        "head",
        drafter(head, loaded, question, refreshed=refreshed),
        BudgetPlan(question.k, question.k),
    )

    def features(request: TracedRequest, layers: tuple[int, ...]) -> Tensor:
        return compute_features(target, [[*request.prompt, *request.tokens]], layers)[0]

    replay = Replay(side, facts, costs=CostTable({1: 1.0}), features=features)
    return [
        replay.run(TracedRequest(name, "", name, ids, tuple(tokens), params))
        for (name, ids), tokens in zip(question.prompts, answers, strict=True)
    ]


def for_vllm(folder: Path, copy: Path, target: Path, *, name: str) -> Head:
    """A head as vLLM reads one, written to a new folder: bf16, Speculators layout.

    Args:
        target: the target's folder; `name` is what it is called.
    """
    facts = folder_facts(target, name=name)
    stored = read_head(folder, target=facts)
    check_fit(stored.config, facts)
    write_head(stored, copy, layout="speculators", precision="bf16")
    return read_head(copy, target=facts)


def check_head(folder: Path, loaded: LoadedModel, question: Question) -> dict[str, Any]:
    """One head in both engines."""
    k = question.k
    with tempfile.TemporaryDirectory() as place:
        same = Path(place) / "head"
        head = for_vllm(folder, same, loaded.source, name=loaded.spec)
        theirs = ask_vllm(loaded, same, question)
    written = [answer["tokens"] for answer in theirs["answers"]]
    answers, runs = answer_ourselves(head, loaded, question)
    on = replay_along(written, head, loaded, question, refreshed=True)
    off = replay_along(written, head, loaded, question, refreshed=False)

    def ours(steps: Sequence[Sequence[StepRecord]]) -> Counts:
        return Counts.of([a for s in steps for a in whole_windows(of_ours(s), k)], k)

    windows = [a for one in theirs["answers"] for a in whole_windows(of_vllm(one["steps"]), k)]
    found = Found(Counts.of(windows, k), ours(runs), ours(on), ours(off))
    ok, reason = judge(found)
    return {
        "head": folder.resolve().name,
        "style": style_in(folder),
        "ok": ok,
        "verdict": reason,
        "k": k,
        "counts": {name: counts.to_dict() for name, counts in vars(found).items()},
        "vllm_counters": theirs["counters"],
        "same_answers": sum(a == tuple(b) for a, b in zip(answers, written, strict=True)),
        "leading_tokens_equal": [agreement(a, b) for a, b in zip(answers, written, strict=True)],
        "answers": len(answers),
        "tokens": sum(map(len, written)),
        "versions": theirs["versions"],
    }


def agreement(a: Sequence[int], b: Sequence[int]) -> int:
    """Leading tokens that are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


NAMES = {
    "vllm": "vLLM",
    "ours": "ours, own answers",
    "ours_same_text": "ours, vLLM's answers",
    "unrefreshed_same_text": "  the same, refresh off",
}


def table(result: dict[str, Any]) -> str:
    """A head's figures for people."""
    positions = "".join(f"{f'pos {i + 1}':>9}" for i in range(result["k"]))
    head = f"{'':<26}{'drafts':>7}{positions}{'length':>9}"
    lines = [f"{result['head']} ({result['style']}), k = {result['k']}", head]
    for key, counts in result["counts"].items():
        shares = "".join(f"{share:>9.3f}" for share in counts["shares"])
        length = counts["acceptance_length"]
        lines.append(f"{NAMES[key]:<26}{counts['drafts']:>7}{shares}{length:>9.3f}")
    lines.append(
        f"vLLM's counters: {result['vllm_counters']}; {result['same_answers']} of "
        f"{result['answers']} answers equal ours"
    )
    lines.append(f"{'PASS' if result['ok'] else 'FAIL'}: {result['verdict']}")
    return "\n".join(lines)


def default_file() -> Path:
    """A file that git does not see, by date."""
    return HERE.parent / "scratch" / f"vllm-heads-{date.today().isoformat()}.json"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("heads", nargs="*", type=Path, metavar="HEAD", help="folders of heads")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--workload", default=WORKLOADS)
    parser.add_argument("--limit", type=int, default=8, help="prompts of each workload")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--k", type=int, default=4, help="guesses per step")
    parser.add_argument("--threads", type=int, help="of our side")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where vLLM is or goes")
    parser.add_argument("--json", type=Path, default=default_file(), help="for the results")
    options = parser.parse_args()
    if not options.heads:
        options.heads = [p for p in shipped_heads().values() if style_in(p) in NATIVE_STYLES]
    if not options.heads:
        parser.error("no EAGLE-3 head ships with Outrider; name a head's folder")
    return options


def question_of(options: argparse.Namespace, loaded: LoadedModel) -> Question:
    """The prompts as tokens, and room for the longest of them."""
    prompts = tuple(
        (f"{workload}/{prompt.id}", tuple(loaded.tokenizer.chat(prompt.chat())))
        for workload in options.workload.split(",")
        for prompt in load_workload(workload, limit=options.limit)
    )
    longest = max(len(ids) for _, ids in prompts) + options.max_tokens + options.k + 1
    context = min(-(-longest // 64) * 64, loaded.target.context_length)
    return Question(options.k, options.max_tokens, context, prompts, options.folder)


def main() -> int:
    options = arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    loaded = load_model(options.target, weights="bf16")
    question, target = question_of(options, loaded), loaded.target
    manifest = run_manifest(
        seed=0,
        threads=torch.get_num_threads(),
        target=TargetIdentity(target.name, target.fingerprint, target.precision),
        options={"workload": options.workload, "limit": options.limit, "k": options.k}
        | {"max_tokens": options.max_tokens, "tolerance": TOLERANCE},
    )
    results = []
    for folder in options.heads:
        results.append(check_head(folder, loaded, question))
        print(table(results[-1]), end="\n\n", flush=True)
    write_json(options.json, {"manifest": manifest.finish().to_dict(), "heads": results})
    print(f"all figures: {options.json}")
    return 0 if all(result["ok"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
