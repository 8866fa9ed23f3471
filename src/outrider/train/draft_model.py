"""A small draft model from some of a target's own layers, distilled to guess as the target does.

Its embedding and head stay the target's; its few layers and its final norm are trained towards the
target's distribution at every token of the answers. The result is an ordinary model folder, which
`draft_model:DIR` loads, and so does any other engine. It always has the whole vocabulary: a model
folder has no place for a smaller one. What is smaller is the loss: it looks at the frequent tokens
and at a few others, drawn anew for every batch, that stand for all the rest (sampled softmax,
arXiv 1412.2007); a whole vocabulary would cost more than the layers.

Shapes: B sequences, L rows, N query heads, K key heads, E head size, D width, V vocabulary,
W tokens that a loss looks at.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from outrider.drafters.base import Drafter
from outrider.drafters.draft_model import DraftModelConfig, DraftModelDrafter
from outrider.drafters.growth import TreeShape
from outrider.errors import DrafterMismatch, InvalidParameter, NoSpace, TrainingFailed
from outrider.models.config import ModelConfig
from outrider.models.heads.files import check_new
from outrider.models.heads.kernels import Decoder
from outrider.models.load import open_folder
from outrider.models.native import NativeTransformer
from outrider.models.safetensors_files import SINGLE, read_json
from outrider.models.transformer import Transformer
from outrider.models.weights import EMBEDDING, FINAL_NORM, HEAD, build_weights
from outrider.train.acceptance import Build
from outrider.train.batches import Batch
from outrider.train.checkpoint import disk_full
from outrider.train.config import TrainConfig
from outrider.train.heads import Frozen, rms, rotate, split
from outrider.train.learners import mean
from outrider.train.losses import agreement_of, first_choice, soft_loss

DRAWN = 1024  # tokens that stand for those that are neither frequent nor in the batch
_PER_LAYER = ("layer_types", "no_rope_layers")  # lists in config.json with an entry per layer
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def check_trainable(config: ModelConfig, layers: int) -> None:
    """Refuse targets whose layers are not plain Llama layers, which alone are trained here.

    Raises:
        DrafterMismatch: names what is different.
        InvalidParameter: more layers than the target has.
    """
    ropes = {layer.rope for layer in config.layers}
    rope = next(iter(ropes))
    odd = (
        (
            len(ropes) > 1 or rope is None or rope.dim != config.head_dim,
            "mixed or partial rotation",
        ),
        (any(layer.window is not None for layer in config.layers), "sliding windows"),
        (config.qk_norm, "norms of queries and keys"),
        (config.qkv_bias or config.out_bias or config.mlp_bias, "biases"),
        (config.norm_after or config.norm_adds_one, "Gemma's norms"),
        (config.activation != "silu", f"activation {config.activation}"),
        (config.embedding_scale != 1.0 or config.logit_softcap is not None, "scaled embeddings"),
        (config.fused_names, "fused weights"),
    )
    found = [what for is_odd, what in odd if is_odd]
    if found:
        raise DrafterMismatch(
            f"a draft model cannot be made of this target's layers ({', '.join(found)}); "
            "train an eagle3 head"
        )
    if not 1 <= layers < len(config.layers):
        raise InvalidParameter(
            f"a draft model of {layers} layers; the target has {len(config.layers)}: "
            f"use 1 to {len(config.layers) - 1} (--layers)"
        )


def layer_names(layers: Iterable[int]) -> list[str]:
    """The trained tensors of some layers, as Hugging Face names them."""
    parts = (
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
        "input_layernorm",
        "post_attention_layernorm",
    )
    names = [f"model.layers.{i}.{part}.weight" for i in layers for part in parts]
    return [*names, FINAL_NORM]


class DraftModule(nn.Module):
    """The trained layers, in fp32."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.config = config
        self.names = {
            name: name.replace(".", "__") for name in layer_names(range(len(config.layers)))
        }
        for name, plain in self.names.items():
            self.register_parameter(plain, nn.Parameter(tensors[name].detach().float().clone()))

    def tensor(self, name: str) -> Tensor:
        parameter: Tensor = getattr(self, self.names[name])
        return parameter

    def forward(self, x_BLD: Tensor) -> Tensor:
        """[B, L, D]: normed states, from embeddings."""
        eps, length = self.config.norm_eps, x_BLD.shape[1]
        rope = self.config.layers[0].rope
        assert rope is not None  # `check_trainable` saw to it
        cos, sin = (t[:length, None].to(x_BLD.device) for t in rope.tables(length))
        for index in range(len(self.config.layers)):
            layer = f"model.layers.{index}."
            y = rms(x_BLD, self.tensor(f"{layer}input_layernorm.weight"), eps)
            x_BLD = x_BLD + self._attention(y, layer, cos, sin)
            y = rms(x_BLD, self.tensor(f"{layer}post_attention_layernorm.weight"), eps)
            gate = F.silu(self._linear(y, f"{layer}mlp.gate_proj"))
            gated = gate * self._linear(y, f"{layer}mlp.up_proj")
            x_BLD = x_BLD + self._linear(gated, f"{layer}mlp.down_proj")
        return rms(x_BLD, self.tensor(FINAL_NORM), eps)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensor(f"{name}.weight"))

    def _attention(self, y_BLD: Tensor, layer: str, cos: Tensor, sin: Tensor) -> Tensor:
        size = self.config.head_dim
        q, k, v = (
            split(self._linear(y_BLD, f"{layer}self_attn.{name}_proj"), size) for name in "qkv"
        )
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            scale=self.config.attention_scale,
            enable_gqa=True,
        )
        return self._linear(mixed.transpose(1, 2).flatten(2), f"{layer}self_attn.o_proj")


@dataclass(frozen=True)
class Words:
    """The tokens that the loss of a batch looks at.

    Attributes:
        ids: int64 [W].
        offset: [W], the logarithm of how many tokens each stands for.
    """

    ids: Tensor
    offset: Tensor


def draw_words(frequent: Tensor, answered: Tensor, vocab_size: int, drawn: int) -> Words:
    """The frequent tokens and those of the batch for themselves, ``drawn`` others for the rest.

    The draw depends on the batch alone, so that a run that is resumed makes the same ones.

    Args:
        frequent: int64, tokens that always count.
        answered: int64, the batch's own.
    """
    sure = torch.zeros(vocab_size, dtype=torch.bool)
    sure[frequent] = True
    sure[answered] = True
    rest = (~sure).nonzero().flatten()
    if len(rest) <= drawn:
        return Words(torch.arange(vocab_size), torch.zeros(vocab_size))
    generator = torch.Generator().manual_seed(int(answered.sum()))
    picked = rest[torch.randperm(len(rest), generator=generator)[:drawn]]
    ids = torch.cat([sure.nonzero().flatten(), picked])
    offset = torch.zeros(len(ids))
    offset[len(ids) - drawn :] = math.log(len(rest) / drawn)
    return Words(ids, offset)


class DraftModelLearner:
    """Distils a draft module on cached final states of the target."""

    def __init__(
        self,
        module: DraftModule,
        frozen: Frozen,
        config: TrainConfig,
        *,
        stored: tuple[int, ...],
        last: int,
        frequent: Tensor,
        device: torch.device | None = None,
    ) -> None:
        """Put it together.

        Args:
            frozen: with the whole head [V, D].
            stored: which hidden states the data has, in order.
            last: the target's last.
            frequent: int64, tokens that every loss looks at.

        Raises:
            InvalidParameter: the data lacks the last state.
        """
        if last not in stored:
            raise InvalidParameter(f"the data lacks hidden state {last}; prepare it again with it")
        self.device = device or torch.device("cpu")
        self.module = module.to(self.device)
        self.frozen = replace(
            frozen,
            embedding=frozen.embedding.to(self.device),
            norm=frozen.norm.to(self.device),
            head=frozen.head.to(self.device),
        )
        self.config = config
        self._last = stored.index(last)
        self._frequent = frequent

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.module.parameters()

    def tensors(self) -> dict[str, Tensor]:
        names = self.module.names
        return {name: self.module.tensor(name).detach().cpu().clone() for name in names}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name in self.module.names:
                self.module.tensor(name).copy_(tensors[name])

    def describe(self) -> str:
        return repr(self.module.config)

    def losses(self, batch: Batch) -> tuple[list[Tensor], list[float]]:
        """The one loss of a batch: every token of an answer, from the tokens before it."""
        rows = batch.answered()
        words = draw_words(
            self._frequent, batch.tokens[:, 1:][rows].cpu(), len(self.frozen.head), DRAWN
        )
        head_WD = self.frozen.head[words.ids.to(self.device)]
        offset = words.offset.to(self.device)
        embedded = F.embedding(batch.tokens[:, :-1], self.frozen.embedding)
        guess = F.linear(self.module(embedded)[rows], head_WD)
        final = rms(batch.features[:, :, self._last][rows], self.frozen.norm, self.frozen.norm_eps)
        with torch.no_grad():
            wanted = F.linear(final, head_WD)
            agreement = agreement_of(guess, first_choice(wanted))
        return [mean(soft_loss(guess + offset, wanted + offset, self.config.loss))], [agreement]


def picked_layers(layers: int, of: int) -> list[int]:
    """Which of a target's layers a draft model starts from: as far apart as they can be.

    Measured against the first ones with the last one or two (docs/log.md): the loss falls faster.
    """
    if layers == 1:
        return [0]
    return [round(place * (of - 1) / (layers - 1)) for place in range(layers)]


def start_layers(
    source: Path, layers: int, former: Path | None = None
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The configuration and the tensors that training starts from.

    Args:
        source: the target's folder.
        former: a draft model of this target to go on from; it has its own number of layers.

    Raises:
        DrafterMismatch: as `check_trainable`, or the former is of another shape.
        InvalidParameter: as `check_trainable`.
    """
    config, tensors = open_folder(source)
    if former is not None:
        small, trained = open_folder(former)
        if replace(config, layers=small.layers) != small or small.layers[0] != config.layers[0]:
            raise DrafterMismatch(f"{former} is no draft model of this target; train a new one")
        return small, {name: trained.read(name) for name in layer_names(range(len(small.layers)))}
    check_trainable(config, layers)
    picked = picked_layers(layers, len(config.layers))
    small = replace(config, layers=tuple(config.layers[place] for place in picked))
    origin = dict(zip(layer_names(range(layers)), layer_names(picked), strict=True))
    return small, {name: tensors.read(old) for name, old in origin.items()}


def draft_model_builder(
    config: ModelConfig, tensors: Mapping[str, Tensor], target: Decoder, source: Path
) -> Build:
    """Drafters from a draft model under training, on the kernels of its target."""
    _, stored = open_folder(source)

    def read(name: str) -> Tensor:
        return tensors[name] if name in tensors else stored.read(name)

    model: Decoder
    if isinstance(target, NativeTransformer):
        precision = "fp32" if target.precision == "fp32" else "bf16"
        model = NativeTransformer.build(
            config,
            read,
            precision=precision,
            name="draft model",
            fingerprint="",
            end_tokens=target.end_tokens,
            threads=target.threads,
        )
    else:
        weights = build_weights(config, read, dtype=target.dtype, device=target.device)
        model = Transformer(
            config, weights, name="draft model", fingerprint="", end_tokens=target.end_tokens
        )

    def build(shape: TreeShape, sequences: int, length: int) -> Drafter:
        settings = DraftModelConfig(shape.branching, shape.beam, sequences, length)
        return DraftModelDrafter(model, settings)

    return build


def write_draft_model(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    source: Path,
    folder: Path,
    *,
    provenance: Mapping[str, Any],
) -> None:
    """Write a model folder in Hugging Face's form, in bf16; on any error nothing is left there.

    Args:
        source: the target's folder, whose embedding, head and tokenizer are taken over.

    Raises:
        InvalidParameter: the folder holds something.
        NoSpace, TrainingFailed: it cannot be written.
    """
    check_new(folder)
    raw = read_json(source / "config.json")
    layers = len(config.layers)
    raw |= {"num_hidden_layers": layers, "torch_dtype": "bfloat16"}
    raw |= {key: raw[key][:layers] for key in _PER_LAYER if isinstance(raw.get(key), list)}
    _, stored = open_folder(source)
    kept = [EMBEDDING] if config.tied else [EMBEDDING, HEAD]
    every = {**tensors, **{name: stored.read(name) for name in kept}}
    content = {name: t.detach().cpu().to(torch.bfloat16, copy=True) for name, t in every.items()}
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder.parent))
    try:
        (fresh / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
        (fresh / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")
        for name in _TOKENIZER_FILES:
            if (source / name).exists():
                shutil.copyfile(source / name, fresh / name)
        save_file(content, fresh / SINGLE, metadata={"format": "pt"})
        (fresh / SINGLE).chmod(0o644)
        fresh.chmod(0o755)
        fresh.rename(folder)
    except (OSError, SafetensorError) as error:
        if disk_full(error):
            raise NoSpace(f"no space left for {folder}; free some") from None
        raise TrainingFailed(f"{folder} cannot be written: {error}; choose another") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
