"""Evidence from the embedded engine: outputs by the thousand against the target's exact law.

The exact law comes from passes of the target alone (no engine, no scheduler, no rule): one row for
each context that occurs. The requests run through the engine as users' requests do. With rule
`walk` the same seeds are also answered without speculation: equal outputs bound the total
variation far below what any count could show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.core.law import EProcess, Law, Setting
from outrider.core.sampling import History, SamplingParams, distribution
from outrider.core.tree import NO_PARENT, DraftTree
from outrider.drafters.base import Drafter
from outrider.engine import Completion, Engine, EngineConfig
from outrider.engine.budget import FixedBudget
from outrider.errors import InvalidParameter
from outrider.evaluate.certify_law import ContextTally, LawTest, Tally, coupling_bound
from outrider.evaluate.certify_plan import CertifyPlan
from outrider.evaluate.margins import judge
from outrider.models.cache import KVCache
from outrider.models.target import Forward, Segment, Target
from outrider.records.step import StepRecord

LISTED = 256  # tokens of a law that are kept; the others are its rest
NODES = 64  # rows of a pass that computes exact laws
BATCH = 256  # requests between two looks at the evidence
BOOST = 1.5  # added to a guess's logit by the sabotage: odds times 4.5

AFTER_REJECTION = "the token after a rejection"
AFTER_FULL = "the token after a full acceptance"
ALL = "all positions"
LATER = "positions 2 and later"
Encode = Callable[[str], list[int]]
Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Subject:
    """What is certified.

    Attributes:
        target, encode: the model and its tokenizer.
        drafter: its spec; `build` makes it for so many sequences of so many positions.
        rule: of verification.
    """

    target: Target
    encode: Encode
    drafter: str
    build: Callable[[int, int], Drafter]
    rule: str = "walk"


@dataclass(frozen=True)
class Counts:
    """What the drafter did, over chains: the test proves nothing where one of these is 0."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    rejections: int = 0
    full_acceptances: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.steps + other.steps,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            self.rejections + other.rejections,
            self.full_acceptances + other.full_acceptances,
        )

    @property
    def missing(self) -> tuple[str, ...]:
        """Which of the events never happened."""
        named = {
            "guesses": self.drafted,
            "accepted guesses": self.accepted,
            "rejections": self.rejections,
            "full acceptances": self.full_acceptances,
        }
        return tuple(name for name, count in named.items() if not count)


@dataclass
class SettingEvidence:
    """What one setting showed; `tallies` by name, see the constants above."""

    setting: Setting
    requests: int
    tallies: dict[str, Tally]
    contexts: ContextTally
    null: Tally
    counts: Counts
    process: EProcess
    different: int | None = None
    compared: int = 0

    def tests(self, alpha: float) -> list[LawTest]:
        """All tests with speculation."""
        rows = [tally.test(alpha=alpha) for tally in self.tallies.values()]
        return [*rows, self.contexts.test(alpha=alpha)]

    def coupling(self, alpha: float) -> dict[str, Any] | None:
        """What equal seeds proved, where the rule promises equal outputs."""
        if self.different is None:
            return None
        return {
            "compared": self.compared,
            "different": self.different,
            "total_variation_at_most": coupling_bound(self.different, self.compared, alpha=alpha),
        }


class ExactLaws:
    """The target's own distributions after a prompt and a few tokens, without the engine."""

    def __init__(self, target: Target, prompt: Sequence[int], params: SamplingParams) -> None:
        self._target = target
        self.prompt = tuple(prompt)
        self._params = params
        self._cache = target.new_cache(slots=1, length=len(prompt) + NODES + 1)
        self._laws: dict[Prefix, Law] = {}
        if len(prompt) > 1:
            self._forward(Segment(0, self.prompt[:-1]))
            self._cache.keep(0, range(len(prompt) - 1))

    def prepare(self, prefixes: Iterable[Prefix]) -> None:
        """Compute the laws after these prefixes, many in a pass."""
        wanted = sorted({p for p in prefixes if p not in self._laws})
        while wanted:
            nodes: dict[Prefix, int] = {(): 0}
            taken: list[Prefix] = []
            for prefix in wanted:
                chain = [prefix[:n] for n in range(1, len(prefix) + 1)]
                missing = [p for p in chain if p not in nodes]
                if taken and len(nodes) + len(missing) > NODES:
                    break
                for p in missing:
                    nodes[p] = len(nodes)
                taken.append(prefix)
            self._compute(nodes, taken)
            wanted = wanted[len(taken) :]

    def law(self, prefix: Prefix) -> Law:
        if prefix not in self._laws:
            self.prepare([prefix])
        return self._laws[prefix]

    def _compute(self, nodes: dict[Prefix, int], wanted: Sequence[Prefix]) -> None:
        tokens = tuple(p[-1] if p else self.prompt[-1] for p in nodes)
        parents = tuple(nodes[p[:-1]] if p else NO_PARENT for p in nodes)
        logits_NV = self._forward(Segment(0, (), DraftTree(tokens, parents))).logits[0]
        self._cache.keep(0, ())
        ends = self._target.end_tokens
        for prefix in wanted:
            past = History(self.prompt, prefix, frozenset() if self._params.ignore_eos else ends)
            row = distribution(logits_NV[nodes[prefix]], self._params, past)
            self._laws[prefix] = listed(row, exact=self._target.row_invariant)

    @torch.inference_mode()
    def _forward(self, segment: Segment) -> Forward:
        return self._target.forward([segment], self._cache)


def listed(p_V: Tensor, *, exact: bool) -> Law:
    """The likeliest tokens of a distribution [V] as a law.

    Args:
        exact: the engine has the very same logits. Elsewhere a near-tie at a truncation's edge may
            fall otherwise there, so that a token beyond it proves nothing by itself.
    """
    p = p_V.double().numpy()
    support = np.flatnonzero(p)
    whole = len(support) <= LISTED
    if not whole:
        support = np.argpartition(p, len(p) - LISTED)[len(p) - LISTED :]
    order = support[np.argsort(-p[support], kind="stable")]
    mass = float(p.sum())
    return Law(tuple(order.tolist()), tuple((p[order] / mass).tolist()), closed=whole and exact)


def token_classes(steps: Sequence[StepRecord]) -> list[str | None]:
    """For each output token what the step before the one it begins had brought.

    Only first tokens of a step are named: which they are is decided before they are drawn.
    """
    classes: list[str | None] = []
    before: StepRecord | None = None
    for step in steps:
        if not step.emitted:
            continue
        name = None
        if before is not None and before.proposed_depth:
            full = before.accepted >= before.proposed_depth
            name = AFTER_FULL if full else AFTER_REJECTION
        classes += [name, *([None] * (step.emitted - 1))]
        before = step
    return classes


def count_steps(steps: Iterable[StepRecord]) -> Counts:
    """Events of one request's steps."""
    guessed = [s for s in steps if s.emitted and s.proposed]
    full = sum(s.accepted >= s.proposed_depth for s in guessed)
    return Counts(
        steps=len(guessed),
        drafted=sum(s.proposed for s in guessed),
        accepted=sum(s.accepted for s in guessed),
        rejections=len(guessed) - full,
        full_acceptances=full,
    )


class _Runner:
    """One engine for one side of the comparison."""

    def __init__(self, subject: Subject, target: Target, plan: CertifyPlan, *, guess: bool) -> None:
        longest = max(len(subject.encode(p)) for p in plan.prompts)
        context = min(target.context_length, longest + plan.length)
        drafters = {subject.drafter: subject.build(plan.slots, context)} if guess else {}
        self._name = subject.drafter if guess else "none"
        self._engine = Engine(
            target,
            drafters=drafters if self._name != "none" else {},
            config=EngineConfig(
                slots=plan.slots,
                context=context,
                rule=subject.rule,
                max_nodes=plan.guesses,
                max_depth=plan.guesses,
            ),
            budget=FixedBudget(plan.guesses, plan.guesses),
        )

    def outputs(
        self, prompt: Sequence[int], params: SamplingParams, seeds: Iterable[int]
    ) -> list[Completion]:
        engine = self._engine
        requests = [
            engine.add(prompt, replace(params, seed=seed), drafter=self._name) for seed in seeds
        ]
        while engine.has_work:
            engine.step()
        found = [engine.take(request) for request in requests]
        failed = next((c.error for c in found if c.error), None)
        if failed:
            raise InvalidParameter(f"a request of the certificate failed: {failed}")
        return found


def sampling(setting: Setting, plan: CertifyPlan) -> SamplingParams:
    """The parameters of a setting's requests."""
    return SamplingParams(
        temperature=setting.temperature,
        top_k=setting.top_k,
        top_p=setting.top_p,
        max_tokens=plan.length,
        ignore_eos=True,
    )


def sample_settings(
    subject: Subject, plan: CertifyPlan, *, progress: Callable[[str], None] = lambda line: None
) -> list[SettingEvidence]:
    """Run every setting with speculation, and a part of it without."""
    guessing = _Runner(subject, subject.target, plan, guess=True)
    plain = _Runner(subject, subject.target, plan, guess=False)
    found = []
    for number, setting in enumerate(plan.settings):
        progress(f"{setting.name}: {plan.requests} requests")
        # Seeds of their own: the same noise at two temperatures would tie their tokens together.
        own = replace(plan, seed=plan.seed + number * 2 * (plan.requests + len(plan.prompts)))
        found.append(_sample(subject, own, setting, guessing, plain))
    return found


def _sample(
    subject: Subject, plan: CertifyPlan, setting: Setting, guessing: _Runner, plain: _Runner
) -> SettingEvidence:
    names = (ALL, LATER, AFTER_REJECTION, AFTER_FULL)
    evidence = SettingEvidence(
        setting,
        0,
        {name: Tally(f"{setting.name}: {name}") for name in names},
        ContextTally(f"{setting.name}: each context by itself"),
        Tally(f"{setting.name}: without speculation"),
        Counts(),
        EProcess(alpha=plan.alpha),
        different=0 if subject.rule == "walk" else None,
    )
    params = sampling(setting, plan)
    per_prompt = -(-plan.requests // len(plan.prompts))
    null_per_prompt = -(-plan.null_requests // len(plan.prompts))
    for number, text in enumerate(plan.prompts):
        prompt = subject.encode(text)
        laws = ExactLaws(subject.target, prompt, params)
        first = plan.seed + number * per_prompt
        for start in range(0, per_prompt, BATCH):
            seeds = range(first + start, first + min(start + BATCH, per_prompt))
            outputs = guessing.outputs(prompt, params, seeds)
            _take(evidence, laws, outputs)
            twins = seeds[: max(0, null_per_prompt - start)]
            _take_null(evidence, laws, outputs, plain.outputs(prompt, params, twins))
            if plan.sequential and evidence.process.rejected:
                return evidence
    return evidence


def _take(evidence: SettingEvidence, laws: ExactLaws, outputs: Sequence[Completion]) -> None:
    laws.prepare(prefix for c in outputs for prefix in _prefixes(c.tokens))
    for completion in outputs:
        evidence.requests += 1
        evidence.counts += count_steps(completion.steps)
        classes = token_classes(completion.steps)
        for place, token in enumerate(completion.tokens):
            law = laws.law(completion.tokens[:place])
            evidence.process.update(law, token)
            evidence.tallies[ALL].add(law, token)
            evidence.contexts.add((laws.prompt, completion.tokens[:place]), law, token)
            if place:
                evidence.tallies[LATER].add(law, token)
            name = classes[place]
            if name is not None:
                evidence.tallies[name].add(law, token)


def _take_null(
    evidence: SettingEvidence,
    laws: ExactLaws,
    outputs: Sequence[Completion],
    twins: Sequence[Completion],
) -> None:
    laws.prepare(prefix for c in twins for prefix in _prefixes(c.tokens))
    for speculative, plain in zip(outputs, twins, strict=False):
        if evidence.different is not None:
            evidence.compared += 1
            evidence.different += speculative.tokens != plain.tokens
        for place, token in enumerate(plain.tokens):
            evidence.null.add(laws.law(plain.tokens[:place]), token)


def _prefixes(tokens: Sequence[int]) -> list[Prefix]:
    return [tuple(tokens[:place]) for place in range(len(tokens))]


class Broken:
    """Sabotage: a target that favours guessed tokens and mixes up the rows behind a guess.

    The first is what a lenient rule does, the second what a stale cache row does; where a drafter
    guesses by the target's own law, only the second can be seen. It is a `Target`; everything but
    the logits is the true target's.
    """

    def __init__(self, target: Target, boost: float = BOOST) -> None:
        self._target = target
        self._boost = boost
        self.name = f"{target.name}, broken on purpose"
        self.fingerprint = f"{target.fingerprint}-sabotaged"
        self.vocab_size = target.vocab_size
        self.context_length = target.context_length
        self.end_tokens = target.end_tokens
        self.cache_shape = target.cache_shape
        self.precision = target.precision
        self.row_invariant = target.row_invariant
        self.device = target.device
        self.weight_bytes = target.weight_bytes
        self.width = target.width
        self.layers = target.layers

    def new_cache(self, *, slots: int, length: int) -> KVCache:
        return self._target.new_cache(slots=slots, length=length)

    def forward(
        self, segments: Sequence[Segment], cache: KVCache, *, features: tuple[int, ...] = ()
    ) -> Forward:
        found = self._target.forward(segments, cache, features=features)
        changed = []
        for segment, logits_NV in zip(segments, found.logits, strict=True):
            tree = segment.tree
            if tree is not None and len(tree) > 1:
                logits_NV = logits_NV[:1].repeat(len(tree), 1)
                for node in range(1, len(tree)):
                    logits_NV[tree.parents[node], tree.tokens[node]] += self._boost
            changed.append(logits_NV)
        return replace(found, logits=changed)


def sabotage(subject: Subject, plan: CertifyPlan, *, requests: int) -> SettingEvidence:
    """The test on an engine that is broken, in the plan's widest setting; it must fail."""
    setting = next((s for s in plan.settings if not s.top_k and s.top_p == 1), plan.settings[-1])
    small = replace(plan, requests=requests, settings=(setting,), null_share=1e-9)
    broken = _Runner(subject, Broken(subject.target), small, guess=True)
    plain = _Runner(subject, subject.target, small, guess=False)
    return _sample(subject, small, setting, broken, plain)


def greedy(subject: Subject, plan: CertifyPlan) -> list[dict[str, Any]]:
    """Greedy answers with and without speculation; per prompt whether and where they part."""
    params = SamplingParams(temperature=0.0, max_tokens=plan.greedy_tokens)
    shape = replace(plan, length=plan.greedy_tokens, prompts=plan.greedy_prompts, guesses=4)
    prompts = [subject.encode(text) for text in plan.greedy_prompts]
    sides = []
    for guess in (False, True):
        runner = _Runner(subject, subject.target, shape, guess=guess)
        sides.append([runner.outputs(prompt, params, [0])[0] for prompt in prompts])
    rows = []
    for text, prompt, plain, other in zip(plan.greedy_prompts, prompts, *sides, strict=True):
        difference = judge(
            subject.target,
            prompt,
            plain.tokens,
            other.tokens,
            params=params,
            seed=0,
            ends=subject.target.end_tokens,
        )
        rows.append(
            {
                "prompt": text,
                "tokens": len(plain.tokens),
                "accepted": sum(step.accepted for step in other.steps),
                "difference": None if difference is None else difference.to_dict(),
            }
        )
    return rows
