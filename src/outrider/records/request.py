"""What one request did: how much of its draft was accepted, how long it took. Plain data, no torch.

The acceptance part keeps the names of AIPerf's engine-neutral acceptance record unchanged, so that
its tools read our files; `RequestRecord` adds what Outrider knows beside it. Nothing here measures:
`acceptance_record` and `request_record` are pure functions of the engine's `StepRecord`s.

The mapping from our steps to that record:

* A *verify step* is a step in which the request received at least one token. Prefill chunks that
  give no token do not count; the last prefill chunk, whose logits give the first token, does.
* A step without a draft is a verify step with nothing drafted and nothing accepted, so plain
  decoding has acceptance length 1.0 and a target forward reduction of 0.
* A draft token counts as accepted when it reached the output. Where the output ended inside the
  accepted path (end token, stop string, token limit), the rest of the path is not counted.
* The root is never counted as drafted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from outrider.errors import OutriderError
from outrider.records.step import StepRecord


class InvalidRecord(OutriderError, ValueError):
    """A record contradicts itself, or lacks a field."""


@dataclass(frozen=True)
class AcceptanceRecord:
    """One request's acceptance; field names are AIPerf's. No tree, no fixed draft length.

    Attributes:
        engine: who filled the record; provenance only, no metric branches on it.
        mean_acceptance_length: 1 + accepted / steps; `None` without a step.
        draft_acceptance_rate: accepted / drafted, a fraction; `None` when nothing was drafted.
        acceptance_histogram: j to the number of verify steps that accepted exactly j; sparse.
        num_accepted_draft_tokens: accepted draft tokens; the next token is not one.
        num_draft_tokens: draft tokens put to the target, roots not counted.
        num_spec_steps: verify steps.
        num_spec_tokens: the fixed upper bound on draft tokens per step, or `None` if it varies.
        completion_tokens: output tokens, or `None` if the engine does not say.
        per_step_accepted, per_step_drafted: one entry per verify step, or `None`.
    """

    engine: str
    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    acceptance_histogram: Mapping[int, int]
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_steps: int
    num_spec_tokens: int | None = None
    completion_tokens: int | None = None
    per_step_accepted: tuple[int, ...] | None = None
    per_step_drafted: tuple[int, ...] | None = None

    def check(self) -> AcceptanceRecord:
        """Hold the record to its invariants and give it back.

        Only exact integers are compared; the two float fields are not derived again.

        Raises:
            InvalidRecord: a count is not an integer of at least 0, or two counts contradict.
        """
        steps, accepted = self.num_spec_steps, self.num_accepted_draft_tokens
        drafted, histogram = self.num_draft_tokens, self.acceptance_histogram
        for name in ("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens"):
            _count(name, getattr(self, name))
        for name in ("num_spec_tokens", "completion_tokens"):
            if getattr(self, name) is not None:
                _count(name, getattr(self, name))
        for length, times in histogram.items():
            _count("acceptance_histogram key", length)
            _count(f"acceptance_histogram[{length}]", times)
        _equal("sum of acceptance_histogram", sum(histogram.values()), "num_spec_steps", steps)
        _equal(
            "sum of j * acceptance_histogram[j]",
            sum(j * times for j, times in histogram.items()),
            "num_accepted_draft_tokens",
            accepted,
        )
        if accepted > drafted:
            raise InvalidRecord(
                f"num_accepted_draft_tokens {accepted} exceeds num_draft_tokens {drafted}"
            )
        self._check_per_step("per_step_accepted", self.per_step_accepted, accepted)
        self._check_per_step("per_step_drafted", self.per_step_drafted, drafted)
        if self.per_step_accepted is not None and self.per_step_drafted is not None:
            for step, (a, d) in enumerate(
                zip(self.per_step_accepted, self.per_step_drafted, strict=True)
            ):
                if a > d:
                    raise InvalidRecord(f"step {step} accepted {a} of {d} drafted tokens")
        return self

    def _check_per_step(self, name: str, values: tuple[int, ...] | None, total: int) -> None:
        if values is None:
            return
        for step, value in enumerate(values):
            _count(f"{name}[{step}]", value)
        _equal(f"length of {name}", len(values), "num_spec_steps", self.num_spec_steps)
        _equal(f"sum of {name}", sum(values), "its total", total)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; the histogram's keys become strings, as JSON wants them."""
        result: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        histogram = sorted(self.acceptance_histogram.items())
        result["acceptance_histogram"] = {str(j): times for j, times in histogram}
        for name in ("per_step_accepted", "per_step_drafted"):
            if result[name] is not None:
                result[name] = list(result[name])
        return result

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AcceptanceRecord:
        """The checked record of `to_dict`'s form; keys it does not know are left alone.

        Raises:
            InvalidRecord: a field is missing or malformed, or `check` fails.
        """
        values = _known(cls, data, skip=())
        try:
            histogram = values["acceptance_histogram"]
            values["acceptance_histogram"] = {int(j): times for j, times in histogram.items()}
            for name in ("per_step_accepted", "per_step_drafted"):
                if values.get(name) is not None:
                    values[name] = tuple(values[name])
        except (AttributeError, TypeError, ValueError) as fault:
            raise InvalidRecord(f"acceptance record is malformed: {fault}") from None
        return cls(**values).check()


@dataclass(frozen=True)
class RequestTimings:
    """One request's clock, as its caller saw it.

    Attributes:
        queue_s: seconds from arrival until the first pass that held one of its rows.
        ttft_ms: from arrival to the first output token, queue and prefill included; `None` if
            there was none.
        e2e_ms: from arrival to the last output token.
    """

    queue_s: float
    ttft_ms: float | None
    e2e_ms: float


@dataclass(frozen=True)
class RequestRecord:
    """One finished or failed request. On disk its acceptance fields lie beside its own.

    Attributes:
        id: the request's id: the prompt's id in an evaluation.
        family: the workload family the prompt belongs to; empty outside an evaluation.
        drafter: who guessed, in order of first use and joined by "+"; "none" for plain decoding.
        rule: the acceptance rule, joined like `drafter`.
        precision: what the target's weights were held in, joined like `drafter`.
        lossless: no step used a rule that changes the output law.
        sampling: the sampling parameters that the request ran with.
        prompt_tokens, completion_tokens: token counts; the second equals the sum of emitted.
        finish_reason: "stop", "length", "cancelled", "error" ...; `None` if it never finished.
        error: what went wrong, in one line; `None` if nothing did.
        queue_s, ttft_ms, e2e_ms: as in `RequestTimings`.
        tpot_ms: (e2e - TTFT) / (n - 1); `None` for fewer than two tokens.
        target_steps: verify steps (see the module head).
        prefill_steps: passes that gave the request no token.
        first_step_tokens: tokens of the first verify step, which come with the first token.
        accepted_by_position: entry j - 1 counts verify steps whose accepted path reached depth j.
        rejected_by_position: entry j - 1 counts verify steps whose tree had depth j or more, whose
            path reached depth j - 1 and whose next token was none of the guesses at depth j.
        draft_ms, verify_ms, host_ms: the verify steps' times, summed. A step's time belongs to all
            sequences in it: do not add these over requests that ran side by side.
        prefill_ms: the same for the passes that gave no token, all three parts together.
        seed: the seed of the request's noise; `None` if unknown.
        peak_memory_bytes: the largest memory use seen while the request ran; `None` if unknown.
        acceptance: the acceptance record; `None` where the engine reports none.
    """

    id: str
    family: str
    drafter: str
    rule: str
    precision: str
    lossless: bool
    sampling: Mapping[str, Any]
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str | None
    error: str | None
    queue_s: float
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float
    target_steps: int
    prefill_steps: int = 0
    first_step_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()
    rejected_by_position: tuple[int, ...] = ()
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    host_ms: float = 0.0
    prefill_ms: float = 0.0
    seed: int | None = None
    peak_memory_bytes: int | None = None
    acceptance: AcceptanceRecord | None = field(default=None)

    @property
    def target_forward_reduction(self) -> float | None:
        """1 - steps / output tokens: the share of target passes saved; `None` without output."""
        if not self.completion_tokens:
            return None
        return 1 - self.target_steps / self.completion_tokens

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready and flat: AIPerf's names beside ours, `completion_tokens` shared."""
        acceptance = {} if self.acceptance is None else self.acceptance.to_dict()
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "acceptance"}
        own["sampling"] = dict(self.sampling)
        own["accepted_by_position"] = list(self.accepted_by_position)
        own["rejected_by_position"] = list(self.rejected_by_position)
        return {**acceptance, **own}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RequestRecord:
        """The record of `to_dict`'s form.

        Raises:
            InvalidRecord: a field is missing or the acceptance part contradicts itself.
        """
        values = _known(cls, data, skip=("acceptance",))
        for name in ("accepted_by_position", "rejected_by_position"):
            values[name] = tuple(values.get(name) or ())
        if "acceptance_histogram" in data:
            values["acceptance"] = AcceptanceRecord.from_dict(data)
        return cls(**values)


def is_verify_step(step: StepRecord) -> bool:
    """The request received a token from this step."""
    return step.emitted > 0


def accepted_in_output(step: StepRecord) -> int:
    """Accepted draft tokens of a step that reached the output."""
    return min(step.accepted, step.emitted)


def tpot_ms(*, e2e_ms: float, ttft_ms: float | None, tokens: int) -> float | None:
    """Time per output token after the first, (e2e - TTFT) / (n - 1); `None` for n < 2."""
    if ttft_ms is None or tokens < 2:
        return None
    return (e2e_ms - ttft_ms) / (tokens - 1)


def acceptance_record(
    steps: Sequence[StepRecord], *, engine: str = "outrider", num_spec_tokens: int | None = None
) -> AcceptanceRecord:
    """The checked acceptance record of one request's steps (mapping in the module head).

    Raises:
        InvalidRecord: a step contradicts itself, such as more accepted than its tree is deep.
    """
    verify = [step for step in steps if is_verify_step(step)]
    for step in verify:
        _check_step(step)
    accepted = tuple(accepted_in_output(step) for step in verify)
    drafted = tuple(step.proposed for step in verify)
    return AcceptanceRecord(
        engine=engine,
        mean_acceptance_length=1 + sum(accepted) / len(verify) if verify else None,
        draft_acceptance_rate=sum(accepted) / sum(drafted) if sum(drafted) else None,
        acceptance_histogram=dict(sorted(Counter(accepted).items())),
        num_accepted_draft_tokens=sum(accepted),
        num_draft_tokens=sum(drafted),
        num_spec_steps=len(verify),
        num_spec_tokens=num_spec_tokens,
        completion_tokens=sum(step.emitted for step in verify),
        per_step_accepted=accepted,
        per_step_drafted=drafted,
    ).check()


def by_position(steps: Sequence[StepRecord]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(accepted, rejected) verify steps per depth, depth 1 first; see `RequestRecord`.

    A step whose output ended inside its path rejects nothing: the target's word on the tokens
    after the end is not part of the output. The sum of the first equals the accepted tokens.
    """
    verify = [step for step in steps if is_verify_step(step)]
    depth = max((step.proposed_depth for step in verify), default=0)
    accepted, rejected = [0] * depth, [0] * depth
    for step in verify:
        reached = accepted_in_output(step)
        for position in range(reached):
            accepted[position] += 1
        if step.emitted == step.accepted + 1 and reached < step.proposed_depth:
            rejected[reached] += 1
    return tuple(accepted), tuple(rejected)


def request_record(
    steps: Sequence[StepRecord],
    timings: RequestTimings,
    *,
    id: str,
    sampling: Mapping[str, Any],
    prompt_tokens: int,
    finish_reason: str | None,
    family: str = "",
    error: str | None = None,
    seed: int | None = None,
    peak_memory_bytes: int | None = None,
    num_spec_tokens: int | None = None,
    engine: str = "outrider",
) -> RequestRecord:
    """The record of one request, from its steps in order and its clock.

    Raises:
        InvalidRecord: the steps contradict themselves.
    """
    acceptance = acceptance_record(steps, engine=engine, num_spec_tokens=num_spec_tokens)
    verify = [step for step in steps if is_verify_step(step)]
    prefill = [step for step in steps if not is_verify_step(step)]
    accepted, rejected = by_position(steps)
    tokens = sum(step.emitted for step in verify)
    return RequestRecord(
        id=id,
        family=family,
        drafter=_joined([step.drafter for step in verify if step.drafter != "none"]) or "none",
        rule=_joined([step.rule for step in verify]),
        precision=_joined([step.precision for step in verify]),
        lossless=all(step.lossless for step in verify),
        sampling=sampling,
        prompt_tokens=prompt_tokens,
        completion_tokens=tokens,
        finish_reason=finish_reason,
        error=error,
        queue_s=timings.queue_s,
        ttft_ms=timings.ttft_ms,
        tpot_ms=tpot_ms(e2e_ms=timings.e2e_ms, ttft_ms=timings.ttft_ms, tokens=tokens),
        e2e_ms=timings.e2e_ms,
        target_steps=len(verify),
        prefill_steps=len(prefill),
        first_step_tokens=verify[0].emitted if verify else 0,
        accepted_by_position=accepted,
        rejected_by_position=rejected,
        draft_ms=sum(step.draft_ms for step in verify),
        verify_ms=sum(step.verify_ms for step in verify),
        host_ms=sum(step.host_ms for step in verify),
        prefill_ms=sum(step.draft_ms + step.verify_ms + step.host_ms for step in prefill),
        seed=seed,
        peak_memory_bytes=peak_memory_bytes,
        acceptance=acceptance,
    )


def _check_step(step: StepRecord) -> None:
    if not 0 <= step.accepted <= step.proposed_depth <= step.proposed:
        raise InvalidRecord(
            f"step {step.step}: accepted {step.accepted}, depth {step.proposed_depth} and proposed "
            f"{step.proposed} must not decrease in this order"
        )
    if step.emitted > step.accepted + 1:
        raise InvalidRecord(
            f"step {step.step} emitted {step.emitted} tokens but accepted only {step.accepted}"
        )


def _joined(names: Sequence[str]) -> str:
    return "+".join(dict.fromkeys(names))


def _known(cls: type[Any], data: Mapping[str, Any], *, skip: tuple[str, ...]) -> dict[str, Any]:
    """The entries of ``data`` that are fields of ``cls``; refuses missing ones without default."""
    values = {f.name: data[f.name] for f in fields(cls) if f.name in data and f.name not in skip}
    try:
        cls(**values)
    except TypeError as fault:
        raise InvalidRecord(f"{cls.__name__} is incomplete: {fault}") from None
    return values


def _count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidRecord(f"{name} is {value!r}; it must be an integer of at least 0")


def _equal(name: str, value: int, other_name: str, other: int) -> None:
    if value != other:
        raise InvalidRecord(f"{name} is {value} but {other_name} is {other}")
