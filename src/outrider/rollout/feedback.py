"""Which requests are worth keeping, and when acceptance drifts. Decisions; one writer for files.

Kept are failed, slow and token-different requests and outliers of acceptance in both tails: very
little is how garbled text looks to a drafter, very much is how a loop looks. Figures and a hash are
always kept, the prompt only where the configuration says so, and then redacted by a function that
is handed in.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from outrider.records.files import RecordFileError
from outrider.rollout.config import FeedbackSettings
from outrider.rollout.verdict import Observation

Reason = Literal[
    "failed", "invalid", "different", "repetitive", "low_acceptance", "high_acceptance", "slow",
    "drift",
]  # fmt: skip
SETS: Final[Mapping[Reason, str]] = {
    "failed": "regression",
    "invalid": "regression",
    "different": "regression",
    "repetitive": "regression",
    "low_acceptance": "business",
    "high_acceptance": "regression",
    "slow": "business",
    "drift": "training",
}
"""Which set a case goes to."""

REMEMBERED: Final = 2000  # requests per prompt type that quantiles are taken from
LEAST: Final = 200  # of them, before anything is an outlier
CASES: Final = "cases.jsonl"


@dataclass(frozen=True)
class Case:
    """A request that is worth keeping.

    Attributes:
        id: of the request.
        reason: why it is kept.
        profile, prompt_type: whose.
        figures: of the request.
        prompt_sha256: of the prompt, so that the same one is kept once.
        messages: the redacted conversation; `None` unless text was asked for.
    """

    id: str
    reason: Reason
    profile: str
    prompt_type: str
    figures: Mapping[str, Any]
    prompt_sha256: str
    messages: Sequence[Mapping[str, Any]] | None = None


@dataclass
class _Seen:
    """What a prompt type has shown of late."""

    tpot: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    length: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    bounds: tuple[float, float, float] = (math.inf, -math.inf, math.inf)
    count: int = 0


class Selector:
    """Picks cases of one profile."""

    def __init__(
        self,
        profile: str,
        settings: FeedbackSettings,
        *,
        redact: Callable[[str], str],
        kept: Counter[tuple[str, Reason]] | None = None,
    ) -> None:
        """Args:
        profile: whose requests.
        settings: what is kept, and how many.
        redact: takes personal data out of a text.
        kept: how many of each prompt type and reason are kept already.
        """
        self._profile, self._settings, self._redact = profile, settings, redact
        self._kept: Counter[tuple[str, Reason]] = Counter(kept or ())
        self._seen: dict[str, _Seen] = {}
        self._hashes: set[tuple[str, Reason]] = set()

    def consider(
        self,
        observation: Observation,
        messages: Sequence[Mapping[str, Any]],
        *,
        different: bool = False,
        drifting: bool = False,
    ) -> Case | None:
        """The case, where the request is one and there is room for it.

        Args:
            observation: its figures.
            messages: its conversation.
            different: its tokens differ from the baseline's where they must not.
            drifting: acceptance of its prompt type drifts: it is wanted for training.
        """
        reason = self._reason(observation, different=different, drifting=drifting)
        self._learn(observation)
        if reason is None:
            return None
        place = (observation.prompt_type, reason)
        digest = hashlib.sha256(json.dumps(messages, default=str).encode()).hexdigest()
        if self._kept[place] >= self._settings.most or (digest, reason) in self._hashes:
            return None
        self._kept[place] += 1
        self._hashes.add((digest, reason))
        return Case(
            id=observation.id,
            reason=reason,
            profile=self._profile,
            prompt_type=observation.prompt_type,
            figures={k: v for k, v in asdict(observation).items() if v not in (None, "")},
            prompt_sha256=digest,
            messages=[self._clean(m) for m in messages] if self._settings.text else None,
        )

    def _clean(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message with its text redacted; parts that are no text are dropped."""
        content = message.get("content")
        if isinstance(content, list):
            parts = [p.get("text", "") for p in content if isinstance(p, Mapping)]
            content = "\n".join(part for part in parts if isinstance(part, str))
        text = self._redact(content) if isinstance(content, str) else ""
        return {"role": str(message.get("role", "user")), "content": text}

    def _reason(self, o: Observation, *, different: bool, drifting: bool) -> Reason | None:
        if o.outcome in ("error", "timeout", "out_of_memory"):
            return "failed"
        if different:
            return "different"
        if o.valid is False:
            return "invalid"
        if o.repetitive:
            return "repetitive"
        slow, low, high = self._of(o.prompt_type).bounds
        length = _length(o)
        if length is not None and length < low:
            return "low_acceptance"
        if length is not None and length > high:
            return "high_acceptance"
        if o.tpot_ms is not None and o.tpot_ms > slow:
            return "slow"
        return "drift" if drifting else None

    def _learn(self, o: Observation) -> None:
        seen, length = self._of(o.prompt_type), _length(o)
        if o.outcome != "ok":
            return
        if o.tpot_ms is not None:
            seen.tpot.append(o.tpot_ms)
        if length is not None:
            seen.length.append(length)
        seen.count += 1
        if seen.count % 50 == 0 and seen.count >= LEAST:  # quantiles of thousands, now and then
            tail = self._settings.tail
            slow = float(np.quantile(seen.tpot, self._settings.slow)) if seen.tpot else math.inf
            low, high = -math.inf, math.inf
            if len(seen.length) >= LEAST:
                low, high = (float(q) for q in np.quantile(seen.length, [tail, 1 - tail]))
            seen.bounds = (slow, low, high)

    def _of(self, prompt_type: str) -> _Seen:
        return self._seen.setdefault(prompt_type, _Seen())


def _length(o: Observation) -> float | None:
    """Acceptance length of a request; the next token is counted."""
    return 1 + o.accepted / o.steps if o.accepted is not None and o.steps else None


@dataclass(frozen=True)
class Drift:
    """Acceptance of a prompt type is no longer what it was.

    Attributes:
        before, now: mean acceptance length then and of late.
        requests: seen since the watch began.
    """

    prompt_type: str
    before: float
    now: float
    requests: int

    @property
    def why(self) -> str:
        way = "fell" if self.now < self.before else "rose"
        return (
            f"acceptance length of {self.prompt_type or 'all'} {way} from {self.before:.2f} "
            f"to {self.now:.2f}"
        )


class DriftWatch:
    """A two-sided CUSUM over means of batches of requests (Page, Biometrika 1954).

    Batches make the means nearly normal. The reference is itself an estimate, which multiplies the
    false alarms of the usual slack and bound (0.5 and 5) by many. With these, simulated: 4 % within
    465 batches, which are 9,300 requests of a type; a shift by two deviations of a batch's mean is
    found after seven batches.
    """

    BATCH: Final = 20
    REFERENCE: Final = 50  # batches
    SLACK: Final = 0.75
    BOUND: Final = 8.0

    def __init__(self, prompt_type: str) -> None:
        self.prompt_type = prompt_type
        self._begin()

    def _begin(self) -> None:
        self._batch: list[float] = []
        self._reference: list[float] = []
        self._late: deque[float] = deque(maxlen=5)
        self._up = self._down = 0.0
        self._requests = 0

    def saw(self, observation: Observation) -> Drift | None:
        """Take in a request; the drift, once when it is found. The watch then begins anew."""
        length = _length(observation)
        if length is None:
            return None
        self._requests += 1
        self._batch.append(length)
        if len(self._batch) < self.BATCH:
            return None
        mean = sum(self._batch) / len(self._batch)
        self._batch = []
        if len(self._reference) < self.REFERENCE:
            self._reference.append(mean)
            return None
        before = float(np.mean(self._reference))
        spread = max(float(np.std(self._reference, ddof=1)), 1e-6)
        z = (mean - before) / spread
        self._late.append(mean)
        self._up = max(0.0, self._up + z - self.SLACK)
        self._down = max(0.0, self._down - z - self.SLACK)
        if max(self._up, self._down) < self.BOUND:
            return None
        found = Drift(self.prompt_type, before, float(np.mean(self._late)), self._requests)
        self._begin()
        return found


class FeedbackFolder:
    """Where cases are kept: all of them with their figures in ``cases.jsonl``, and those with text
    in a set per kind (``business.jsonl``, ``regression.jsonl``, ``training.jsonl``), which
    `outrider eval` and `outrider train` read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, case: Case) -> None:
        """Keep a case.

        Raises:
            RecordFileError: the disk is full or fails.
        """
        figures = {k: v for k, v in asdict(case).items() if k != "messages"}
        self._append(CASES, figures)
        if case.messages is not None:
            kind = SETS[case.reason]
            path = f"{kind}.jsonl"
            if not (self.folder / path).exists():
                head = {"schema": 1, "name": f"feedback-{kind}", "version": "1", "kind": kind}
                known = kind in ("business", "regression")
                self._append(
                    path, {"set": {**head, "kind": kind if known else "workload", "licence": ""}}
                )
            self._append(
                path,
                {
                    "id": case.id or case.prompt_sha256[:16],
                    "family": case.prompt_type or "feedback",
                    "messages": list(case.messages),
                },
            )

    def kept(self, profile: str) -> Counter[tuple[str, Reason]]:
        """How many of each prompt type and reason there are; lines that cannot be read are left
        out."""
        found: Counter[tuple[str, Reason]] = Counter()
        try:
            lines = (self.folder / CASES).read_text(encoding="utf-8").splitlines()
        except OSError:
            return found
        for line in lines:
            try:
                case = json.loads(line)
                if case["profile"] == profile and case["reason"] in SETS:
                    found[case["prompt_type"], case["reason"]] += 1
            except (ValueError, KeyError, TypeError):
                continue
        return found

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        path = self.folder / name
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        except OSError as fault:
            raise RecordFileError(f"{path} cannot be written: {fault.strerror}") from fault
