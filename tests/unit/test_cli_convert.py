"""`outrider convert`: what it prints, writes, refuses and returns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models_files import VOCAB, write_folder
from safetensors.torch import load_file

from outrider.models.heads.config import HeadConfig
from outrider.models.heads.files import Head, read_head, write_head
from outrider.models.heads.fit import folder_facts
from outrider.models.safetensors_files import TensorFolder
from outrider.models.weights import EMBEDDING


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("models") / "mine")


@pytest.fixture(scope="module")
def config(target: Path) -> HeadConfig:
    facts = folder_facts(target, name="mine")
    sizes = {"width": 64, "inner": 32, "heads": 2, "kv_heads": 1, "head_dim": 16}
    return HeadConfig("eagle3", facts, (1, 2, 3), **sizes, draft_vocab_size=VOCAB)


def make(config: HeadConfig, folder: Path, **how: object) -> Path:
    generator = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(s, generator=generator) for n, s in config.shapes().items()}
    write_head(Head(config, tensors, {"seed": 0}), folder, precision="fp32", **how)
    return folder


def test_a_foreign_head_becomes_native(real_cli, tmp_path, target, config):
    source = make(config, tmp_path / "theirs", layout="specforge")
    result = real_cli("convert", str(source), str(tmp_path / "out"), "--target", str(target))
    assert result.code == 0, result.err
    read, wrote = result.out.splitlines()
    assert "eagle3, layout specforge, float32" in read
    assert "states 1, 2, 3 of 3" in read and "made for mine" in read and "flags none" in read
    assert "layout native, bf16" in wrote
    head = read_head(tmp_path / "out")
    assert head.config.target == config.target  # signed by the conversion
    assert head.provenance["seed"] == 0
    assert head.provenance["conversions"][0]["layout"] == "specforge"
    again = real_cli("convert", str(tmp_path / "out"), str(tmp_path / "b"), "--target", str(target))
    assert again.code == 0
    assert len(read_head(tmp_path / "b").provenance["conversions"]) == 2


def test_pickles_layers_of_outputs_and_embeddings(real_cli, tmp_path, target, config):
    source = make(config, tmp_path / "theirs", layout="eagle3")
    torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    raw = json.loads((source / "config.json").read_text())
    raw["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    (source / "config.json").write_text(json.dumps(raw))
    words = ("--target", str(target), "--layer-ids", "output", "--to", "speculators")
    result = real_cli("convert", str(source), str(tmp_path / "out"), *words, "--embeddings")
    assert result.code == 0, result.err
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(
        written["embed_tokens.weight"], TensorFolder(target).read(EMBEDDING).bfloat16()
    )
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]


def test_warnings_go_to_the_side(real_cli, tmp_path, target, config):
    from dataclasses import replace

    source = make(replace(config, norm_output=True), tmp_path / "head")
    words = ("convert", str(source), str(tmp_path / "out"), "--target", str(target))
    refused = real_cli(*words, "--to", "specforge")
    assert refused.code == 2
    assert len(refused.error_lines) == 1 and "norm_output: llama.cpp" in refused.error_lines[0]
    assert not (tmp_path / "out").exists()
    forced = real_cli(*words, "--to", "specforge", "--force")
    assert forced.code == 0
    assert "warning: norm_output: llama.cpp does not know it" in forced.err


def test_refusals_have_their_exit_codes(real_cli, tmp_path, target, config):
    source = make(config, tmp_path / "head")
    full = tmp_path / "full"
    full.mkdir()
    (full / "x").touch()
    other = write_folder(tmp_path / "other", rms_norm_eps=1e-6)
    named = ("--target", str(target))
    for words, code, message in (
        ((str(source), str(full), *named), 2, "is not empty"),
        ((str(tmp_path / "no"), str(tmp_path / "o"), *named), 3, "is no folder"),
        ((str(target), str(tmp_path / "o"), *named), 3, "no draft head of a known layout"),
        ((str(source), str(tmp_path / "o"), "--target", str(other)), 2, "target.config_hash"),
        ((str(source), str(tmp_path / "o"), *named, "--to", "medusa"), 2, "holds medusa heads"),
        ((str(source), str(tmp_path / "o"), *named, "--to", "gguf"), 2, "gguf"),
        (
            (
                str(source),
                str(tmp_path / "o"),
                *named,
                "--to",
                "speculators",
                "--precision",
                "int8",
            ),
            2,
            "int8 is Outrider's own",
        ),
    ):
        result = real_cli("convert", *words)
        assert result.code == code, (words, result.err)
        assert message in result.err
        assert "Traceback" not in result.err
    assert not (tmp_path / "o").exists()
