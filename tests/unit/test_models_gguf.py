"""GGUF files: every architecture and quantisation, the conversion's cache, and damaged files."""

from __future__ import annotations

import errno
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from models_files import random_like, same, write_gguf

from outrider.errors import ModelError
from outrider.models import gguf_file
from outrider.models.config import ModelConfig
from outrider.models.gguf_file import converted, read_gguf
from outrider.models.load import load_model, open_folder
from outrider.models.paths import cache_folder
from outrider.models.rope import LongRope
from outrider.models.tiny import tiny_raw

KIND = gguf.GGMLQuantizationType

# What a family's files can say: tiny configs with llama.cpp's fixed choices.
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", tiny_raw("llama")),
    "mistral": ("llama", tiny_raw("llama") | {"head_dim": 32, "tie_word_embeddings": False}),
    "qwen2": ("qwen2", tiny_raw("qwen2") | {"use_sliding_window": False}),
    "qwen3": ("qwen3", tiny_raw("qwen3")),
    "gemma3": (
        "gemma3",
        tiny_raw("gemma3_text")
        | {"query_pre_attn_scalar": 32, "sliding_window_pattern": 6, "rope_theta": 1e6},
    ),
    "phi3": ("phi3", tiny_raw("phi3") | {"sliding_window": 9}),
    "smollm3": ("smollm3", tiny_raw("smollm3") | {"no_rope_layer_interval": 4, "rope_theta": 5e6}),
}


@pytest.mark.parametrize("name", FILES)
def test_every_architecture_reads_back(name: str, tmp_path: Path) -> None:
    architecture, raw = FILES[name]
    tensors = random_like(raw)
    path = write_gguf(tmp_path / "m.gguf", raw, architecture, tensors=tensors, tokenizer=None)
    model = read_gguf(path)
    got, expected = ModelConfig.from_hf(model.raw), ModelConfig.from_hf(raw)
    assert got.norm_eps == pytest.approx(expected.norm_eps)
    assert vars(got) | {"norm_eps": 0} == vars(expected) | {"norm_eps": 0}
    read = dict(model.tensors())
    assert read.keys() == tensors.keys()
    for key, tensor in read.items():
        assert torch.allclose(tensor, tensors[key], atol=1e-6), key


EXACT = [KIND.F16, KIND.BF16, KIND.Q8_0, KIND.Q4_0, KIND.Q4_1, KIND.Q5_0, KIND.Q5_1]


@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.name)
def test_types_that_can_be_written(kind: Any, tmp_path: Path) -> None:
    raw = tiny_raw("qwen3")
    tensors = random_like(raw)
    path = write_gguf(
        tmp_path / "m.gguf",
        raw,
        "qwen3",
        tensors=tensors,
        kinds={"blk.1.ffn_down.weight": kind},
        tokenizer=None,
    )
    got = dict(read_gguf(path).tensors())["model.layers.1.mlp.down_proj.weight"]
    array = tensors["model.layers.1.mlp.down_proj.weight"].numpy()
    exact = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
    dtype = torch.float16 if kind == KIND.F16 else torch.bfloat16
    assert got.dtype == dtype
    assert same(got, torch.from_numpy(exact.copy()).to(dtype))
    assert (got.float() - torch.from_numpy(array)).abs().max() < 0.06


@pytest.mark.parametrize("kind", [KIND.Q4_K, KIND.Q5_K, KIND.Q6_K], ids=lambda kind: kind.name)
def test_types_of_256_blocks(kind: Any, tmp_path: Path) -> None:
    """The library cannot write these, so the blocks are random bytes with sane scales."""
    raw = tiny_raw("qwen3") | {"intermediate_size": 256}
    _, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(3).integers(0, 255, (64, size), dtype=np.uint8)
    scale = np.frombuffer(np.array([0.01], np.float16).tobytes(), np.uint8)
    places = [208] if kind == KIND.Q6_K else [0, 2]
    for place in places:
        blocks[:, place : place + 2] = scale
    name = "blk.0.ffn_down.weight"
    path = write_gguf(
        tmp_path / "m.gguf", raw, "qwen3", blobs={name: (blocks, kind)}, tokenizer=None
    )
    got = dict(read_gguf(path).tensors())["model.layers.0.mlp.down_proj.weight"]
    assert got.shape == (64, 256)
    exact = torch.from_numpy(gguf.quants.dequantize(blocks, kind).copy())
    assert exact.isfinite().all()
    assert exact.std() > 0
    assert same(got, exact.to(torch.bfloat16))


def test_rope_divisors_become_part_of_the_config(tmp_path: Path) -> None:
    divisors = np.linspace(1, 8, 8, dtype=np.float32)
    path = write_gguf(
        tmp_path / "m.gguf",
        tiny_raw("llama"),
        "llama",
        tokenizer=None,
        extra={"rope_freqs.weight": divisors},
    )
    rope = ModelConfig.from_hf(read_gguf(path).raw).layers[0].rope
    assert rope is not None
    assert isinstance(rope.scaling, LongRope)
    plain = 1 / 10_000 ** (torch.arange(0, 16, 2) / 16)
    assert torch.allclose(rope.frequencies(99), plain / torch.from_numpy(divisors))


def test_linear_and_unknown_rope_scaling(tmp_path: Path) -> None:
    def raw_of(kind: str) -> dict[str, Any]:
        meta = {"rope.scaling.type": kind, "rope.scaling.factor": 4.0}
        path = tmp_path / f"{kind}.gguf"
        write_gguf(path, tiny_raw("llama"), "llama", metadata=meta, tokenizer=None)
        return read_gguf(path).raw

    assert raw_of("linear")["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    with pytest.raises(ModelError, match="rope scaling 'spiral' is not supported"):
        raw_of("spiral")


def llama_file(path: Path, **options: Any) -> Path:
    return write_gguf(path, tiny_raw("llama") | {"vocab_size": 270}, "llama", **options)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("OUTRIDER_CACHE", str(folder))
    return folder


def left_behind(cache: Path) -> list[str]:
    return [p.name for p in cache.glob("gguf/*")] if cache.exists() else []


def test_loading_converts_once_and_splits_text_as_the_file_says(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = llama_file(tmp_path / "m.gguf")
    stages: list[tuple[str, float]] = []
    model = load_model(
        path, weights="fp32", kernels="torch", progress=lambda *step: stages.append(step)
    )
    assert {stage for stage, _ in stages} == {"convert", "tokenizer", "weights"}
    assert all(0 <= part <= 1 for _, part in stages)
    text = model.tokenizer
    spelled = text.pieces()
    # digits stand alone, and the space before one is split from it: no "Ġ1", no "12"
    assert [spelled[i] for i in text.encode("hello  12")] == ["hello", "ĠĠ", "1", "2"]
    assert [spelled[i] for i in text.encode("<|im_end|>w")] == ["<|im_end|>", "w"]
    assert text.end_tokens == model.target.end_tokens == {2}
    assert text.chat([{"role": "user", "content": "hello"}])[0] == 1

    monkeypatch.setattr(gguf_file, "read_gguf", None)  # a second conversion would fail
    copy = tmp_path / "elsewhere.gguf"
    shutil.copy(path, copy)
    again = load_model(copy, weights="fp32", kernels="torch")
    assert again.source == model.source
    assert again.target.fingerprint == model.target.fingerprint


def test_large_models_are_written_in_shards(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = llama_file(tmp_path / "m.gguf")
    monkeypatch.setattr(gguf_file, "SHARD_BYTES", 60_000)
    monkeypatch.setattr("outrider.models.gguf_tokenizer.convert_tokenizer", lambda *_: None)
    _, tensors = open_folder(converted(path))
    assert len(tensors.files) > 1
    expected = random_like(tiny_raw("llama") | {"vocab_size": 270})
    for name, tensor in expected.items():
        assert same(tensors.read(name), tensor), name


def test_a_full_disk_is_one_line_and_leaves_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = llama_file(tmp_path / "m.gguf")
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage(10, 10, 0))
        with pytest.raises(ModelError, match="no space left"):
            converted(path)
    assert left_behind(cache) == []

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(gguf_file, "save_file", full)
        with pytest.raises(ModelError, match=r"no space left.*OUTRIDER_CACHE"):
            converted(path)
    assert left_behind(cache) == []


def test_a_cache_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = llama_file(tmp_path / "m.gguf")
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot write"):
        converted(path)


def test_files_cut_short_anywhere_are_refused(tmp_path: Path) -> None:
    whole = llama_file(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in (0, 3, 4, 7, 23, 24, 40, 200, 3_000, 9_000, len(whole) // 2, len(whole) - 1):
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf") as caught:
            read_gguf(cut)
        assert "\n" not in str(caught.value)


def test_what_is_not_a_gguf_file(tmp_path: Path, cache: Path) -> None:
    other = tmp_path / "x.gguf"
    other.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        converted(other)
    with pytest.raises(ModelError, match="does not exist"):
        converted(tmp_path / "missing.gguf")
    with pytest.raises(ModelError, match="cannot be read"):
        read_gguf(tmp_path)
    assert left_behind(cache) == []


def test_unsupported_contents_are_named(tmp_path: Path, cache: Path) -> None:
    raw = tiny_raw("llama")
    blob = (np.zeros((64, 256), np.int8), KIND.I8)
    cases = {
        "tensor 'blk.0.ffn_down.weight' is of type I8": {"blobs": {"blk.0.ffn_down.weight": blob}},
        "tensor 'blk.0.mystery.weight' is unknown": {
            "extra": {"blk.0.mystery.weight": np.zeros(3, np.float32)}
        },
        "mixtures of experts": {"metadata": {"expert_count": 8}},
    }
    for number, (message, options) in enumerate(cases.items()):
        wide = raw | {"intermediate_size": 256}
        path = write_gguf(tmp_path / f"{number}.gguf", wide, "llama", tokenizer=None, **options)
        with pytest.raises(ModelError, match=message):
            read_gguf(path)
    path = write_gguf(tmp_path / "falcon.gguf", raw, "falcon", tokenizer=None)
    with pytest.raises(ModelError, match="architecture 'falcon' is not supported"):
        read_gguf(path)
    for split, message in ((None, "holds no tokenizer"), ("martian", "text split 'martian'")):
        with pytest.raises(ModelError, match=message):
            converted(llama_file(tmp_path / f"{split}.gguf", tokenizer=split))
    assert left_behind(cache) == []
    assert cache_folder() == cache
