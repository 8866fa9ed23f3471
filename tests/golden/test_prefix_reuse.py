"""Random traffic on few slots, where requests take over what earlier ones left in the cache.

Every drafter that reads the target's states must see the states of every row, whoever had it
computed, and every answer must be the one of plain decoding on an engine that reuses nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from heads_fakes import draft_tokens, head_rows, tiny_target, trained_head
from outrider.core.sampling import SamplingParams, Subset
from outrider.core.tree import DraftTree
from outrider.drafters.base import Commit, Drafter, NodeBudget, SequenceView
from outrider.drafters.eagle import EagleDrafter
from outrider.drafters.hybrid import HybridDrafter, Member
from outrider.drafters.medusa import MedusaDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.engine import Engine, EngineConfig, FixedBudget
from outrider.models.heads.eagle import EagleModel
from outrider.models.heads.medusa import MedusaModel
from outrider.train.features import Recorder, compute_features

STEPS = 250
VOCAB = 97
TARGET = tiny_target("native")


class Watched:
    """A drafter whose every feature row is compared with the target's own."""

    def __init__(self, drafter: Drafter) -> None:
        self.name, self.needs = drafter.name, drafter.needs
        self.taken_over = 0
        self._drafter = drafter
        self._tokens: dict[int, list[int]] = {}
        self._rows: dict[int, list[torch.Tensor]] = {}

    def observe(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            tokens = self._tokens.setdefault(commit.sequence, [])
            rows = self._rows.setdefault(commit.sequence, [])
            if commit.features is not None:
                assert commit.features_from == sum(map(len, rows))
                self.taken_over += not tokens
                rows.append(commit.features.clone())
            tokens.extend(commit.tokens)
            if rows and self.needs.layers:
                seen = torch.cat(rows)
                right = compute_features(
                    TARGET, [[*tokens[: len(seen)], 0]], features=self.needs.layers
                )
                assert torch.equal(seen, right[0])
        self._drafter.observe(commits)

    def propose(
        self, views: Sequence[SequenceView], budgets: Sequence[NodeBudget]
    ) -> list[DraftTree]:
        return self._drafter.propose(views, budgets)

    def forget(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            self._tokens.pop(sequence, None)
            self._rows.pop(sequence, None)
        self._drafter.forget(sequences)


def drafters(folder: Path) -> dict[str, Watched]:
    eagle3, heads = trained_head("eagle3", folder), trained_head("medusa", folder)
    subset = Subset(draft_tokens().tolist(), size=VOCAB)

    def eagle() -> Drafter:
        model = EagleModel(eagle3.config, eagle3.tensors, TARGET, head_rows(TARGET))
        return EagleDrafter(model, subset=subset, sequences=4, length=256)

    def medusa() -> Drafter:
        return MedusaDrafter(MedusaModel(heads.config, heads.tensors, TARGET), subset=subset)

    mixed = [Member(NgramDrafter()), Member(medusa(), 0.1), Member(eagle(), 0.2)]
    found = {"eagle": eagle(), "medusa": medusa(), "hybrid": HybridDrafter(mixed)}
    found |= {"ngram": NgramDrafter(), "recorder": Recorder((3, 1))}
    return {name: Watched(drafter) for name, drafter in found.items()}


@pytest.mark.parametrize("seed", [1, 2])
def test_answers_and_features_are_right_whatever_is_taken_over(tmp_path: Path, seed: int) -> None:
    rng, watched = random.Random(seed), drafters(tmp_path)
    config = EngineConfig(slots=3, context=96, prefill_chunk=16, max_nodes=8, max_depth=4)
    engine = Engine(TARGET, drafters=watched, config=config, budget=FixedBudget(8, 4))
    alone = EngineConfig(slots=1, context=96, reuse_prefix=False, max_nodes=0, max_depth=0)
    plain = Engine(TARGET, config=alone, budget=FixedBudget(0, 0))
    known = [[rng.randrange(VOCAB) for _ in range(30)] for _ in range(2)]
    live: dict[int, tuple[list[int], SamplingParams]] = {}
    accepted: Counter[str] = Counter()
    for _ in range(STEPS):
        if len(live) < 5 and rng.random() < 0.4:
            start = rng.choice(known[:2] + known[-6:])
            prompt = start[: rng.randrange(1, min(len(start), 60) + 1)]
            prompt += [rng.randrange(VOCAB) for _ in range(rng.randrange(3))]
            params = SamplingParams(
                temperature=rng.choice([0.0, 0.8]), max_tokens=rng.randrange(1, 25), seed=seed
            )
            drafter, tenant = rng.choice([*watched, "none"]), rng.choice("aab")
            live[engine.add(prompt, params, drafter=drafter, tenant=tenant)] = (prompt, params)
        if live and rng.random() < 0.01:
            engine.cancel(rng.choice(list(live)))
        for update in engine.step():
            if update.finish_reason is None:
                continue
            prompt, params = live.pop(update.request)
            done, [right] = engine.take(update.request), plain.generate([prompt], params)
            cut = update.finish_reason == "cancelled"
            assert list(done.tokens) == list(right.tokens)[: len(done.tokens) if cut else None]
            assert not any("fault" in step.reason for step in done.steps)
            accepted[done.drafter] += sum(step.accepted for step in done.steps)
            known.append([*prompt, *done.tokens])
    assert sum(drafter.taken_over for drafter in watched.values()) > 0
    assert all(accepted[name] > 0 for name in ("eagle", "hybrid"))
