"""Fakes to test an engine with: a byte tokenizer and a target whose answers are known.

`TableTarget` is no neural network. Its logits are a seeded function of the tokens a row may see,
and it learns those tokens from the cache alone: a stale, lost or misplaced cache row changes the
output, so a test that compares with `exact` sees cache faults that a stateless fake would hide.
The module knows nothing of drafters, sampling or the engine.

Shapes: R rows of a segment, N tree nodes, V vocabulary, F features, D width, T visible tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.core.noise import Noise, Purpose
from outrider.errors import InvalidParameter
from outrider.models.cache import CacheShape, KVCache
from outrider.models.target import Forward, Segment

START, END, PAD = 256, 257, 258  # the special tokens of `ByteTokenizer`
_REPLY_ROLE = "assistant"  # the wire's name for the model's own turn

Floats = npt.NDArray[np.float64]


class ByteTokenizer:
    """One token per UTF-8 byte, and three specials: start of a turn, end of a turn, padding."""

    vocab_size: int = 259
    end_tokens: frozenset[int] = frozenset({END})
    fingerprint: str = "byte-tokenizer-1"

    def encode(self, text: str) -> list[int]:
        """The bytes of ``text``; plain text never becomes a special token."""
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``: specials are dropped, broken UTF-8 shows as U+FFFD."""
        return bytes(i for i in ids if i < START).decode("utf-8", errors="replace")

    @property
    def template(self) -> str:
        """What stands for a chat template's source: turns, and no place for tools."""
        return "role content"

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Tokens that stand for no text, by how they are written."""
        return {"<start>": START, "<end>": END, "<pad>": PAD}

    def token_bytes(self) -> list[bytes]:
        """The bytes of every token by id; special tokens as they are written."""
        specials = [name.encode() for name in self.special_tokens]
        return [bytes([byte]) for byte in range(256)] + specials

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, str | bool] | None = None,
    ) -> list[int]:
        """Messages (``role``, ``content``) as tokens, ready for the model's turn."""
        ids: list[int] = []
        for message in messages:
            ids += [START, *self.encode(f"{message['role']}\n{message['content']}"), END]
        if add_generation_prompt:
            ids += [START, *self.encode(f"{_REPLY_ROLE}\n")]
        return ids


def _hash(seen_T2: Floats) -> int:
    """64 bits that depend on every entry's bits and its place; any bit pattern will do."""
    digest = hashlib.blake2b(np.ascontiguousarray(seen_T2).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass(eq=False)
class TableTarget:
    """A `Target` whose next-token logits are a known function of the visible tokens.

    The last `order` tokens pick a row of a random table; every visible (token, position) pair
    together picks another row that is added with weight `ripple`. The first makes text that
    repeats itself, so that drafters have something to find; the second makes any wrong cache row
    show in the logits, however far back.

    Attributes:
        vocab_size: V.
        seed: another seed is another model.
        order: how many last tokens decide the main part; small orders repeat themselves soon.
        sharpness: scale of the logits; larger is more certain.
        ripple: weight of the part that depends on the whole context; 0 blinds the target to
            faults further back than `order`.
        layers, width: features may be asked of layers 0 .. `layers` and have `width` numbers.
        context_length: the most positions a sequence may have.
        end_tokens: the model's own end-of-text tokens.
        passes: forward passes made so far, for tests that count them.
    """

    vocab_size: int = 16
    seed: int = 0
    order: int = 2
    sharpness: float = 2.0
    ripple: float = 0.05
    layers: int = 4
    width: int = 8
    context_length: int = 1024
    end_tokens: frozenset[int] = frozenset()
    name: str = "table"
    passes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.vocab_size < 2 or self.order < 1:
            raise InvalidParameter(
                f"a table target with vocab_size {self.vocab_size} and order {self.order}; "
                "use at least 2 tokens and order 1"
            )
        self.cache_shape = CacheShape(layers=1, kv_heads=1, head_dim=2, dtype=torch.float64)
        self.fingerprint = (
            f"table-{self.vocab_size}-{self.seed}-{self.order}-{self.sharpness}-{self.ripple}"
        )
        self.device = torch.device("cpu")
        self.precision = "fp64"
        self.row_invariant = True
        self.weight_bytes = 8 * self.vocab_size**2
        self._table = Noise(self.seed)

    def new_cache(self, *, slots: int, length: int) -> KVCache:
        """An empty cache; rows hold NaN, so that reading an unwritten one changes the output."""
        cache = KVCache(self.cache_shape, slots=slots, length=length)
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
        return cache

    def exact(self, prefix: Sequence[int]) -> Tensor:
        """Logits [V] in float64 after ``prefix``, computed without any cache."""
        return self._logits(self._plain(prefix))

    def exact_features(self, prefix: Sequence[int], layers: tuple[int, ...]) -> Tensor:
        """Features [F, D] in float32 of the last token of ``prefix``, without any cache."""
        return self._features(self._plain(prefix), layers)

    def forward(
        self, segments: Sequence[Segment], cache: KVCache, *, features: tuple[int, ...] = ()
    ) -> Forward:
        """One pass; see `Target.forward`. Stages and writes rows in the cache.

        Raises:
            InvalidParameter: a token or layer that the model does not have, or a position beyond
                the context.
        """
        self.passes += 1
        for layer in features:
            if not 0 <= layer <= self.layers:
                raise InvalidParameter(f"feature layer {layer}; use 0 to {self.layers}")
        logits: list[Tensor] = []
        captured: list[Tensor] = []
        for segment in segments:
            seen = self._write_and_read(segment, cache)
            nodes = seen[len(segment.prefix) :]
            empty = torch.empty(0, self.vocab_size, dtype=torch.float64)
            logits.append(torch.stack([self._logits(s) for s in nodes]) if nodes else empty)
            if features:
                captured.append(torch.stack([self._features(s, features) for s in seen]))
        return Forward(logits, captured if features else None)

    def _write_and_read(self, segment: Segment, cache: KVCache) -> list[Floats]:
        """Write the segment's rows; give, for each, the (token, position) pairs it sees [T, 2]."""
        bad = [token for token in segment.tokens if not 0 <= token < self.vocab_size]
        if bad:
            raise InvalidParameter(f"token {bad[0]}; use token ids below {self.vocab_size}")
        start = cache.stage(segment.slot, segment.rows)
        positions = [start + offset for offset in segment.offsets()]
        if positions and max(positions) >= self.context_length:
            raise InvalidParameter(
                f"position {max(positions)} is beyond the context of {self.context_length} tokens"
            )
        rows_R2 = torch.tensor(list(zip(segment.tokens, positions, strict=True)))
        stop = start + segment.rows
        cache.keys[0, segment.slot, 0, start:stop] = rows_R2.to(torch.float64)
        cache.values[0, segment.slot, 0, start:stop] = rows_R2.to(torch.float64)
        # Keys give the context and values must agree with them: a cache that moves one of the two
        # is caught as well.
        keys = cache.keys[0, segment.slot, 0, :stop].numpy()
        values = cache.values[0, segment.slot, 0, :stop].numpy()
        pairs = np.where(keys == values, keys, np.nan)
        visible = segment.visible().numpy()
        return [np.concatenate((pairs[:start], pairs[start:][row])) for row in visible]

    def _plain(self, prefix: Sequence[int]) -> Floats:
        tokens = np.asarray(prefix, dtype=np.float64)
        return np.stack((tokens, np.arange(len(tokens), dtype=np.float64)), axis=1)

    def _logits(self, seen_T2: Floats) -> Tensor:
        """Logits [V] of a row that sees these (token, position) pairs."""
        ordered = seen_T2[np.argsort(seen_T2[:, 1], kind="stable")]
        main = self._row(_hash(ordered[-self.order :, 0]), self.vocab_size)
        if not self.ripple:
            return torch.from_numpy(self.sharpness * main)
        whole = self._row(_hash(ordered), self.vocab_size)
        return torch.from_numpy(self.sharpness * (main + self.ripple * whole))

    def _features(self, seen_T2: Floats, layers: tuple[int, ...]) -> Tensor:
        """Features [F, D] of a row: every layer its own function of what the row sees."""
        key = _hash(seen_T2[np.argsort(seen_T2[:, 1], kind="stable")])
        rows = [self._row(key, (layer + 1) * self.width)[-self.width :] for layer in layers]
        return torch.from_numpy(np.stack(rows)).to(torch.float32)

    def _row(self, key: int, size: int) -> Floats:
        """A random table's row: ``size`` numbers with Gumbel's law, a function of seed and key."""
        uniform = self._table.uniform(np.arange(size), position=key, purpose=Purpose.DRAFT)
        return -np.log(-np.log(uniform))
