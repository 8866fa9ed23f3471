"""What the loop trains: parameters, and the losses of a batch.

`Learner` is the seam between the loop and a kind of drafter. `HeadLearner` is that of EAGLE and
Medusa heads; small draft models have theirs in `draft_model.py`. A learner knows nothing of
optimisers, checkpoints or serving.

Shapes: B sequences, L rows, N supervised rows, F features, D width, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from outrider.errors import InvalidParameter
from outrider.train.batches import Batch
from outrider.train.config import TrainConfig
from outrider.train.heads import Frozen, HeadModule, rms, unroll
from outrider.train.losses import agreement_of, feature_loss, first_choice, hard_loss, soft_loss


class Learner(Protocol):
    """Something to train."""

    @property
    def device(self) -> torch.device: ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """What the optimisers change."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """The parameters by name, detached, on the CPU."""
        ...

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave."""
        ...

    def describe(self) -> str:
        """What it is; a checkpoint of anything else is refused."""
        ...

    def losses(self, batch: Batch) -> tuple[list[Tensor], list[float]]:
        """The mean loss of each step or head, and how often its first choice is right."""
        ...


def mean(loss_N: Tensor) -> Tensor:
    """The mean, and 0 where no row counts (short answers have no third token to guess)."""
    return loss_N.mean() if len(loss_N) else loss_N.sum()


def known_tokens(draft_tokens: Tensor, vocab_size: int) -> Tensor:
    """Bool [V]: is the token in the draft vocabulary?"""
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[draft_tokens] = True
    return known


class HeadLearner:
    """A draft head on cached features."""

    def __init__(
        self,
        module: HeadModule,
        frozen: Frozen,
        config: TrainConfig,
        *,
        stored: tuple[int, ...],
        draft_tokens: Tensor,
        device: torch.device | None = None,
    ) -> None:
        """Put it together.

        Args:
            stored: which hidden states the data has, in order.
            draft_tokens: int64 [W], the target ids of the draft vocabulary, increasing.

        Raises:
            InvalidParameter: states that the data lacks.
        """
        wanted = (*module.config.features, module.config.target.layers)
        missing = sorted({f for f in wanted if f not in stored})
        if missing:
            raise InvalidParameter(
                f"the data lacks hidden states {missing}; prepare it again with them"
            )
        self.device = device or torch.device("cpu")
        self.module = module.to(self.device)
        self.frozen = replace(
            frozen,
            embedding=frozen.embedding.to(self.device),
            norm=frozen.norm.to(self.device),
            head=frozen.head.to(self.device),
        )
        self.config = config
        self._picked = [stored.index(f) for f in module.config.features]
        self._last = stored.index(module.config.target.layers)
        vocab_size = module.config.target.vocab_size
        self._known = known_tokens(draft_tokens, vocab_size).to(self.device)
        draft_id = torch.zeros(vocab_size, dtype=torch.long)
        draft_id[draft_tokens] = torch.arange(len(draft_tokens))
        self._draft_id = draft_id.to(self.device)

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.module.parameters()

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor.cpu() for name, tensor in self.module.tensors().items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self.module.restore(tensors)

    def describe(self) -> str:
        return repr(self.module.config)

    def losses(self, batch: Batch) -> tuple[list[Tensor], list[float]]:
        if self.module.config.kind == "medusa":
            return self._medusa_losses(batch)
        config, eagle = self.config, self.module.config.kind == "eagle"
        features = batch.features[:, :, self._picked].float()
        final = rms(batch.features[:, :, self._last], self.frozen.norm, self.frozen.norm_eps)
        if eagle:
            features = final[:, :, None]
        teacher = _Teacher(batch, final, self.frozen.head)
        found, agreement = [], []
        supervised = [batch.supervised(step, self._known) for step in range(config.unroll)]
        counts = torch.stack(supervised).any(0)
        steps = unroll(self.module, self.frozen, batch.tokens, features, config.unroll, counts)
        for step, (rows, normed_N) in enumerate(zip(supervised, steps, strict=True)):
            normed = normed_N[rows[counts]]
            wanted = teacher.logits(rows, step)
            guess = self.module.logits(normed, self.frozen)
            loss = config.soft_weight * mean(soft_loss(guess, wanted, config.loss))
            if eagle and config.feature_weight:
                truth = teacher.states(rows, step)
                loss = loss + config.feature_weight * mean(feature_loss(normed, truth))
            found.append(loss)
            with torch.no_grad():
                agreement.append(agreement_of(guess, first_choice(wanted)))
        return found, agreement

    def _medusa_losses(self, batch: Batch) -> tuple[list[Tensor], list[float]]:
        final = rms(batch.features[:, :, self._last], self.frozen.norm, self.frozen.norm_eps)
        found, agreement = [], []
        for head in range(self.module.config.medusa_heads):
            # head 0 reads the state of row i, which the target itself turns into token i + 1
            rows = batch.supervised(head, self._known)
            state = self.module.medusa_state(head, final[rows])
            guess = self.module.linear(state, f"lm_heads.{head}")
            wanted = self._draft_id[batch.guessed(rows, head)]
            found.append(mean(hard_loss(guess, wanted)))
            with torch.no_grad():
                agreement.append(agreement_of(guess, wanted))
        return found, agreement

    @torch.no_grad()
    def medusa_ranks(self, batch: Batch, ranks: int) -> list[tuple[Tensor, Tensor]]:
        """Per head, which rows of answers count (bool [B, L]), and for those the rank that the
        token which came has among the head's choices [N]; ``ranks`` where it has a worse one, or
        is not in the draft vocabulary."""
        final = rms(batch.features[:, :, self._last], self.frozen.norm, self.frozen.norm_eps)
        every = torch.ones_like(self._known)
        found = []
        for head in range(self.module.config.medusa_heads):
            rows = batch.supervised(head, every)
            guess = self.module.linear(
                self.module.medusa_state(head, final[rows]), f"lm_heads.{head}"
            )
            token = batch.guessed(rows, head)
            best = guess.topk(min(ranks, guess.shape[-1]), -1).indices
            hit = (best == self._draft_id[token][:, None]) & self._known[token][:, None]
            place = torch.arange(best.shape[1], device=best.device)
            rank = torch.where(hit, place, torch.full_like(place, ranks)).amin(-1)
            found.append((rows, rank))
        return found


class _Teacher:
    """The target's distribution over the draft vocabulary, computed once per batch."""

    def __init__(self, batch: Batch, final_BLD: Tensor, head_WD: Tensor) -> None:
        wanted = batch.answered()  # the state at j gives token j + 1
        self._place = torch.full(wanted.shape, -1, device=wanted.device)
        self._place[wanted] = torch.arange(int(wanted.sum()), device=wanted.device)
        self._final = final_BLD[wanted]
        with torch.no_grad():
            self._logits = nn.functional.linear(self._final, head_WD)

    def _rows(self, rows_BL: Tensor, step: int) -> Tensor:
        which, row = rows_BL.nonzero(as_tuple=True)
        return self._place[which, row + 1 + step]

    def logits(self, rows_BL: Tensor, step: int) -> Tensor:
        """[N, W] for the guesses of ``rows_BL`` at ``step``."""
        return self._logits[self._rows(rows_BL, step)]

    def states(self, rows_BL: Tensor, step: int) -> Tensor:
        """[N, D]: the states that those guesses should have been."""
        return self._final[self._rows(rows_BL, step)]
