"""Which ranks of Medusa heads pay: measured on held-out answers, used for the static tree.

Source: Medusa, arXiv 2401.10774, section 2.1.2 (sparse trees from the accuracies of a head's
choices on calibration data).

Shapes: B sequences, L rows, N rows of answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.drafters.medusa import RANKS
from outrider.train.batches import make_batch
from outrider.train.features import Features
from outrider.train.learners import HeadLearner
from outrider.train.samples import Sample

BATCH = 8


def accuracy_by_rank(
    learner: HeadLearner, samples: Sequence[Sample], store: Features, *, longest: int
) -> list[list[float]]:
    """Per head, how often its first, second, ... choice is the token that came, given that a tree
    of `RANKS` choices a head holds the path up to there."""
    heads = learner.module.config.medusa_heads
    hits = torch.zeros(heads, RANKS, dtype=torch.long)
    counts = [0] * heads
    for start in range(0, len(samples), BATCH):
        chosen = samples[start : start + BATCH]
        batch = make_batch(chosen, store, longest=longest).to(learner.device)
        alive = None  # bool [B, L]: the path so far is in the tree
        for head, (rows, rank_N) in enumerate(learner.medusa_ranks(batch, RANKS)):
            right = rank_N < RANKS
            counted = right.new_ones(len(rank_N)) if alive is None else alive[rows]
            counts[head] += int(counted.sum())
            hits[head] += torch.bincount(rank_N[right & counted].cpu(), minlength=RANKS)
            held = torch.zeros_like(rows)
            held[rows] = right & counted
            alive = held
    return [
        [round(int(hit) / max(count, 1), 5) for hit in row]
        for row, count in zip(hits, counts, strict=True)
    ]
