"""A fresh head for a target: its configuration, its draft vocabulary, and where it starts from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.errors import InvalidParameter
from outrider.models.heads.config import HeadConfig, Kind, TargetFacts
from outrider.models.heads.kernels import Decoder
from outrider.train.features import Features
from outrider.train.heads import Frozen, rms
from outrider.train.samples import Sample

SPREAD_SAMPLES = 64

STYLES: dict[str, tuple[Kind, dict[str, Any]]] = {
    "eagle": ("eagle", {}),
    "eagle3": ("eagle3", {}),
    "eagle3.1": ("eagle3", {"fc_norm": True, "norm_output": True}),
    "eagle3-token": ("eagle3", {"token_residual": True}),
    "medusa": ("medusa", {}),
}


def default_features(layers: int) -> tuple[int, ...]:
    """The three states that EAGLE-3 reads: entering layers 2, n / 2 and n - 3.

    Raises:
        InvalidParameter: the target has too few layers for three different ones.
    """
    if layers < 4:
        raise InvalidParameter(
            f"the target has {layers} layers, and EAGLE-3 reads the states between three of them: "
            "train an eagle or medusa head"
        )
    if layers < 7:
        return 1, layers // 2, layers - 1
    return 2, layers // 2, layers - 3


def stored_features(layers: int) -> tuple[int, ...]:
    """What is cached for all kinds of heads: EAGLE-3's three states and the last."""
    early = default_features(layers) if layers >= 4 else ()
    return (*early, layers)


def new_head(
    style: str,
    target: Decoder,
    facts: TargetFacts,
    *,
    draft_vocab_size: int,
    depth: int = 5,
    medusa_heads: int = 4,
    **flags: Any,
) -> HeadConfig:
    """The configuration of a head in the shape of its target's layers.

    Args:
        style: one of `STYLES`.
        flags: of `HeadConfig`, over the style's.
    """
    if style not in STYLES:
        raise InvalidParameter(f"head {style!r}; use one of {', '.join(STYLES)}")
    kind, preset = STYLES[style]
    config = target.config
    features = default_features(facts.layers) if kind == "eagle3" else (facts.layers,)
    rope = next((layer.rope for layer in config.layers if layer.rope is not None), None)
    return HeadConfig(
        kind=kind,
        target=facts,
        features=features,
        width=config.width,
        inner=0 if kind == "medusa" else config.inner,
        heads=0 if kind == "medusa" else config.heads,
        kv_heads=0 if kind == "medusa" else config.kv_heads,
        head_dim=0 if kind == "medusa" else config.head_dim,
        norm_eps=config.norm_eps,
        rope_theta=rope.theta if rope is not None else 10_000.0,
        context_length=min(config.context_length, 8192),
        draft_vocab_size=min(draft_vocab_size, facts.vocab_size),
        depth=medusa_heads if kind == "medusa" else depth,
        medusa_heads=medusa_heads if kind == "medusa" else 0,
        **{**preset, **flags},
    )


def draft_vocabulary(
    samples: Iterable[Sample], *, size: int, vocab_size: int, always: Iterable[int] = ()
) -> Tensor:
    """int64 [W], increasing: the tokens that answers hold most often, and those in ``always``."""
    counts: Counter[int] = Counter()
    for sample in samples:
        counts.update(sample.answer)
    chosen = dict.fromkeys(sorted(always))
    for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if len(chosen) >= size:
            break
        chosen.setdefault(token)
    for token in range(vocab_size):
        if len(chosen) >= size:
            break
        chosen.setdefault(token)
    return torch.tensor(sorted(chosen), dtype=torch.long)


def frozen_parts(target: Decoder, head_rows: Tensor) -> Frozen:
    """What a head borrows from its target, in fp32."""
    norm = target.weights.norm
    assert norm is not None  # only draft heads lack one
    return Frozen(
        target.embed(torch.arange(target.vocab_size, device=target.device)).cpu(),
        norm.float().cpu(),
        target.config.norm_eps,
        head_rows.float().cpu(),
    )


def input_spread(
    config: HeadConfig, frozen: Frozen, samples: Sequence[Sample], store: Features
) -> Tensor:
    """How widely each input of `fc` is spread over some answers: its root mean square, rounded to
    a power of two so that folding it into the weights loses nothing.

    A target's raw states are uneven: a few entries are a hundred times larger than the rest. Left
    so, they drown the token in the residual and make the first matrix hard to train. The first
    token's state is left out: it is a sink, a thousand times larger still.
    """
    inputs = config.shapes().get("fc.weight", (0, 0))[1]
    if config.fc_norm or config.norm_before_fc or not inputs:
        return torch.ones(inputs)
    picked = [store.features.index(f) for f in config.features]
    chosen = samples[:SPREAD_SAMPLES]
    rows = torch.cat([store.get(sample.id)[1:, picked].float() for sample in chosen])
    if config.kind == "eagle":
        embedded = frozen.embedding[torch.tensor([t for s in chosen for t in s.tokens])]
        sizes = [_size(embedded), _size(rms(rows[:, 0], frozen.norm, frozen.norm_eps))]
    else:
        sizes = [_size(rows.flatten(1))]
    return torch.exp2(torch.cat(sizes).clamp(min=1e-6).log2().round())


def _size(rows: Tensor) -> Tensor:
    return rows.square().mean(0).sqrt()


def initial_tensors(
    config: HeadConfig, frozen: Frozen, *, seed: int, spread: Tensor | None = None
) -> dict[str, Tensor]:
    """Where training starts: matrices of variance 1 / inputs, what adds to the residual smaller,
    norms of one, and a head made of the target's rows."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in config.shapes().items():
        if is_output(name):
            tensors[name] = frozen.head.clone()
        elif "norm" in name:
            tensors[name] = torch.ones(shape)
        elif len(shape) == 1 or name.startswith(("blocks.", "token_residual")):
            tensors[name] = torch.zeros(shape)  # a block that adds nothing yet
        else:
            small = 0.3 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            values = torch.randn(shape, generator=generator)
            tensors[name] = values * small / shape[-1] ** 0.5
            if name == "fc.weight" and spread is not None:
                tensors[name] /= spread
    return tensors


def is_output(name: str) -> bool:
    """Does a tensor of this name hold a row for each token of the draft vocabulary?"""
    return name == "lm_head.weight" or name.startswith("lm_heads.")


def with_vocabulary(
    tensors: Mapping[str, Tensor], draft_tokens: Tensor, vocab_size: int
) -> dict[str, Tensor]:
    """The tensors with the maps of the draft vocabulary: d2t as offsets, t2d as a mask."""
    if len(draft_tokens) == vocab_size:
        return dict(tensors)
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[draft_tokens] = True
    offsets = draft_tokens - torch.arange(len(draft_tokens))
    return {**tensors, "d2t": offsets, "t2d": known}
