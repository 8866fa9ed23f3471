"""Evidence from a running server: what it samples against what it says of its own probabilities.

The reference is a request for one token with log-probabilities at temperature 1: that token comes
from the prefill, where nothing is guessed. From those log-probabilities follow the exact laws at
any temperature, top-k and top-p, as far as the listed tokens decide them; contexts that they do not
decide are left out, which they are before anything is drawn there. No tensor library is needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.backends.base import Answer, Ask, Backend, EngineUnfit, TokenLogprob
from outrider.backends.connect import DIALECTS
from outrider.core.law import EProcess, Law, Setting, law_of, readable, token_label
from outrider.evaluate.certify_law import ContextTally, LawTest, Tally
from outrider.evaluate.certify_plan import CertifyPlan

TOP = (20, 5)  # log-probabilities asked for; the second where the first is refused
AT_ONCE = 32
TIE = 0.3  # nats: bf16 logits near 20 are 0.125 apart, two of them on each side
SABOTAGE = 0.15  # total variation that the sabotage run aims for

ALL = "all positions"
LATER = "positions 2 and later"
AFTER_REJECTION = "the token after a rejection"
AFTER_FULL = "the token after a full acceptance"

Labels = tuple[Hashable, ...]


@dataclass(frozen=True)
class Side:
    """A server, and how its tokens are told apart.

    Attributes:
        backend: the server.
        by_id: tokens are ids; otherwise they are texts, and contexts are continued as text.
        top: log-probabilities that it gives.
    """

    backend: Backend
    by_id: bool
    top: int

    @property
    def certain(self) -> bool:
        """Can a context be continued by the very tokens that came?"""
        return self.by_id or "tokenize" in self.backend.info.abilities

    def extra(self) -> Mapping[str, Any]:
        """Fields that make it call tokens by id."""
        return _id_fields(self.backend) if self.by_id else {}

    async def prompt(self, text: str) -> str | tuple[int, ...]:
        """A prompt as it is sent."""
        tokens = await self.backend.tokenize(text) if self.by_id else None
        return text if tokens is None else tokens

    def extended(self, prompt: str | tuple[int, ...], labels: Labels) -> str | tuple[int, ...]:
        """The prompt continued by tokens."""
        if isinstance(prompt, str):
            return prompt + "".join(str(label) for label in labels)
        return (*prompt, *(label for label in labels if isinstance(label, int)))


@dataclass
class RemoteEvidence:
    """What one setting showed.

    Attributes:
        failed: errors of requests that the engine took and did not answer.
        refused: of those that it did not take (HTTP 4xx): it lacks the setting, and says so.
        undecided: tokens of contexts whose law the log-probabilities do not decide.
    """

    setting: Setting
    requests: int = 0
    failed: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    accepted: int | None = None
    drafted: int | None = None
    undecided: int = 0
    tallies: dict[str, Tally] = field(default_factory=dict)
    contexts: ContextTally = field(default_factory=lambda: ContextTally("contexts"))
    null: Tally = field(default_factory=lambda: Tally("null"))
    process: EProcess = field(default_factory=EProcess)

    def tests(self, alpha: float) -> list[LawTest]:
        rows = [tally.test(alpha=alpha) for tally in self.tallies.values()]
        return [*rows, self.contexts.test(alpha=alpha)]


def labelled(entries: Sequence[TokenLogprob] | None) -> Labels:
    """How an answer names its tokens."""
    return tuple(token_label(entry.token) for entry in entries or ())


def _id_fields(backend: Backend) -> Mapping[str, Any]:
    dialect = DIALECTS.get(backend.info.kind)
    return {} if dialect is None else dialect.by_id


async def introduce(backend: Backend) -> Side:
    """Find out how a server names tokens and how many log-probabilities it gives.

    Raises:
        EngineUnfit: it gives none, so that its law cannot be known.
    """
    reasons = []
    for by_id in (True, False):
        if by_id and not _id_fields(backend):
            continue
        for top in TOP:
            side = Side(backend, by_id, top)
            answer = await backend.answer(_reference(side, "One, two,"))
            entries = answer.logprobs
            told = answer.error is None and entries and entries[0].top
            if entries and told and (not by_id or isinstance(token_label(entries[0].token), int)):
                return side
            reasons.append(answer.error or "no log-probabilities came back")
    raise EngineUnfit(
        f"{backend.info.model} gives no log-probabilities for completions ({reasons[-1]}); "
        "without them its law cannot be known: start the engine with log-probabilities, or "
        "certify the embedded engine"
    )


def _reference(side: Side, prompt: str | tuple[int, ...]) -> Ask:
    return Ask(
        prompt,
        max_tokens=1,
        temperature=1.0,
        logprobs=side.top,
        ignore_eos=True,
        stream=False,
        extra=side.extra(),
    )


class References:
    """Laws after a prompt and some tokens, each context asked once."""

    def __init__(self, side: Side, prompt: str | tuple[int, ...], gate: asyncio.Semaphore) -> None:
        self._side = side
        self.prompt = prompt
        self._gate = gate
        self._tops: dict[Labels, tuple[tuple[str, float], ...]] = {}
        self._unsound: set[Labels] = set()

    async def prepare(self, prefixes: Sequence[Labels]) -> None:
        """Ask for what is not known yet. A context whose text is cut into other tokens than those
        that came has no law here."""
        known = self._tops.keys() | self._unsound
        wanted = [p for p in dict.fromkeys(prefixes) if p not in known]

        async def one(prefix: Labels) -> None:
            ask = _reference(self._side, self._side.extended(self.prompt, prefix))
            async with self._gate:
                if not await self._sound(prefix):
                    self._unsound.add(prefix)
                    return
                answer = await self._side.backend.answer(ask)
            if answer.error is not None or not answer.logprobs:
                raise EngineUnfit(f"a reference request failed: {answer.error or 'no logprobs'}")
            self._tops[prefix] = answer.logprobs[0].top

        await asyncio.gather(*(one(prefix) for prefix in wanted))

    async def _sound(self, prefix: Labels) -> bool:
        """Does the engine read a context that is continued as text as the tokens that came?"""
        if self._side.by_id or not isinstance(self.prompt, str) or not prefix:
            return True
        if not all(map(readable, prefix)):
            return False
        if not self._side.certain:
            return True
        whole = self._side.extended(self.prompt, prefix)
        assert isinstance(whole, str)
        first = await self._side.backend.tokenize(self.prompt)
        told = await self._side.backend.tokenize(whole)
        if first is None or told is None:
            return False
        return told[: len(first)] == first and len(told) == len(first) + len(prefix)

    def law(self, prefix: Labels, setting: Setting) -> Law | None:
        """The law after some tokens; `None` where it cannot be known."""
        return None if prefix in self._unsound else law_of(self._tops[prefix], setting)

    def top(self, prefix: Labels) -> tuple[tuple[str, float], ...] | None:
        """The log-probabilities after some tokens; `None` where they cannot be known."""
        return self._tops.get(prefix)


def sample_ask(side: Side, prompt: str | tuple[int, ...], setting: Setting, *, length: int) -> Ask:
    """One sampled request of a setting; without a seed, as most users ask."""
    return Ask(
        prompt,
        max_tokens=length,
        temperature=setting.temperature,
        top_k=setting.top_k or None,
        top_p=setting.top_p if setting.top_p < 1 else None,
        ignore_eos=True,
        logprobs=1,
        stream=False,
        extra=side.extra(),
    )


async def sample_remote(
    side: Side,
    plan: CertifyPlan,
    *,
    reference: Side | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> list[RemoteEvidence]:
    """Run every setting against a server.

    Args:
        reference: the same model without speculation; the null run goes there, and the laws come
            from there. Without it both come from requests for a single token.
    """
    gate = asyncio.Semaphore(AT_ONCE)
    found = []
    for setting in plan.settings:
        progress(f"{setting.name}: {plan.requests} requests")
        evidence = new_evidence(setting, plan.alpha)
        try:
            await _sample(side, reference, plan, evidence, gate)
        except EngineUnfit as fault:  # it died, or cannot be reached any more
            evidence.failed.append(str(fault))
        found.append(evidence)
    return found


async def _sample(
    side: Side,
    reference: Side | None,
    plan: CertifyPlan,
    evidence: RemoteEvidence,
    gate: asyncio.Semaphore,
) -> None:
    setting = evidence.setting
    before = await side.backend.counters()
    per_prompt = -(-plan.requests // len(plan.prompts))
    null_per_prompt = -(-plan.null_requests // len(plan.prompts))
    for text in plan.prompts:
        prompt = await side.prompt(text)
        references = References(reference or side, prompt, gate)
        done = 0
        while done < per_prompt and not (evidence.failed or evidence.refused):
            count = min(8 * AT_ONCE, per_prompt - done)
            ask = sample_ask(side, prompt, setting, length=plan.length)
            answers = await _many(side, ask, count, gate)
            await judge_answers(evidence, references, answers)
            done += count
            if plan.sequential and evidence.process.rejected:
                break
        # Without a reference server, a single token is plain: nothing is guessed for it.
        length = plan.length if reference is not None else 1
        plain = reference or side
        ask = sample_ask(plain, prompt, setting, length=length)
        if not evidence.refused:
            await judge_null(evidence, references, await _many(plain, ask, null_per_prompt, gate))
    _counted(evidence, before, await side.backend.counters())


def new_evidence(setting: Setting, alpha: float) -> RemoteEvidence:
    """An empty one."""
    names = (ALL, LATER, AFTER_REJECTION, AFTER_FULL)
    return RemoteEvidence(
        setting,
        tallies={name: Tally(f"{setting.name}: {name}") for name in names},
        contexts=ContextTally(f"{setting.name}: each context by itself"),
        null=Tally(f"{setting.name}: without speculation"),
        process=EProcess(alpha=alpha),
    )


async def _many(side: Side, ask: Ask, count: int, gate: asyncio.Semaphore) -> list[Answer]:
    async def one() -> Answer:
        async with gate:
            return await side.backend.answer(ask)

    return list(await asyncio.gather(*(one() for _ in range(count))))


async def judge_answers(
    evidence: RemoteEvidence, references: References, answers: Sequence[Answer]
) -> None:
    """Take in sampled answers."""
    whole = _usable(evidence, answers)
    labels = [labelled(answer.logprobs) for answer in whole]
    await references.prepare([row[:n] for row in labels for n in range(len(row))])
    for answer, row in zip(whole, labels, strict=True):
        evidence.requests += 1
        classes = answer_classes(answer, len(row))
        if answer.acceptance is not None:
            evidence.accepted = (evidence.accepted or 0) + answer.acceptance.accepted
            evidence.drafted = (evidence.drafted or 0) + (answer.acceptance.drafted or 0)
        for place, token in enumerate(row):
            law = references.law(row[:place], evidence.setting)
            if law is None:
                evidence.undecided += 1
                continue
            evidence.process.update(law, token)
            evidence.tallies[ALL].add(law, token)
            evidence.contexts.add((references.prompt, row[:place]), law, token)
            if place:
                evidence.tallies[LATER].add(law, token)
            name = classes[place]
            if name is not None:
                evidence.tallies[name].add(law, token)


async def judge_null(
    evidence: RemoteEvidence, references: References, answers: Sequence[Answer]
) -> None:
    """Take in answers without speculation."""
    labels = [labelled(answer.logprobs) for answer in _usable(evidence, answers)]
    await references.prepare([row[:n] for row in labels for n in range(len(row))])
    for row in labels:
        for place, token in enumerate(row):
            law = references.law(row[:place], evidence.setting)
            if law is not None:
                evidence.null.add(law, token)


def _usable(evidence: RemoteEvidence, answers: Sequence[Answer]) -> list[Answer]:
    whole = []
    for answer in answers:
        if answer.error is None and answer.logprobs:
            whole.append(answer)
        elif answer.status is not None and 400 <= answer.status < 500:
            evidence.refused.append(answer.error or "refused")
        else:
            evidence.failed.append(answer.error or "an answer without log-probabilities")
    return whole


def answer_classes(answer: Answer, tokens: int) -> list[str | None]:
    """As `certify_embedded.token_classes`, from the engine's own account of its steps.

    The first token is the prefill's. An account that does not add up names nothing.
    """
    classes: list[str | None] = [None] * tokens
    told = answer.acceptance
    if told is None or told.per_step_accepted is None or told.per_step_drafted is None:
        return classes
    place = 0 if told.counts_plain_steps else 1
    steps = list(zip(told.per_step_accepted, told.per_step_drafted, strict=True))
    if place + sum(accepted + 1 for accepted, _ in steps) < tokens:
        return classes
    before: tuple[int, int] | None = None
    for accepted, drafted in steps:
        if before is not None and before[1] and place < tokens:
            classes[place] = AFTER_FULL if before[0] >= before[1] else AFTER_REJECTION
        place, before = place + accepted + 1, (accepted, drafted)
    return classes


def _counted(evidence: RemoteEvidence, before: Any, after: Any) -> None:
    """Acceptance by the server's counters where its answers tell none."""
    if evidence.drafted is not None or before is None or after is None:
        return
    if None in (before.accepted, after.accepted, before.drafted, after.drafted):
        return
    evidence.accepted = after.accepted - before.accepted
    evidence.drafted = after.drafted - before.drafted


async def sabotage_remote(side: Side, plan: CertifyPlan, *, requests: int) -> RemoteEvidence:
    """Requests at one temperature judged as if at another; the test must fail."""
    gate = asyncio.Semaphore(AT_ONCE)
    evidence = new_evidence(plan.settings[0], plan.alpha)
    for text in plan.prompts:
        prompt = await side.prompt(text)
        references = References(side, prompt, gate)
        await references.prepare([()])
        known = [s for s in plan.settings if references.law((), s) is not None]
        evidence.setting = setting = known[0] if known else plan.settings[0]
        asked = _other_temperature(references, setting)
        ask = sample_ask(side, prompt, asked, length=plan.length)
        count = -(-requests // len(plan.prompts))
        await judge_answers(evidence, references, await _many(side, ask, count, gate))
    return evidence


def _other_temperature(references: References, setting: Setting) -> Setting:
    """A temperature whose law at the prompt is at least `SABOTAGE` away, at most 3 times higher."""
    true = references.law((), setting)
    for factor in (1.25, 1.5, 1.75, 2.0, 2.5):
        other = replace(setting, temperature=setting.temperature * factor)
        law = references.law((), other)
        if true is not None and law is not None and true.total_variation(law) >= SABOTAGE:
            return other
    return replace(setting, temperature=3 * setting.temperature)


@dataclass(frozen=True)
class GreedyRow:
    """One prompt's greedy answer against one without speculation.

    Attributes:
        position: of the first difference; `None` where there is none.
        margin: by how much the reference's log-probability of its own token beats the other's
            (nats); `None` where the other is not even listed.
    """

    prompt: str
    tokens: int
    position: int | None = None
    reference: str | None = None
    other: str | None = None
    margin: float | None = None

    @property
    def near_tie(self) -> bool:
        return self.margin is not None and self.margin <= TIE


async def greedy_remote(
    side: Side, plan: CertifyPlan, *, reference: Side | None = None
) -> list[GreedyRow]:
    """Greedy answers against the reference server's, or against requests for one token each."""
    gate = asyncio.Semaphore(AT_ONCE)
    rows = []
    for text in plan.greedy_prompts:
        prompt = await side.prompt(text)
        ask = Ask(
            prompt,
            max_tokens=plan.greedy_tokens,
            temperature=0.0,
            logprobs=1,
            stream=False,
            extra=side.extra(),
        )
        answer = await side.backend.answer(ask)
        if answer.error is not None:
            raise EngineUnfit(f"a greedy request failed: {answer.error}")
        row = labelled(answer.logprobs)
        references = References(reference or side, prompt, gate)
        await references.prepare([row[:n] for n in range(len(row))])
        rows.append(_compare(text, row, references))
    return rows


def _compare(text: str, row: Labels, references: References) -> GreedyRow:
    """Every token of an answer against the likeliest one at its place, given those before it.

    Gives the difference with the widest margin; near-ties alone give the widest of them.
    """
    worst = GreedyRow(text, len(row))
    for place, token in enumerate(row):
        told = references.top(row[:place])
        if told is None:
            continue
        top = sorted(told, key=lambda item: -item[1])
        best, score = token_label(top[0][0]), top[0][1]
        if best == token:
            continue
        own = next((p for t, p in top if token_label(t) == token), None)
        margin = None if own is None else score - own
        found = GreedyRow(text, len(row), place, str(best), str(token), margin)
        if margin is None:
            return found
        if worst.position is None or margin > (worst.margin or 0.0):
            worst = found
    return worst
