"""A decoder on the native CPU kernels: the whole pass is one call into `outrider.kernels.native`.

`NativeTransformer` implements `Target` like `Transformer` does, for models of the Llama kind
(`unsupported` says what it lacks), with weights in int8, 4 bits, bf16 or fp32. A row's logits have
the same bits in every company: alone, among guesses, beside other sequences, in any chunks, on any
number of threads. The cache is bf16, logits and features are fp32. The module knows nothing of
files, tokenizers, drafters or sampling.

Shapes: M rows of a pass, D width, V vocabulary, F features, N outputs, K inputs, I inner width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_double, c_int32, c_uint64, pointer
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.errors import InvalidParameter, ModelError
from outrider.kernels import native, quantised
from outrider.kernels.native import (
    Arena,
    DraftStruct,
    Kind,
    LayerStruct,
    ModelStruct,
    PackedMatrix,
    PassStruct,
    Plan,
    SegmentStruct,
    pack,
)
from outrider.kernels.quantised import FloatWeight, Weight
from outrider.models.cache import CacheShape, KVCache
from outrider.models.config import ModelConfig
from outrider.models.rope import Rope
from outrider.models.target import Forward, Segment, check_inputs, check_segments, stage_all
from outrider.models.weights import EMBEDDING, FINAL_NORM, HEAD, Progress, rms_norm

Precision = str  # one of:
PRECISIONS = ("int8", "int4", "bf16", "fp32")
Read = Callable[[str], Tensor]
ReadStored = Callable[[str], Weight | None]

_VECTORS = ("attention_norm", "token_norm", "mlp_norm", "query_norm", "key_norm", "qkv_bias")
_LANES = 16  # columns of the gate and the up projection alternate in runs of this length


def unsupported(config: ModelConfig) -> str:
    """Why the native kernels cannot run a model; empty where they can."""
    if reason := native.unavailable():
        return reason
    checks = (
        (config.activation != "silu", f"activation {config.activation}"),
        (config.norm_after, "norms after attention and MLP"),
        (config.out_bias, "a bias behind attention"),
        (config.mlp_bias, "biases in the MLP"),
        (config.embedding_scale != 1.0, "scaled embeddings"),
        (config.logit_softcap is not None, "soft-capped logits"),
        (any(layer.window is not None for layer in config.layers), "sliding windows"),
        (len(_ropes(config)) > 1, "several kinds of rotation"),
        (config.head_dim % _LANES != 0, f"heads of {config.head_dim}"),
        (config.inner % _LANES != 0, f"an inner width of {config.inner}"),
    )
    missing = [what for wrong, what in checks if wrong]
    return f"the native kernels do not have {', '.join(missing)}" if missing else ""


def _ropes(config: ModelConfig) -> set[Rope]:
    return {layer.rope for layer in config.layers if layer.rope is not None}


@dataclass(frozen=True)
class NativeLayer:
    """One layer, packed. Biases and norms are fp32.

    Attributes:
        attention_norm: `None` for states that come normed.
        token_norm: of a draft head's layer, see `LayerWeights`.
    """

    attention_norm: Tensor | None
    mlp_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    qkv_bias: Tensor | None
    qkv: PackedMatrix
    output: PackedMatrix
    gate_up: PackedMatrix
    down: PackedMatrix
    token_norm: Tensor | None = None

    @property
    def matrices(self) -> tuple[PackedMatrix, ...]:
        return self.qkv, self.output, self.gate_up, self.down


@dataclass(frozen=True)
class NativeWeights:
    """A whole decoder, packed. The embedding is bf16, or fp32 with fp32 weights; a draft head may
    lack the final norm."""

    embedding: Tensor
    layers: tuple[NativeLayer, ...]
    norm: Tensor | None
    head: PackedMatrix


@dataclass(frozen=True)
class DraftRows:
    """The true rows of a draft: tokens to cache and the root, with fp32 states [rows, D]."""

    tokens: tuple[int, ...]
    states: Tensor


@dataclass(frozen=True)
class DraftRule:
    """How a tree grows; see `Growth` in drafters/growth.py.

    Attributes:
        norm_output: a child starts from the parent's state after the final norm.
        fc, fc_bias: a row starts from fc [embedding, state] + bias (EAGLE-1).
        ids: int32 [W], the target's ids of the draft vocabulary; `None` for all.
        noise: keys of the positions' noise, one per depth; for a temperature above 0.
    """

    beam: int
    branching: int
    nodes: int
    depth: int
    hopeless: float
    temperature: float
    ends: frozenset[int]
    noise: tuple[int, ...]
    norm_output: bool
    ids: Tensor | None
    fc: PackedMatrix | None
    fc_bias: Tensor | None


@dataclass(frozen=True)
class DraftJob:
    """A tree to grow for the sequence in a slot of the head's cache."""

    slot: int
    rows: DraftRows
    rule: DraftRule


@dataclass(frozen=True)
class DraftNodes:
    """All nodes of a draft in the order they were made, the root first."""

    tokens: list[int]
    parents: list[int]
    confidence: list[float]


class _Builder:
    """Reads and packs one tensor after the other, so that little is held twice."""

    def __init__(
        self, config: ModelConfig, read: Read, stored: ReadStored | None, precision: str
    ) -> None:
        self.config = config
        self.read = read
        self.stored = stored
        self.precision = precision
        self.arena = Arena(self._packed_bytes())

    def _packed_bytes(self) -> int:
        """An upper bound: the head may be packed in more bits than the layers."""
        config = self.config
        kind = {"int8": Kind.INT8, "int4": Kind.INT4, "bf16": Kind.BFLOAT16}.get(
            self.precision, Kind.FLOAT32
        )
        heads = (config.heads + 2 * config.kv_heads) * config.head_dim
        shapes = (
            (heads, config.width),
            (config.width, config.heads * config.head_dim),
            (2 * config.inner, config.width),
            (config.width, config.inner),
        )
        layer = sum(native.packed_bytes(kind, n, k) + 64 for n, k in shapes)
        small = self.precision in ("int8", "int4")
        head_kind = Kind.INT8_GROUPS if small else kind
        head = native.packed_bytes(head_kind, config.vocab_size, config.width)
        return layer * len(config.layers) + head + 64

    def weight(self, name: str) -> Weight:
        """A weight in the wanted precision; as it was stored, where 4 bits are wanted."""
        precision = self.precision
        if precision == "int4":
            found = self.stored(name) if self.stored is not None else None
            if found is not None:
                return found
            if name in (HEAD, EMBEDDING):
                precision = "int8"
        values = self.read(name)
        match precision:
            case "int8":
                return quantised.to_int8(values)
            case "int4":
                return quantised.to_int4(values)
            case "bf16":
                return FloatWeight(values.bfloat16())
            case _:
                return FloatWeight(values.float())

    def matrix(self, names: Sequence[str], order: Tensor | None = None) -> PackedMatrix:
        weights = [self.weight(f"{name}.weight") for name in names]
        if len({type(weight) for weight in weights}) > 1:
            weights = [quantised.to_int4(quantised.dense(weight)) for weight in weights]
        weight = quantised.joined(weights)
        return pack(weight if order is None else quantised.take_rows(weight, order), self.arena)

    def norm(self, name: str) -> Tensor:
        weight = self.read(name).to(torch.float32, copy=True)
        return (1.0 + weight if self.config.norm_adds_one else weight).contiguous()

    def layer(self, index: int) -> NativeLayer:
        config, prefix = self.config, f"model.layers.{index}."
        fused = config.fused_names
        qkv = ["qkv_proj"] if fused else ["q_proj", "k_proj", "v_proj"]
        gate_up = ["gate_up_proj"] if fused else ["gate_proj", "up_proj"]
        attention = f"{prefix}self_attn."
        bias = None
        if config.qkv_bias:
            bias = torch.cat([self.read(f"{attention}{name}.bias").float() for name in qkv])
        return NativeLayer(
            attention_norm=self.norm(f"{prefix}input_layernorm.weight"),
            mlp_norm=self.norm(f"{prefix}post_attention_layernorm.weight"),
            query_norm=self.norm(f"{attention}q_norm.weight") if config.qk_norm else None,
            key_norm=self.norm(f"{attention}k_norm.weight") if config.qk_norm else None,
            qkv_bias=bias,
            qkv=self.matrix([f"{attention}{name}" for name in qkv]),
            output=self.matrix([f"{attention}o_proj"]),
            gate_up=self.matrix(
                [f"{prefix}mlp.{name}" for name in gate_up], interleaved(config.inner)
            ),
            down=self.matrix([f"{prefix}mlp.down_proj"]),
        )

    def build(self, progress: Progress | None) -> NativeWeights:
        layers = []
        for index in range(len(self.config.layers)):
            layers.append(self.layer(index))
            if progress is not None:
                progress("weights", (index + 1) / (len(self.config.layers) + 1))
        single = self.precision == "fp32"
        # a copy, as of norms: a tensor in the file's mapping would keep all of the file in memory
        embedding = self.read(EMBEDDING).to(torch.float32 if single else torch.bfloat16, copy=True)
        head = EMBEDDING if self.config.tied else HEAD
        return NativeWeights(
            embedding.contiguous(),
            tuple(layers),
            self.norm(FINAL_NORM),
            self.matrix([head.removesuffix(".weight")]),
        )


def interleaved(inner: int) -> Tensor:
    """Rows of the gate and the up projection, alternating in runs of 16."""
    runs = torch.arange(2 * inner).view(2, -1, _LANES)
    return runs.transpose(0, 1).flatten()


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class NativeTransformer:
    """A decoder on the native kernels. Implements `outrider.models.target.Target`.

    Attributes:
        config: what it is made of.
        precision: of the weights.
        threads: how many compute; `None` for as many as PyTorch uses.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: NativeWeights,
        *,
        precision: str,
        name: str,
        fingerprint: str,
        end_tokens: frozenset[int] = frozenset(),
        threads: int | None = None,
    ) -> None:
        if reason := unsupported(config):
            raise ModelError(f"{name}: {reason}")
        self.config = config
        self.weights = weights
        self.precision = precision
        self.row_invariant = True
        self.threads = threads
        self.name = name
        self.fingerprint = fingerprint
        self.end_tokens = end_tokens
        self.vocab_size = config.vocab_size
        self.context_length = config.context_length
        self.width = config.width
        self.layers = len(config.layers)
        self.dtype = torch.float32
        self.device = torch.device("cpu")
        self.cache_shape = CacheShape(self.layers, config.kv_heads, config.head_dim, torch.bfloat16)
        matrices = [m for layer in weights.layers for m in layer.matrices]
        self.weight_bytes = sum(m.nbytes for m in matrices) + weights.head.nbytes
        self._rope = next(iter(_ropes(config)), None)
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}
        self._plan = self._make_plan()

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        read: Read,
        *,
        precision: str,
        name: str,
        fingerprint: str,
        end_tokens: frozenset[int] = frozenset(),
        threads: int | None = None,
        stored: ReadStored | None = None,
        progress: Progress | None = None,
    ) -> NativeTransformer:
        """Read, round and pack a model's tensors.

        Args:
            read: gives a tensor by its Hugging Face name, in any floating dtype.
            stored: gives a weight as its file stores it, for "int4"; `None` where it cannot.

        Raises:
            ModelError: a model that the kernels do not support.
            InvalidParameter: an unknown precision.
        """
        if precision not in PRECISIONS:
            raise InvalidParameter(f"weights {precision!r}: use one of {', '.join(PRECISIONS)}")
        if reason := unsupported(config):
            raise ModelError(f"{name}: {reason}")
        return cls(
            config,
            _Builder(config, read, stored, precision).build(progress),
            precision=precision,
            name=name,
            fingerprint=f"{fingerprint}-native-{native.isa()}-{precision}",
            end_tokens=end_tokens,
            threads=threads,
        )

    def _make_plan(self) -> Plan:
        config, weights = self.config, self.weights
        layers = (LayerStruct * self.layers)()
        for struct, layer, facts in zip(layers, weights.layers, config.layers, strict=True):
            for field in _VECTORS:
                setattr(struct, field, _pointer(vars(layer)[field]))
            struct.qkv, struct.output = layer.qkv.struct, layer.output.struct
            struct.gate_up, struct.down = layer.gate_up.struct, layer.down.struct
            struct.rotate = int(facts.rope is not None)
        model = ModelStruct(
            layers=self.layers,
            width=config.width,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            mlp=config.inner,
            vocab=weights.head.struct.n,
            rotary_dim=self._rope.dim if self._rope else 0,
            embedding_float32=int(weights.embedding.dtype == torch.float32),
            epsilon=config.norm_eps,
            attention_scale=config.attention_scale,
            layer=layers,
            final_norm=_pointer(weights.norm),
            embedding=weights.embedding.data_ptr(),
            head=weights.head.struct,
        )
        return Plan(model, (layers, weights))

    def first_layers(self, count: int) -> NativeTransformer:
        """The model of this one's first ``count`` layers, sharing all weights: a cheap drafter."""
        if not 1 <= count <= self.layers:
            raise InvalidParameter(f"{self.name} has {self.layers} layers; cannot keep {count}")
        return NativeTransformer(
            replace(self.config, layers=self.config.layers[:count]),
            replace(self.weights, layers=self.weights.layers[:count]),
            precision=self.precision,
            name=f"{self.name}[:{count}]",
            fingerprint=f"{self.fingerprint}[:{count}]",
            end_tokens=self.end_tokens,
            threads=self.threads,
        )

    def new_cache(self, *, slots: int, length: int) -> KVCache:
        """An empty cache; its positions are rotated for contexts of ``length``."""
        return KVCache(self.cache_shape, slots=slots, length=length)

    @torch.no_grad()
    def forward(
        self,
        segments: Sequence[Segment],
        cache: KVCache,
        *,
        features: tuple[int, ...] = (),
        inputs: Tensor | None = None,
    ) -> Forward:
        """One pass. Stages every segment's rows in the cache; the caller keeps or drops them.

        Args:
            inputs: fp32 [M, D], the hidden states to start from, for draft heads; otherwise the
                tokens' embeddings.

        Raises:
            InvalidParameter: a token or feature that the model does not have, an empty segment, a
                slot that is full or staged already; nothing is staged then.
        """
        self._check(segments, cache, features)
        rows = sum(segment.rows for segment in segments)
        if inputs is not None:
            check_inputs(inputs, rows=rows, width=self.config.width)
            inputs = inputs.float().contiguous()
        starts = stage_all(segments, cache)
        wanted = sorted(set(features))
        nodes = [len(segment.tree) if segment.tree else 0 for segment in segments]
        logits = torch.empty(sum(nodes), self.weights.head.struct.n)
        states = torch.empty(rows, len(wanted), self.config.width)
        self._run(segments, starts, cache, wanted, inputs, logits, states)
        split = None
        if features:
            if wanted != list(features):
                states = states[:, [wanted.index(feature) for feature in features]]
            split = torch.split(states, [segment.rows for segment in segments])
        return Forward(torch.split(logits, nodes), split)

    def _run(
        self,
        segments: Sequence[Segment],
        starts: Sequence[int],
        cache: KVCache,
        features: Sequence[int],
        inputs: Tensor | None,
        logits: Tensor,
        states: Tensor,
    ) -> None:
        tokens: list[int] = []
        parents: list[int] = []
        logit_rows: list[int] = []
        table = (SegmentStruct * len(segments))()
        for struct, segment, start in zip(table, segments, starts, strict=True):
            first, prefix, tree = len(tokens), len(segment.prefix), segment.tree
            struct.slot, struct.cached, struct.first_row = segment.slot, start, first
            struct.rows, struct.prefix = segment.rows, prefix
            struct.chain = int(tree is None or tree.is_chain)
            tokens += segment.tokens
            parents += [-1] * prefix
            if tree is not None:
                parents += tree.parents
                logit_rows += range(first + prefix, len(tokens))
        cos, sin = self._rotation_table(cache)
        keys, values = cache.keys, cache.values
        self._plan.run(
            PassStruct(
                rows=len(tokens),
                segments=len(segments),
                logit_rows=len(logit_rows),
                feature_layers=len(features),
                threads=native.crew(self.threads),
                cosine=cos.data_ptr(),
                sine=sin.data_ptr(),
                tokens=_ints(tokens),
                parents=_ints(parents),
                segment=table,
                logit_row=_ints(logit_rows),
                feature=_ints(features),
                keys=keys.data_ptr(),
                values=values.data_ptr(),
                layer_stride=keys.stride(0),
                slot_stride=keys.stride(1),
                head_stride=keys.stride(2),
                inputs=_pointer(inputs),
                logits=logits.data_ptr(),
                features=states.data_ptr(),
            )
        )

    def draft(self, cache: KVCache, jobs: Sequence[DraftJob]) -> list[DraftNodes]:
        """Grow whole trees in one call: the native twin of `drafters/growth.py` for draft heads.

        Every pass carries a level of each tree. Keeps the rows before the roots in the cache; what
        is written while guessing is dropped.

        Args:
            jobs: of one head; what belongs to the head is the same in all rules.

        Raises:
            InvalidParameter: states that do not fit the tokens, or a cache without room; nothing
                is staged then.
        """
        for job in jobs:
            check_inputs(job.rows.states, rows=len(job.rows.tokens), width=self.config.width)
        staged: list[DraftJob] = []
        table = (DraftStruct * len(jobs))()
        keep = []
        try:
            for index, job in enumerate(jobs):
                rows = len(job.rows.tokens) + job.rule.beam * job.rule.depth
                start = cache.stage(job.slot, rows)
                staged.append(job)
                table[index], buffers = self._draft_struct(cache, job, start)
                keep.append(buffers)
            self._plan.draft(table)
        finally:
            for job, struct in zip(staged, table, strict=False):
                kept = range(len(job.rows.tokens) - 1) if struct.count else ()
                cache.keep(job.slot, kept)
        return [
            DraftNodes(
                struct.token[: struct.count],
                struct.parent[: struct.count],
                struct.confidence[: struct.count],
            )
            for struct in table
        ]

    def _draft_struct(
        self, cache: KVCache, job: DraftJob, start: int
    ) -> tuple[DraftStruct, object]:
        """What the library is told of a draft, and what must live as long."""
        rows, rule, keys = job.rows, job.rule, cache.keys
        states = rows.states.float().contiguous()
        capacity = 1 + rule.branching * (1 + rule.beam * (rule.depth - 1))
        token, parent = (c_int32 * capacity)(), (c_int32 * capacity)()
        confidence = (c_double * capacity)()
        cos, sin = self._rotation_table(cache)
        noise = (c_uint64 * rule.depth)(*rule.noise) if rule.noise else None
        struct = DraftStruct(
            slot=job.slot,
            cached=start,
            prefix=len(rows.tokens) - 1,
            beam=rule.beam,
            branching=rule.branching,
            nodes=rule.nodes,
            depth=rule.depth,
            threads=native.crew(self.threads),
            norm_output=int(rule.norm_output),
            ends=len(rule.ends),
            capacity=capacity,
            hopeless=rule.hopeless,
            temperature=rule.temperature,
            cosine=cos.data_ptr(),
            sine=sin.data_ptr(),
            tokens=_ints(rows.tokens),
            states=states.data_ptr(),
            fc=None if rule.fc is None else pointer(rule.fc.struct),
            fc_bias=_pointer(rule.fc_bias),
            ids=_pointer(rule.ids),
            end=_ints(tuple(rule.ends)),
            noise=noise,
            keys=keys.data_ptr(),
            values=cache.values.data_ptr(),
            layer_stride=keys.stride(0),
            slot_stride=keys.stride(1),
            head_stride=keys.stride(2),
            token=token,
            parent=parent,
            confidence=confidence,
        )
        return struct, (struct, states)

    def _rotation_table(self, cache: KVCache) -> tuple[Tensor, Tensor]:
        """cos and sin [C, D / 2] for the positions of a cache."""
        length = cache.keys.shape[3]
        if length not in self._tables:
            if self._rope is None:
                self._tables[length] = (torch.empty(0), torch.empty(0))
            else:
                half = self._rope.dim // 2
                cos, sin = self._rope.tables(length)
                self._tables[length] = (
                    cos[:, :half].contiguous(),
                    sin[:, half:].contiguous(),
                )
        return self._tables[length]

    def embed(self, tokens_M: Tensor) -> Tensor:
        """[M, D] in fp32: the hidden states entering layer 0."""
        return self.weights.embedding[tokens_M].float()

    def norm(self, x_MD: Tensor) -> Tensor:
        """The final norm, which stands between the last layer's output and the head."""
        if self.weights.norm is None:
            return x_MD.float()
        return rms_norm(x_MD, self.weights.norm, self.config.norm_eps)

    def head(self, x_MD: Tensor) -> Tensor:
        """[M, V] logits of normed hidden states."""
        threads = native.crew(self.threads)
        return native.linear(x_MD.float(), self.weights.head, threads=threads)

    def _check(
        self, segments: Sequence[Segment], cache: KVCache, features: tuple[int, ...]
    ) -> None:
        """Everything that the library takes on trust."""
        check_segments(self, segments, features)
        shape = (self.layers, cache.slots, self.config.kv_heads, self.config.head_dim)
        found = (*cache.keys.shape[:3], cache.keys.shape[4])
        if found != shape or cache.keys.dtype != torch.bfloat16:
            raise InvalidParameter(f"a cache of {list(found)} does not fit {self.name}")
        same = cache.keys.stride() == cache.values.stride()
        if not same or cache.keys.stride()[3:] != (self.config.head_dim, 1):
            raise InvalidParameter(f"{self.name} needs a cache whose positions lie side by side")
        if len({segment.slot for segment in segments}) < len(segments):
            raise InvalidParameter("two segments of a pass share a slot")
        for segment in segments:
            if not 0 <= segment.slot < cache.slots:
                raise InvalidParameter(f"slot {segment.slot} is not in a cache of {cache.slots}")


def _ints(values: Sequence[int]) -> object:
    return (c_int32 * len(values))(*values)
