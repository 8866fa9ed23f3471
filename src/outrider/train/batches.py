"""Batches of samples with their features, in an order that a seed decides.

Shapes: B sequences, L rows of the longest, F features, D width, S steps.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.train.features import Features
from outrider.train.samples import Sample

BUCKETS = 16  # batches that are cut from one sorted run, so that lengths in a batch are alike


@dataclass(frozen=True)
class Batch:
    """Padded sequences.

    Attributes:
        tokens: [B, L + 1] int64; 0 behind the end.
        features: [B, L, F, D] bf16, as the store holds them.
        lengths: tokens of each sequence.
        prompt_lengths: tokens before the answer.
    """

    tokens: Tensor
    features: Tensor
    lengths: Tensor
    prompt_lengths: Tensor

    @property
    def rows(self) -> int:
        """Rows without padding."""
        return int((self.lengths - 1).sum())

    def supervised(self, step: int, known: Tensor) -> Tensor:
        """Bool [B, L]: rows whose guess at ``step`` counts.

        Row i guesses token i + 2 + step; it must be of the answer, and in the draft vocabulary.

        Args:
            known: bool [V], the draft vocabulary.
        """
        length = self.tokens.shape[1] - 1
        guessed = torch.arange(length, device=self.tokens.device)[None] + 2 + step
        inside = (guessed >= self.prompt_lengths[:, None]) & (guessed < self.lengths[:, None])
        token = self.tokens.gather(1, guessed.clamp(max=length).expand(len(self.tokens), -1))
        return inside & known[token]

    def guessed(self, rows_BL: Tensor, step: int) -> Tensor:
        """[N]: the tokens that ``rows_BL`` guess at ``step``."""
        which, row = rows_BL.nonzero(as_tuple=True)
        return self.tokens[which, row + 2 + step]

    def answered(self) -> Tensor:
        """Bool [B, L]: rows whose next token is of the answer, as the target itself sees them."""
        length = self.tokens.shape[1] - 1
        following = torch.arange(length, device=self.tokens.device)[None] + 1
        inside = following >= self.prompt_lengths[:, None]
        return inside & (following < self.lengths[:, None])

    def to(self, device: torch.device) -> Batch:
        """The batch on another device."""
        return Batch(
            self.tokens.to(device),
            self.features.to(device),
            self.lengths.to(device),
            self.prompt_lengths.to(device),
        )


def plan_batches(
    samples: Sequence[Sample], *, rows: int, seed: int, epoch: int, longest: int
) -> list[list[int]]:
    """Indices of the samples of each batch: every sample once, lengths in a batch alike."""
    draw = random.Random(seed * 1_000_003 + epoch)
    order = list(range(len(samples)))
    draw.shuffle(order)
    batches: list[list[int]] = []
    run = BUCKETS * max(1, rows // 256)
    for start in range(0, len(order), run):
        part = sorted(order[start : start + run], key=lambda i: len(samples[i].tokens))
        batch: list[int] = []
        for index in part:
            size = min(len(samples[index].tokens), longest)
            if batch and (len(batch) + 1) * size > rows:
                batches.append(batch)
                batch = []
            batch.append(index)
        if batch:
            batches.append(batch)
    draw.shuffle(batches)
    return batches


def make_batch(samples: Sequence[Sample], store: Features, *, longest: int) -> Batch:
    """Pad samples to one batch; tokens beyond ``longest`` are cut off."""
    cut = [sample.tokens[:longest] for sample in samples]
    length = max(map(len, cut)) - 1
    tokens = torch.zeros(len(cut), length + 1, dtype=torch.long)
    store.prefetch({sample.id: ids for sample, ids in zip(samples, cut, strict=True)})
    first = store.get(samples[0].id)
    features = torch.zeros(len(cut), length, *first.shape[1:], dtype=first.dtype)
    for index, (sample, ids) in enumerate(zip(samples, cut, strict=True)):
        tokens[index, : len(ids)] = torch.tensor(ids)
        features[index, : len(ids) - 1] = store.get(sample.id)[: len(ids) - 1]
    return Batch(
        tokens,
        features,
        torch.tensor([len(ids) for ids in cut]),
        torch.tensor([sample.prompt_length for sample in samples]),
    )


def epochs(samples: Sequence[Sample], *, rows: int, seed: int, longest: int) -> Iterator[list[int]]:
    """Batches without end, epoch after epoch."""
    epoch = 0
    while True:
        yield from plan_batches(samples, rows=rows, seed=seed, epoch=epoch, longest=longest)
        epoch += 1
