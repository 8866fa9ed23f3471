"""The native decoder: against a plain twin, and bit-equal rows in every company."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.core.tree import DraftTree
from outrider.errors import InvalidParameter, ModelError
from outrider.kernels import native, quantised
from outrider.kernels.quantised import FloatWeight, Weight
from outrider.models.cache import KVCache
from outrider.models.config import ModelConfig
from outrider.models.native import PRECISIONS, NativeTransformer, Precision, unsupported
from outrider.models.target import Segment
from outrider.models.tiny import tiny_config, tiny_raw
from outrider.models.weights import random_tensors

pytestmark = pytest.mark.skipif(bool(native.unavailable()), reason=native.unavailable())

# Heads of 64 as in real models, and the odd sizes of a width that fills no block.
WIDE = ModelConfig.from_hf(
    tiny_raw("llama")
    | {"hidden_size": 132, "head_dim": 64, "intermediate_size": 144, "num_attention_heads": 6}
)
CONFIGS = {
    "llama": tiny_config("llama"),
    "qwen3": tiny_config("qwen3"),
    "phi3": tiny_config("phi3"),
    "smollm3": tiny_config("smollm3"),
    "wide": WIDE,
    "bias": ModelConfig.from_hf(tiny_raw("qwen2") | {"use_sliding_window": False}),
}


@pytest.fixture(autouse=True)
def _best_isa() -> Iterator[None]:
    yield
    native.use_isa("")


def make(config: ModelConfig, precision: Precision, threads: int | None = 2) -> NativeTransformer:
    read = random_tensors(config, 3).__getitem__
    return NativeTransformer.build(
        config, read, precision=precision, name="tiny", fingerprint="tiny", threads=threads
    )


def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(97) for _ in range(count))


def filled(model: NativeTransformer, *lengths: int, length: int = 160) -> KVCache:
    """A cache whose slot s holds ``lengths[s]`` tokens; what lies behind them is garbage."""
    cache = model.new_cache(slots=len(lengths), length=length)
    cache.keys.fill_(float("nan"))
    cache.values.fill_(float("nan"))
    for slot, count in enumerate(lengths):
        if count:
            model.forward([Segment(slot, tokens(count, slot))], cache)
            cache.keep(slot, range(count))
    return cache


def logits_of(model: NativeTransformer, cache: KVCache, *segments: Segment) -> list[Tensor]:
    """One pass whose rows are dropped again."""
    result = model.forward(segments, cache)
    for segment in segments:
        cache.keep(segment.slot, ())
    return list(result.logits)


def twin_logits(config: ModelConfig, precision: Precision, path: tuple[int, ...]) -> Tensor:
    """[R, V]: every row of a chain, in plain PyTorch with the kernels' roundings."""
    read = random_tensors(config, 3).__getitem__

    def linear(x: Tensor, *names: str) -> Tensor:
        values = torch.cat([read(f"{name}.weight") for name in names])
        weight: Weight
        match precision:
            case "fp32":
                weight = FloatWeight(values)
            case "bf16":
                weight = FloatWeight(values.bfloat16())
            case "int4" if "layers" in names[0]:
                weight = quantised.to_int4(values)
            case _:
                weight = quantised.to_int8(values)
        return quantised.linear(x, weight)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], read(f"{name}.weight"), config.norm_eps)

    embedding = read("model.embed_tokens.weight")
    x = (embedding if precision == "fp32" else embedding.bfloat16())[list(path)].float()
    rows, dim, group = len(path), config.head_dim, config.heads // config.kv_heads
    for index, facts in enumerate(config.layers):
        layer = f"model.layers.{index}."
        y = norm(x, f"{layer}input_layernorm")
        names = ["qkv"] if config.fused_names else ["q", "k", "v"]
        qkv = linear(y, *(f"{layer}self_attn.{name}_proj" for name in names))
        if config.qkv_bias:
            qkv += torch.cat([read(f"{layer}self_attn.{name}_proj.bias") for name in names])
        q, k, v = qkv.view(rows, -1, dim).split([config.heads, config.kv_heads, config.kv_heads], 1)
        if config.qk_norm:
            q, k = norm(q, f"{layer}self_attn.q_norm"), norm(k, f"{layer}self_attn.k_norm")
        if facts.rope is not None:
            cos, sin = (t[:, None] for t in facts.rope.tables(rows))
            size = facts.rope.dim
            q, k = (
                torch.cat(
                    (t[..., :size] * cos + t[..., :size].roll(size // 2, -1) * sin, t[..., size:]),
                    -1,
                )
                for t in (q, k)
            )
        q = (q * config.attention_scale).bfloat16().float()
        k, v = (t.bfloat16().float().repeat_interleave(group, 1) for t in (k, v))
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        hidden = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(1, 2)).masked_fill(hidden, float("-inf"))
        weights = (scores - scores.amax(-1, keepdim=True)).exp().bfloat16().float()
        mixed = (weights @ v) / weights.sum(-1, keepdim=True)
        x = x + linear(mixed.transpose(0, 1).reshape(rows, -1), f"{layer}self_attn.o_proj")
        y = norm(x, f"{layer}post_attention_layernorm")
        names = ["gate_up"] if config.fused_names else ["gate", "up"]
        gate, up = linear(y, *(f"{layer}mlp.{name}_proj" for name in names)).chunk(2, -1)
        x = x + linear(F.silu(gate) * up, f"{layer}mlp.down_proj")
    head = "model.embed_tokens" if config.tied else "lm_head"
    return linear(norm(x, "model.norm"), head)


@pytest.mark.parametrize("isa", native.ISAS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_pass_equals_its_twin(name: str, precision: Precision, isa: str) -> None:
    if not native.use_isa(isa):
        pytest.skip(f"no {isa} here")
    config = CONFIGS[name]
    model, path = make(config, precision), tokens(21)
    tree = DraftTree.chain(path[9:])
    (got,) = logits_of(model, model.new_cache(slots=1, length=32), Segment(0, path[:9], tree))
    want = twin_logits(config, precision, path)[9:]
    # roundings to few bits turn a last-bit difference into a whole step now and then
    assert (got - want).abs().mean() < {"fp32": 0.002, "bf16": 0.01}.get(precision, 0.03)
    assert F.cosine_similarity(got, want).min() > (0.9995 if precision == "fp32" else 0.998)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["llama", "wide"])
def test_a_row_has_the_same_bits_for_every_number_of_rows(name: str, precision: Precision) -> None:
    model = make(CONFIGS[name], precision)
    path = tokens(64, 7)
    cache = filled(model, 37)
    alone = []
    for token in path:
        (row,) = logits_of(model, cache, Segment(0, (), DraftTree.root_only(token)))
        alone.append(row)
        model.forward([Segment(0, (token,))], cache)
        cache.keep(0, (0,))
    cache.truncate(0, 37)
    for count in (1, 2, 3, 5, 7, 8, 9, 13, 16, 17, 33, 64):
        for threads in (1, 2, 3):
            model.threads = threads
            (got,) = logits_of(model, cache, Segment(0, (), DraftTree.chain(path[:count])))
            assert torch.equal(got, torch.cat(alone[:count])), (count, threads)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_neighbour_changes_a_row(precision: Precision) -> None:
    model = make(WIDE, precision)
    cache = filled(model, 20, 33, 0, 64)
    segments = [
        Segment(0, (), DraftTree.chain(tokens(5, 1))),
        Segment(1, tokens(3, 2), DraftTree((5, 6, 7, 8), (-1, 0, 0, 1))),
        Segment(2, tokens(17, 3), DraftTree.root_only(4)),
        Segment(3, (), DraftTree.root_only(9)),
    ]
    alone = [logits_of(model, cache, segment)[0] for segment in segments]
    for order in ([0, 1, 2, 3], [3, 1], [2, 0, 3], [1, 0]):
        for model.threads in (1, 2, 4):
            got = logits_of(model, cache, *(segments[i] for i in order))
            assert all(torch.equal(g, alone[i]) for g, i in zip(got, order, strict=True)), order


@pytest.mark.parametrize("precision", PRECISIONS)
def test_chunks_of_a_prefill_change_nothing(precision: Precision) -> None:
    model, path = make(WIDE, precision), tokens(90, 5)
    results = []
    for chunk in (90, 1, 7, 16, 33):
        cache = model.new_cache(slots=1, length=128)
        for start in range(0, 90, chunk):
            part = path[start : start + chunk]
            model.forward([Segment(0, part)], cache)
            cache.keep(0, range(len(part)))
        (logits,) = logits_of(model, cache, Segment(0, (), DraftTree.root_only(1)))
        results.append(
            (logits, cache.keys[:, :, :, :90].clone(), cache.values[:, :, :, :90].clone())
        )
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["llama", "wide"])
@pytest.mark.parametrize("seed", range(3))
def test_tree_rows_equal_their_paths_as_chains(name: str, precision: Precision, seed: int) -> None:
    draw = random.Random(seed)
    model = make(CONFIGS[name], precision)
    cache = filled(model, (0, 14, 45)[seed])
    nodes = 24
    parents = (-1, *(draw.randrange(max(0, i - 4), i) for i in range(1, nodes)))
    tree = DraftTree(tokens(nodes, seed + 10), parents)
    prefix = tokens((0, 2, 5)[seed], 20)
    (got,) = logits_of(model, cache, Segment(0, prefix, tree))
    for node in range(nodes):
        chain = DraftTree.chain((tree.tokens[0], *tree.path_tokens(node)))
        (want,) = logits_of(model, cache, Segment(0, prefix, chain))
        assert torch.equal(got[node], want[-1]), node


def test_kept_rows_equal_recomputed_ones() -> None:
    model = make(WIDE, "int8")
    cache = filled(model, 11)
    tree = DraftTree((1, 2, 3, 4, 5), (-1, 0, 0, 2, 3))
    model.forward([Segment(0, (), tree)], cache)
    cache.keep(0, (0, 2, 3))
    fresh = model.new_cache(slots=1, length=160)
    model.forward([Segment(0, (*tokens(11), 1, 3, 4))], fresh)
    fresh.keep(0, range(14))
    probe = Segment(0, (), DraftTree.chain((7, 8)))
    assert torch.equal(logits_of(model, cache, probe)[0], logits_of(model, fresh, probe)[0])


@pytest.mark.parametrize("features", [(0,), (3,), (0, 2), (2, 0, 3), (1, 2, 3)])
def test_features_are_the_states_entering_layers(features: tuple[int, ...]) -> None:
    model = make(tiny_config(), "fp32")
    cache = filled(model, 5, 0)
    segments = [Segment(0, (1, 2), DraftTree.chain((3, 4))), Segment(1, (5,))]
    result = model.forward(segments, cache, features=features)
    assert result.features is not None
    assert [tuple(f.shape) for f in result.features] == [
        (4, len(features), 64),
        (1, len(features), 64),
    ]
    for place, layer in enumerate(features):
        if layer == 0:
            embedded = model.embed(torch.tensor([1, 2, 3, 4]))
            assert torch.equal(result.features[0][:, place], embedded)
        if layer == model.layers:
            final = model.head(model.norm(result.features[0][2:, place]))
            torch.testing.assert_close(final, result.logits[0], rtol=1e-4, atol=1e-4)


def test_the_first_layers_are_a_model() -> None:
    model = make(tiny_config(), "bf16")
    cut = model.first_layers(2)
    full = model.forward([Segment(0, (1, 2, 3))], filled(model, 0), features=(2,))
    part = cut.forward([Segment(0, (1, 2, 3))], filled(cut, 0), features=(2,))
    assert full.features is not None
    assert part.features is not None
    assert torch.equal(full.features[0], part.features[0])
    with pytest.raises(InvalidParameter, match="4"):
        model.first_layers(4)


def test_a_nan_in_the_cache_shows_in_the_logits() -> None:
    model = make(tiny_config(), "int8")
    cache = filled(model, 9)
    cache.values[0, 0, 0, 4] = float("nan")
    (logits,) = logits_of(model, cache, Segment(0, (), DraftTree.root_only(1)))
    assert not logits.isfinite().all()


def test_a_pass_that_is_refused_stages_nothing() -> None:
    model = make(tiny_config(), "int8")
    cache = filled(model, 3, 150)
    good = Segment(0, (1, 2))
    for bad, words in (
        (Segment(1, tokens(20)), "cannot add"),
        (Segment(1, (97,)), "token 97"),
        (Segment(1, ()), "no rows"),
        (Segment(2, (1,)), "slot 2"),
        (Segment(0, (1,)), "share"),
    ):
        with pytest.raises(InvalidParameter, match=words):
            model.forward([good, bad], cache)
        cache.check_integrity()
    with pytest.raises(InvalidParameter, match="features"):
        model.forward([good], cache, features=(9,))
    with pytest.raises(InvalidParameter, match="does not fit"):
        model.forward([good], make(WIDE, "int8").new_cache(slots=1, length=8))
    cache.check_integrity()


@pytest.mark.parametrize("family", ["gemma3_text", "mistral", "qwen2"])
def test_unsupported_models_are_refused_with_a_reason(family: str) -> None:
    assert "native kernels" in unsupported(tiny_config(family))
    with pytest.raises(ModelError, match="native kernels"):
        make(tiny_config(family), "int8")


def test_more_threads_than_work() -> None:
    one, many = make(tiny_config(), "int8", threads=1), make(tiny_config(), "int8", threads=24)
    segment = Segment(0, tokens(3), DraftTree.chain(tokens(4)))
    want = logits_of(one, one.new_cache(slots=1, length=16), segment)
    assert torch.equal(logits_of(many, many.new_cache(slots=1, length=16), segment)[0], want[0])


def test_passes_from_many_threads_take_turns() -> None:
    models = [make(tiny_config(), "int8"), make(WIDE, "bf16", threads=3)]

    def decode(model: NativeTransformer) -> Tensor:
        cache = model.new_cache(slots=1, length=64)
        return torch.cat(
            [
                logits_of(model, cache, Segment(0, (), DraftTree.chain(tokens(n))))[0]
                for n in range(1, 20)
            ]
        )

    want = [decode(model) for model in models]
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(decode, models * 6))
    assert all(torch.equal(got, want[i % 2]) for i, got in enumerate(results))


def test_a_forked_child_starts_threads_of_its_own() -> None:
    model = make(tiny_config(), "int8", threads=2)
    cache = model.new_cache(slots=1, length=16)
    segment = Segment(0, (), DraftTree.chain((1, 2, 3)))
    want = logits_of(model, cache, segment)[0].tolist()
    child = os.fork()
    if child == 0:
        same = logits_of(model, cache, segment)[0].tolist() == want
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


PRELOADED = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
int refuse_threads = 0;
int pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*f)(void *), void *x) {
  static int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
  if (refuse_threads) return EAGAIN;
  if (!real) real = dlsym(RTLD_NEXT, "pthread_create");
  return real(t, a, f, x);
}
"""

FEWER_THREADS = """
import ctypes, sys, torch
from heads_fakes import tiny_target
from outrider.core.tree import DraftTree
from outrider.models.target import Segment
torch.set_num_threads(4)
target = tiny_target("native")
ctypes.c_int.in_dll(ctypes.CDLL(sys.argv[1]), "refuse_threads").value = int(sys.argv[2])
cache = target.new_cache(slots=2, length=64)
root = DraftTree.root_only(5)
passed = target.forward([Segment(0, tuple(range(20)), root), Segment(1, (1, 2, 3), root)], cache)
print(b"".join(rows.numpy().tobytes() for rows in passed.logits).hex())
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_machine_that_gives_fewer_threads_gives_the_same_bits(tmp_path: Path) -> None:
    """The work was cut for threads that did not come; those that did must do all of it."""
    source, library = tmp_path / "p.c", tmp_path / "p.so"
    source.write_text(PRELOADED)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)

    def bits(refuse: int) -> str:
        places = [str(Path(__file__).parents[1]), *sys.path]
        loaded = [*filter(None, [os.environ.get("LD_PRELOAD")]), str(library)]  # a sanitizer first
        more = {"LD_PRELOAD": ":".join(loaded), "PYTHONPATH": os.pathsep.join(places)}
        done = subprocess.run(
            [sys.executable, "-c", FEWER_THREADS, str(library), str(refuse)],
            env={**os.environ, **more},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return done.stdout

    assert bits(1) == bits(0) != ""
