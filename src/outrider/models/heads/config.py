"""What a trained draft head looks like: facts, for Medusa, EAGLE-1, EAGLE-3 and EAGLE-3.1 alike.

A head reads hidden states of its target and guesses tokens. `HeadConfig` describes one; the flags
are the checkpoint's, so EAGLE-3.1 is EAGLE-3 with two of them set. It knows nothing of files
(`files.py`), training or trees.

Tensors go by these names everywhere, whatever layout a file has (H the head's width, D the
target's, F = len(features), V the target's vocabulary, W the head's):

=========  =========================================================================================
eagle3     fc.weight [H, F·D]; with `fc_norm` fc_norm.{i}.weight [D]; with `norm_before_fc`
           input_norm.weight [F·D]; layers.0.{hidden_norm, input_layernorm,
           post_attention_layernorm}.weight [H]; layers.0.self_attn.{q, k, v}_proj.weight [.., 2H],
           o_proj.weight; layers.0.mlp.{gate, up, down}_proj.weight; norm.weight [H];
           lm_head.weight [W, H]; with `token_residual` token_residual.weight [H, H]
eagle      fc.weight [H, 2D], fc.bias [H]; layers.0.self_attn.{q, k, v, o}_proj.weight;
           layers.0.post_attention_layernorm.weight; layers.0.mlp.{gate, up, down}_proj.weight.
           Its head is rows of the target's.
medusa     blocks.{head}.layers.{layer}.weight [D, D] and .bias [D]; lm_heads.{head}.weight [W, D]
all        d2t [W] int64 offsets (target id = draft id + d2t[draft id]), where W < V; t2d [V] bool
=========  =========================================================================================

Sources: Medusa arXiv 2401.10774; EAGLE 2401.15077; EAGLE-3 2503.01840; EAGLE-3.1 2605.09992.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outrider.errors import InvalidParameter, ModelError

Kind = Literal["medusa", "eagle", "eagle3"]
KINDS: tuple[Kind, ...] = ("medusa", "eagle", "eagle3")


@dataclass(frozen=True)
class TargetFacts:
    """The target that a head was made for.

    Attributes:
        name: how it was named.
        architectures: of its config.json.
        width, layers, vocab_size: its sizes.
        config_hash, tokenizer_hash, template_hash: of its config, tokenizer and chat template;
            empty where the head's files do not tell.
    """

    name: str
    architectures: tuple[str, ...]
    width: int
    layers: int
    vocab_size: int
    config_hash: str = ""
    tokenizer_hash: str = ""
    template_hash: str = ""


@dataclass(frozen=True)
class HeadConfig:
    """A draft head.

    Attributes:
        kind: medusa, eagle (EAGLE-1, and EAGLE-2, which is the same weights) or eagle3.
        target: whom it was made for.
        features: which of the target's hidden states it reads; i is the state after i layers, and
            `target.layers` the last, which is taken after the final norm.
        width, inner, heads, kv_heads, head_dim: sizes of its decoder layer.
        norm_eps: epsilon of its RMS norms.
        rope_theta: base of its rotary positions.
        context_length: positions it was made for.
        draft_vocab_size: tokens it can guess; the target's vocabulary or fewer.
        depth: how many tokens ahead it was trained for.
        norm_before_residual: the normed state, not the raw one, enters the residual.
        norm_before_fc: one norm over the concatenated states.
        fc_norm: EAGLE-3.1, one norm per state before `fc`.
        norm_output: EAGLE-3.1, the state after the final norm is fed to the next step.
        token_residual: ours, the normed token embedding enters the residual through a linear layer.
        window, sinks: its attention sees the last `window` positions and the first `sinks`; 0 is
            all.
        medusa_heads, medusa_layers: heads, and residual blocks in each.
    """

    kind: Kind
    target: TargetFacts
    features: tuple[int, ...]
    width: int
    inner: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    context_length: int = 2048
    draft_vocab_size: int = 0
    depth: int = 5
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    token_residual: bool = False
    window: int = 0
    sinks: int = 0
    medusa_heads: int = 0
    medusa_layers: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidParameter(f"head kind {self.kind!r}; use one of {', '.join(KINDS)}")
        wrong = [i for i in self.features if not 0 <= i <= self.target.layers]
        if wrong or not self.features:
            raise ModelError(
                f"the head reads hidden states {list(self.features)}; "
                f"{self.target.name} has 0 to {self.target.layers}"
            )
        if self.fc_norm and self.norm_before_fc:
            raise ModelError("fc_norm and norm_before_fc exclude each other; keep one")
        if not 0 < self.draft_vocab_size <= self.target.vocab_size:
            raise ModelError(
                f"draft_vocab_size is {self.draft_vocab_size}; "
                f"{self.target.name} has {self.target.vocab_size} tokens"
            )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that the head must have, but d2t and t2d."""
        if self.kind == "medusa":
            return self._medusa_shapes()
        width, target = self.width, self.target.width
        layer = "layers.0."
        into = 2 * width if self.kind == "eagle3" else width
        rows = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
        shapes: dict[str, tuple[int, ...]] = {
            f"{layer}self_attn.{name}_proj.weight": (count * self.head_dim, into)
            for name, count in rows.items()
        }
        shapes |= {
            f"{layer}self_attn.o_proj.weight": (width, self.heads * self.head_dim),
            f"{layer}post_attention_layernorm.weight": (width,),
            f"{layer}mlp.gate_proj.weight": (self.inner, width),
            f"{layer}mlp.up_proj.weight": (self.inner, width),
            f"{layer}mlp.down_proj.weight": (width, self.inner),
        }
        if self.kind == "eagle":
            return shapes | {"fc.weight": (width, 2 * target), "fc.bias": (width,)}
        count = len(self.features)
        shapes |= {
            "fc.weight": (width, count * target),
            f"{layer}hidden_norm.weight": (width,),
            f"{layer}input_layernorm.weight": (width,),
            "norm.weight": (width,),
            "lm_head.weight": (self.draft_vocab_size, width),
        }
        if self.fc_norm:
            shapes |= {f"fc_norm.{i}.weight": (target,) for i in range(count)}
        if self.norm_before_fc:
            shapes["input_norm.weight"] = (count * target,)
        if self.token_residual:
            shapes["token_residual.weight"] = (width, width)
        return shapes

    def _medusa_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for head in range(self.medusa_heads):
            for layer in range(self.medusa_layers):
                shapes[f"blocks.{head}.layers.{layer}.weight"] = (self.width, self.width)
                shapes[f"blocks.{head}.layers.{layer}.bias"] = (self.width,)
            shapes[f"lm_heads.{head}.weight"] = (self.draft_vocab_size, self.width)
        return shapes

    @property
    def reduced(self) -> bool:
        """Can it guess only a part of the vocabulary?"""
        return self.draft_vocab_size < self.target.vocab_size
