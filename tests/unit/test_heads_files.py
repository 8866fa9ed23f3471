"""Draft heads on disk: every layout there and back, every refusal, damage of every kind."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models_files import TEMPLATE, VOCAB, write_folder, write_gguf
from safetensors.torch import load_file, save_file

from outrider.errors import DrafterMismatch, InvalidParameter, ModelError, OutriderError
from outrider.models.gguf_file import converted
from outrider.models.heads.config import HeadConfig, TargetFacts
from outrider.models.heads.files import Head, read_any_head, read_head, write_head
from outrider.models.heads.fit import check_fit, config_hash, folder_facts, target_facts
from outrider.models.heads.layouts import LAYOUTS
from outrider.models.heads.writing import advice, losses
from outrider.models.tiny import TINY_FAMILIES, tiny_config, tiny_raw

V, D = 50, 8
FACTS = TargetFacts("tiny", ("LlamaForCausalLM",), D, 6, V, "c0", "t0", "p0")
LAYER = {"width": D, "inner": 12, "heads": 2, "kv_heads": 1, "head_dim": 4}
EAGLE3 = HeadConfig(
    "eagle3",
    FACTS,
    (2, 3, 4),
    **LAYER,
    draft_vocab_size=20,
    depth=3,
    norm_eps=1e-6,
    rope_theta=5000.0,
    context_length=512,
)
EAGLE31 = replace(EAGLE3, fc_norm=True, norm_output=True, norm_before_residual=True)
GPT_OSS = replace(EAGLE3, norm_before_fc=True, width=4, head_dim=2, draft_vocab_size=V)
OURS = replace(EAGLE31, token_residual=True, window=16, sinks=2, features=(1, 6))
EAGLE1 = HeadConfig("eagle", FACTS, (6,), **LAYER, draft_vocab_size=V)
MEDUSA = HeadConfig(
    "medusa",
    FACTS,
    (6,),
    width=D,
    draft_vocab_size=V,
    depth=3,
    medusa_heads=3,
    medusa_layers=2,
)
SMALL_EAGLE1 = replace(EAGLE1, draft_vocab_size=20)
SMALL_MEDUSA = replace(MEDUSA, draft_vocab_size=20)
PROVENANCE = {"data": "none", "seed": 1}


def head(config: HeadConfig, seed: int = 0) -> Head:
    """A random head in fp32."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator) for name, shape in config.shapes().items()
    }
    if config.reduced:
        ids = torch.randperm(V, generator=generator)[: config.draft_vocab_size].sort().values
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    return Head(config, tensors, PROVENANCE)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[n].dtype == right[n].dtype and torch.equal(left[n], right[n]) for n in left
    )


def edit(folder: Path, **changes: object) -> None:
    """Change keys of config.json (``__`` for a level down; `...` removes)."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    for name, value in changes.items():
        *ways, key = name.split("__")
        place = raw
        for way in ways:
            place = place[int(way) if way.isdigit() else way]
        if value is ...:
            del place[key]
        else:
            place[key] = value
    path.write_text(json.dumps(raw))


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path)


@pytest.fixture
def eagle3(tmp_path: Path) -> Path:
    write_head(head(EAGLE3), tmp_path / "head", precision="fp32")
    return tmp_path / "head"


# ---------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "config",
    [EAGLE3, EAGLE31, GPT_OSS, OURS, EAGLE1, SMALL_EAGLE1, MEDUSA, SMALL_MEDUSA],
    ids=["3", "3.1", "before-fc", "ours", "1", "1-reduced", "medusa", "medusa-reduced"],
)
def test_native_there_and_back(tmp_path, config, precision):
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    made = head(config)
    write_head(made, tmp_path / "h", precision=precision)
    read = read_head(tmp_path / "h")
    expected = {n: t.to(dtype) if t.is_floating_point() else t for n, t in made.tensors.items()}
    assert read.config == config
    assert same(read.tensors, expected)
    assert read.provenance == PROVENANCE
    assert (read.layout, read.stored) == ("native", str(dtype).removeprefix("torch."))


@pytest.mark.parametrize(
    ("layout", "config"),
    [
        ("speculators", EAGLE3),
        ("speculators", EAGLE31),
        ("speculators", replace(EAGLE3, window=16)),
        ("speculators", replace(EAGLE3, features=(1, 2, 3, 6))),
        ("specforge", replace(EAGLE3, features=(1, 3, 6), norm_before_residual=True)),
        ("specforge", EAGLE31),
        ("specforge", GPT_OSS),
        ("eagle3", EAGLE3),
        ("eagle", EAGLE1),
        ("vllm-medusa", MEDUSA),
        ("vllm-medusa", SMALL_MEDUSA),
        ("medusa", MEDUSA),
    ],
)
def test_other_layouts_there_and_back(tmp_path, layout, config):
    made = head(config)
    write_head(made, tmp_path / "h", layout=layout, precision="fp32", force=True)
    assert "outrider" not in json.loads((tmp_path / "h" / "config.json").read_text())
    read = read_head(tmp_path / "h", target=FACTS)
    assert read.layout == layout
    assert same(read.tensors, made.tensors)
    # these files name no hashes, and some no depth and no length
    unsigned = replace(FACTS, config_hash="", tokenizer_hash="", template_hash="")
    assert replace(
        read.config, depth=config.depth, context_length=config.context_length
    ) == replace(config, target=unsigned)


def test_a_layout_that_does_not_describe_its_target_needs_one(tmp_path):
    write_head(head(EAGLE3), tmp_path / "h", layout="specforge")
    with pytest.raises(ModelError, match="specforge, which does not describe its target"):
        read_head(tmp_path / "h")


def test_int8_is_near_and_stays_what_it_is(tmp_path):
    made = head(OURS)
    write_head(made, tmp_path / "a", precision="int8")
    read = read_head(tmp_path / "a")
    assert read.stored == "int8"
    for name, tensor in made.tensors.items():
        back = read.tensors[name]
        if tensor.ndim == 2:
            step = tensor.abs().amax(1, keepdim=True) / 127
            assert back.dtype == torch.float32
            assert bool(((back - tensor).abs() <= 0.5001 * step).all()), name
        elif tensor.is_floating_point():
            assert torch.equal(back, tensor.bfloat16())
        else:
            assert torch.equal(back, tensor)
    write_head(read, tmp_path / "b", precision="int8")
    again = read_head(tmp_path / "b")
    assert all(
        torch.allclose(again.tensors[n], t, rtol=1e-6, atol=0) if t.is_floating_point() else True
        for n, t in read.tensors.items()
    )
    written = {int8: load_file(tmp_path / int8 / "model.safetensors") for int8 in ("a", "b")}
    assert all(
        torch.equal(t, written["b"][n]) for n, t in written["a"].items() if n.endswith(".int8")
    )


def test_int8_is_a_quarter_of_fp32(tmp_path):
    big = replace(EAGLE3, width=64, head_dim=32, inner=256)
    sizes = {}
    for precision in ("fp32", "int8"):
        write_head(head(big), tmp_path / precision, precision=precision)
        sizes[precision] = (tmp_path / precision / "model.safetensors").stat().st_size
    assert sizes["int8"] < 0.3 * sizes["fp32"]


def test_others_may_read_what_was_written(eagle3):
    assert eagle3.stat().st_mode & 0o777 == 0o755
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in eagle3.iterdir())


def test_norm_before_residual_is_always_written(tmp_path):
    for layout in ("native", "speculators", "specforge", "eagle3"):
        write_head(head(EAGLE3), tmp_path / layout, layout=layout)
        raw = json.loads((tmp_path / layout / "config.json").read_text())
        assert raw["norm_before_residual"] is False


def test_what_vllm_asks_of_a_head_is_there(eagle3):
    raw = json.loads((eagle3 / "config.json").read_text())
    wants = raw["speculators_config"]
    assert raw["speculators_model_type"] == "eagle3"
    assert wants["proposal_methods"][0]["speculative_tokens"] == 3
    assert wants["verifier"]["name_or_path"] == "tiny"
    assert raw["transformer_layer_config"]["vocab_size"] == V
    assert raw["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]


def test_sglang_and_the_others_number_states_differently(tmp_path):
    write_head(head(EAGLE3), tmp_path / "h", layout="specforge", precision="fp32")
    raw = json.loads((tmp_path / "h" / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"]
    assert raw["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    edit(tmp_path / "h", eagle_aux_hidden_state_layer_ids=...)
    read = read_head(tmp_path / "h", target=FACTS)
    assert read.config.features == (2, 3, 4)
    assert "read as layers whose output is meant" in read.notes[0]
    assert read_head(tmp_path / "h", target=FACTS, layer_ids="state").config.features == (1, 2, 3)


def test_layer_ids_of_outputs_are_raised_by_one(tmp_path):
    write_head(head(EAGLE3), tmp_path / "h", layout="eagle3", precision="fp32")
    edit(tmp_path / "h", eagle_aux_hidden_state_layer_ids=[0, 2, 5])
    assert read_head(tmp_path / "h", target=FACTS, layer_ids="output").config.features == (1, 3, 6)


def test_the_usual_states_are_said_to_be_assumed(tmp_path):
    write_head(head(EAGLE3), tmp_path / "h", layout="eagle3")
    edit(tmp_path / "h", eagle_aux_hidden_state_layer_ids=...)
    read = read_head(tmp_path / "h", target=FACTS)
    assert read.config.features == (2, 3, 3)
    assert "the usual [2, 3, 3] is used" in read.notes[0]


def test_a_last_state_for_training_is_left_out(eagle3):
    edit(eagle3, eagle_aux_hidden_state_layer_ids=[2, 3, 4, 6])
    read = read_head(eagle3)
    assert read.config.features == (2, 3, 4)
    assert "which only training reads" in read.notes[0]


def test_an_eagle_without_a_bias_gets_zeros(tmp_path):
    made = head(EAGLE1)
    made.tensors["fc.bias"].zero_()
    write_head(made, tmp_path / "h", layout="eagle", precision="fp32")
    assert "fc.bias" not in load_file(tmp_path / "h" / "model.safetensors")
    read = read_head(tmp_path / "h", target=FACTS)
    assert same(read.tensors, made.tensors)
    assert read.notes == ("fc has no bias; zeros stand for it",)


def test_medusa_of_its_authors_with_prefix_and_another_file_name(tmp_path):
    made = head(MEDUSA)
    write_head(made, tmp_path / "h", layout="medusa", precision="fp32")
    tensors = load_file(tmp_path / "h" / "model.safetensors")
    (tmp_path / "h" / "model.safetensors").unlink()
    named = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, tmp_path / "h" / "medusa_lm_head.safetensors")
    edit(tmp_path / "h", medusa_num_heads=2, base_model_name_or_path="someone/else")
    read = read_head(tmp_path / "h", target=FACTS)
    assert same(read.tensors, made.tensors)
    assert read.config.target.name == "someone/else"
    assert "the file holds 3 heads" in read.notes[0]


def test_a_token_map_is_ids_not_offsets(tmp_path):
    made = head(SMALL_MEDUSA)
    write_head(made, tmp_path / "h", layout="vllm-medusa")
    written = load_file(tmp_path / "h" / "model.safetensors")
    assert torch.equal(written["token_map"], made.tensors["t2d"].nonzero()[:, 0])


def test_provenance_of_another_tool_names_the_files(tmp_path):
    write_head(replace(head(EAGLE3), provenance={}), tmp_path / "h", layout="eagle3")
    found = read_head(tmp_path / "h", target=FACTS).provenance["read_from"]
    assert (found["folder"], found["layout"]) == ("h", "eagle3")
    assert len(found["sha256"]["model.safetensors"]) == 64


# --------------------------------------------------------------------------------- embeddings


def test_an_embedding_is_added_and_left_out_again(tmp_path):
    embedding = torch.randn(V, D)
    for layout, config in (("native", EAGLE3), ("specforge", EAGLE3), ("eagle", EAGLE1)):
        place = tmp_path / layout
        write_head(head(config), place, layout=layout, precision="bf16", embedding=embedding)
        assert "embed_tokens.weight" in load_file(place / "model.safetensors")
        read = read_any_head(place, target=FACTS, embedding=embedding)
        assert "embed_tokens.weight" not in read.tensors
        assert "is left out" in read.notes[-1]
        with pytest.raises(DrafterMismatch, match=r"embed_tokens.weight differs .* by 1"):
            read_any_head(place, target=FACTS, embedding=torch.randn(V, D))
    with pytest.raises(InvalidParameter, match="no place for the token embedding"):
        write_head(head(MEDUSA), tmp_path / "m", embedding=embedding)


def test_an_embedding_of_another_shape_is_refused(eagle3):
    edit_tensors(eagle3, **{"embed_tokens.weight": torch.zeros(V, D + 1)})
    with pytest.raises(ModelError, match=r"embed_tokens\.weight"):
        read_head(eagle3)


# ------------------------------------------------------------------------------------ pickles


@pytest.mark.parametrize("name", ["pytorch_model.bin", "medusa_lm_head.pt"])
def test_pickles_are_read_for_conversion_alone(tmp_path, name):
    made = head(MEDUSA)
    write_head(made, tmp_path / "h", layout="medusa", precision="fp32")
    tensors = load_file(tmp_path / "h" / "model.safetensors")
    (tmp_path / "h" / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "h" / name)
    assert same(read_any_head(tmp_path / "h", target=FACTS).tensors, made.tensors)
    with pytest.raises(ModelError, match=r"a pickle; run `outrider convert`"):
        read_head(tmp_path / "h", target=FACTS)


class Bomb:
    """Unpickling it runs code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("content", ["code", "list", "nested", "garbage"])
def test_a_pickle_of_anything_but_tensors_is_refused(tmp_path, content):
    folder = tmp_path / "h"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    file = folder / "pytorch_model.bin"
    if content == "garbage":
        file.write_bytes(b"\x80\x04no")
    else:
        values = {"code": Bomb(tmp_path / "ran"), "list": [1], "nested": {"a": {"b": 1}}}
        torch.save(values[content], file)
    with pytest.raises(
        ModelError, match=r"pytorch_model.bin (cannot be read|does not hold)"
    ) as told:
        read_any_head(folder, target=FACTS)
    assert "\n" not in str(told.value)
    assert not (tmp_path / "ran").exists()


# ----------------------------------------------------------------------------------- refusals

CONFIG_FAULTS = [
    ({"norm_before_residual": ...}, "norm_before_residual is missing"),
    ({"norm_before_residual": "yes"}, "norm_before_residual is 'yes'; it must be true or false"),
    ({"speculators_model_type": "peagle"}, "peagle"),
    ({"embed_requires_grad": True}, "embed_requires_grad"),
    ({"eagle_aux_hidden_state_layer_ids": [2, 3, 9]}, "tiny has states 0 to 6"),
    ({"eagle_aux_hidden_state_layer_ids": [2, 3]}, "names 2 states, fc.weight takes 3"),
    ({"eagle_aux_hidden_state_layer_ids": [2, 3, "x"]}, "layer_ids"),
    ({"fc_norm": True}, "'fc_norm.0.weight' is missing"),
    ({"fc_norm": True, "norm_before_fc": True}, "exclude each other"),
    ({"draft_vocab_size": 21}, "'lm_head.weight' has shape"),
    ({"draft_vocab_size": V + 1}, "draft_vocab_size"),
    ({"target_hidden_size": 5}, "target_hidden_size"),
    ({"transformer_layer_config": ...}, "transformer_layer_config."),
    ({"transformer_layer_config__model_type": "qwen3"}, "config.model_type is 'qwen3'"),
    ({"transformer_layer_config__attention_bias": True}, "attention_bias"),
    ({"transformer_layer_config__hidden_act": "gelu"}, "hidden_act"),
    ({"transformer_layer_config__num_hidden_layers": 2}, "num_hidden_layers is 2"),
    ({"transformer_layer_config__num_key_value_heads": 3}, "num_key_value_heads"),
    ({"transformer_layer_config__head_dim": 3}, "head_dim"),
    ({"transformer_layer_config__rms_norm_eps": -1}, "rms_norm_eps"),
    ({"transformer_layer_config__rope_scaling": {"rope_type": "llama3"}}, "rope_scaling.rope_type"),
    ({"transformer_layer_config__hidden_size": 9}, "has shape"),
    ({"speculators_config__proposal_methods__0__verifier_accept_k": 2}, "verifier_accept_k is 2"),
    ({"speculators_config__proposal_methods__0__accept_tolerance": 0.1}, "accept_tolerance is 0.1"),
    ({"outrider__format": 2}, "outrider.format is 2"),
    ({"outrider__kind": "mtp"}, "outrider.kind is 'mtp'"),
    ({"outrider__storage": "int3"}, "outrider.storage is 'int3'"),
    ({"outrider__storage": "int8"}, "is plain, the others' storage is int8"),
    ({"outrider__target__layers": ...}, "outrider.target.layers is missing"),
    ({"transformer_layer_config__vocab_size": 10**30}, "config.vocab_size is 1000"),
    ({"outrider__target__name": "a\nb"}, "outrider.target.name is 'a\\nb'"),
    ({"norm_output": ...}, "norm_output is missing; it must be given in a native head"),
    ({"transformer_layer_config__rope_theta": ...}, "config.rope_theta is missing"),
    ({"outrider__sinks": ...}, "outrider.sinks is missing"),
    ({"outrider__token_residual": True}, "'token_residual.weight' is missing"),
]


@pytest.mark.parametrize(
    ("changes", "message"), CONFIG_FAULTS, ids=[str(c) for c, _ in CONFIG_FAULTS]
)
def test_a_config_that_cannot_be_right_is_refused(eagle3, changes, message):
    edit(eagle3, **changes)
    with pytest.raises(OutriderError) as told:
        read_head(eagle3)
    assert message in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (MEDUSA, {"medusa_fc_bias": False}, "medusa_fc_bias is False; it must be true"),
        (MEDUSA, {"num_heads": 2}, "'blocks.2.layers.0.bias' is unexpected (kind medusa)"),
        (MEDUSA, {"num_heads": 10**6}, "num_heads is 1000000"),
        (MEDUSA, {"truncated_vocab_size": 20}, "'lm_heads.0.weight' has shape"),
        (MEDUSA, {"original_lm_head": True}, "original_lm_head is True"),
        (SMALL_MEDUSA, {"outrider__features": [7]}, "hidden states [7]"),
        (EAGLE1, {"bias": False}, "bias is False; it must be true"),
        (EAGLE1, {"hidden_size": 4}, "outrider.target.width is 8; it must be 4"),
        (EAGLE1, {"vocab_size": 51}, "outrider.target.vocab_size is 50; it must be 51"),
    ],
)
def test_other_kinds_are_checked_as_well(tmp_path, config, changes, message):
    write_head(head(config), tmp_path / "h")
    edit(tmp_path / "h", **changes)
    with pytest.raises(ModelError) as told:
        read_head(tmp_path / "h")
    assert message in str(told.value)


TENSOR_FAULTS = [
    ({"norm.weight": None}, "'norm.weight' is missing"),
    ({"fc.weight": None}, "'fc.weight' is missing"),
    ({"mask_hidden": torch.zeros(1)}, "'mask_hidden' is unexpected (kind eagle3)"),
    ({"norm.weight": torch.zeros(D + 1)}, "'norm.weight' has shape [9], config.json asks for [8]"),
    ({"norm.weight": torch.zeros(D, dtype=torch.int32)}, "'norm.weight' is torch.int32"),
    ({"norm.weight": torch.full((D,), torch.nan)}, "'norm.weight' holds NaN"),
    ({"d2t": None}, "'d2t' is missing"),
    ({"d2t": torch.zeros(20)}, "'d2t' is torch.float32"),
    ({"d2t": torch.zeros(19, dtype=torch.int64)}, "'d2t' is torch.int64 [19]"),
    ({"d2t": torch.full((20,), 31)}, "leads to token 50"),
    ({"d2t": -torch.arange(20)}, "one token from two places"),
    ({"t2d": torch.zeros(V, dtype=torch.bool)}, "d2t and t2d disagree about token"),
    ({"t2d": torch.zeros(V)}, "'t2d' is torch.float32"),
]


@pytest.mark.parametrize(("changes", "message"), TENSOR_FAULTS, ids=[m for _, m in TENSOR_FAULTS])
def test_a_tensor_that_cannot_be_right_is_refused(eagle3, changes, message):
    edit_tensors(eagle3, **changes)
    with pytest.raises(ModelError) as told:
        read_head(eagle3)
    assert message in str(told.value)


def test_t2d_is_made_where_it_is_absent(eagle3):
    edit_tensors(eagle3, t2d=None)
    assert same(read_head(eagle3).tensors, head(EAGLE3).tensors)


def test_a_map_of_zeros_belongs_to_a_full_vocabulary(tmp_path):
    write_head(head(GPT_OSS), tmp_path / "h")
    edit_tensors(tmp_path / "h", d2t=torch.zeros(V, dtype=torch.int64))
    assert "d2t" not in read_head(tmp_path / "h").tensors
    shuffled = torch.arange(V).flip(0) - torch.arange(V)
    edit_tensors(tmp_path / "h", d2t=shuffled)
    with pytest.raises(ModelError, match="d2t reorders a full vocabulary"):
        read_head(tmp_path / "h")


def test_int8_pairs_must_be_whole(tmp_path):
    write_head(head(EAGLE3), tmp_path / "h", precision="int8")
    good = load_file(tmp_path / "h" / "model.safetensors")
    for changes, message in (
        ({"fc.weight.scale": None}, "'fc.weight.scale' is missing"),
        ({"fc.weight.int8": None}, "'fc.weight' is missing"),
        ({"fc.weight.scale": torch.zeros(3)}, "must be fp32 [8]"),
        ({"fc.weight.int8": torch.zeros(D, 3 * D)}, "is no int8 matrix"),
        ({"fc.weight": torch.zeros(D, 3 * D)}, "'fc.weight' is plain"),
    ):
        save_file(good, tmp_path / "h" / "model.safetensors")
        edit_tensors(tmp_path / "h", **changes)
        with pytest.raises(ModelError) as told:
            read_head(tmp_path / "h")
        assert message in str(told.value)


def test_what_is_no_head_is_refused(tmp_path):
    with pytest.raises(ModelError, match="is no folder"):
        read_head(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"model.safetensors is missing"):
        read_head(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="no draft head of a known layout"):
        read_head(tmp_path)
    write_folder(tmp_path / "model")
    with pytest.raises(ModelError, match="no draft head of a known layout"):
        read_head(tmp_path / "model")


WRITE_FAULTS = [
    (OURS, {"layout": "speculators"}, "no place for token_residual"),
    (replace(EAGLE3, window=4, sinks=1), {"layout": "speculators"}, "no place for sinks"),
    (OURS, {"layout": "specforge"}, "exactly 3 hidden states, this reads 2"),
    (EAGLE31, {"layout": "specforge"}, "fc_norm: llama.cpp does not know it"),
    (replace(EAGLE3, norm_output=True), {"layout": "specforge"}, "norm_output: llama.cpp"),
    (replace(EAGLE3, window=4), {"layout": "specforge"}, "window"),
    (EAGLE1, {"layout": "speculators"}, "it holds eagle3 heads, this is eagle"),
    (SMALL_EAGLE1, {"layout": "eagle"}, "no place for a reduced vocabulary"),
    (SMALL_MEDUSA, {"layout": "medusa"}, "no place for a reduced vocabulary"),
    (EAGLE3, {"layout": "specforge", "precision": "int8"}, "int8 is Outrider's own"),
    (EAGLE3, {"layout": "gguf"}, "layout 'gguf': use one of"),
    (EAGLE3, {"precision": "int4"}, "precision 'int4': use one of"),
]


@pytest.mark.parametrize(
    ("config", "how", "message"), WRITE_FAULTS, ids=[m for *_, m in WRITE_FAULTS]
)
def test_what_a_layout_cannot_hold_is_refused(tmp_path, config, how, message):
    with pytest.raises(InvalidParameter) as told:
        write_head(head(config), tmp_path / "h", **how)
    assert message in str(told.value)
    assert list(tmp_path.iterdir()) == []


def test_what_readers_would_lose_is_said():
    assert len(losses("specforge", EAGLE31)) == 2
    assert losses("speculators", EAGLE31) == []
    assert any("norm_output" in line for line in advice("native", EAGLE31))
    assert any("token_residual" in line for line in advice("native", OURS))
    assert any("vLLM 0.32" in line for line in advice("vllm-medusa", SMALL_MEDUSA))
    assert any("SGLang" in line for line in advice("specforge", EAGLE31))
    assert any("exactly 3" in line for line in advice("speculators", OURS))
    assert all(advice(layout, EAGLE3) == [] for layout in LAYOUTS)


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "file").touch()
    for name in ("full", "file"):
        with pytest.raises(InvalidParameter, match="exists and is not empty"):
            write_head(head(EAGLE3), tmp_path / name)
    (tmp_path / "empty").mkdir()
    write_head(head(EAGLE3), tmp_path / "empty")
    assert read_head(tmp_path / "empty").config == EAGLE3

    def fail(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("outrider.models.heads.files.save_file", fail)
    with pytest.raises(ModelError, match="no space left"):
        write_head(head(EAGLE3), tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "full"]


def test_a_head_that_is_wrong_is_not_written(tmp_path):
    made = head(EAGLE3)
    del made.tensors["norm.weight"]
    with pytest.raises(ModelError, match=r"'norm.weight' is missing"):
        write_head(made, tmp_path / "h")
    large = head(EAGLE3)
    large.tensors["norm.weight"].fill_(1e6)
    with pytest.raises(ModelError, match="does not fit fp16"):
        write_head(large, tmp_path / "h", precision="fp16")
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------------- damage

DAMAGED = [
    ("native", EAGLE31),
    ("native", SMALL_EAGLE1),
    ("native", SMALL_MEDUSA),
    ("specforge", EAGLE3),
    ("eagle", EAGLE1),
    ("medusa", MEDUSA),
]
JUNK = (None, True, -1, 0, 2, 10**30, 0.5, "x", "", [], [1, 2], {}, {"a": 1}, [[]], [{}])


def mutate(value: object, chance: random.Random) -> object:
    """Replace, drop or double something somewhere in a JSON value."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        key = chance.choice(sorted(value))
        changed = dict(value)
        if chance.random() < 0.2:
            del changed[key]
        else:
            changed[key] = mutate(value[key], chance)
        return changed
    if isinstance(value, list) and value and chance.random() < 0.6:
        index = chance.randrange(len(value))
        return [*value[:index], mutate(value[index], chance), *value[index + 1 :]]
    return chance.choice(JUNK)


@pytest.mark.parametrize(("layout", "config"), DAMAGED, ids=[f"{x}-{c.kind}" for x, c in DAMAGED])
def test_a_damaged_config_is_one_line_or_a_whole_head(tmp_path, layout, config):
    write_head(head(config), tmp_path / "h", layout=layout)
    path = tmp_path / "h" / "config.json"
    good, chance = json.loads(path.read_text()), random.Random(1)
    for _ in range(150):
        path.write_text(json.dumps(mutate(good, chance)))
        outcome(tmp_path / "h")


@pytest.mark.parametrize(("layout", "config"), DAMAGED, ids=[f"{x}-{c.kind}" for x, c in DAMAGED])
def test_damaged_weights_are_one_line_or_a_whole_head(tmp_path, layout, config):
    write_head(head(config), tmp_path / "h", layout=layout)
    path = tmp_path / "h" / "model.safetensors"
    good, chance = path.read_bytes(), random.Random(2)
    for _ in range(60):
        broken = bytearray(good)
        if chance.random() < 0.3:
            del broken[chance.randrange(len(broken)) :]
        else:
            for _ in range(3):  # the header, where a byte matters most
                broken[chance.randrange(min(len(broken), 600))] = chance.randrange(256)
        path.write_bytes(broken)
        outcome(tmp_path / "h")


def outcome(folder: Path) -> None:
    """Reading gives a head that is whole, or one line."""
    message = ""
    try:
        read = read_head(folder, target=FACTS)
    except OutriderError as error:
        message = str(error)
    assert "\n" not in message and len(message) < 400
    if not message:
        assert {n: tuple(t.shape) for n, t in read.tensors.items() if n not in ("d2t", "t2d")} == (
            read.config.shapes()
        )


def test_damaged_json_and_provenance(eagle3):
    (eagle3 / "provenance.json").write_text("[")
    with pytest.raises(ModelError, match=r"provenance.json cannot be read"):
        read_head(eagle3)
    (eagle3 / "config.json").write_text('{"outrider":')
    with pytest.raises(ModelError, match=r"config.json cannot be read"):
        read_head(eagle3)


# ----------------------------------------------------------------------------------------- fit


@pytest.fixture(scope="module")
def facts(tmp_path_factory) -> TargetFacts:
    return folder_facts(write_folder(tmp_path_factory.mktemp("target")), name="model")


def test_facts_of_a_folder(facts):
    config = tiny_config()
    assert (facts.width, facts.layers, facts.vocab_size) == (config.width, 3, VOCAB)
    assert len({facts.config_hash, facts.tokenizer_hash, facts.template_hash}) == 3


def test_a_gguf_file_and_its_original_agree(tmp_path, facts):
    raw = tiny_raw("llama") | {"vocab_size": VOCAB, "eos_token_id": 2, "rms_norm_eps": 1e-5}
    folder = converted(write_gguf(tmp_path / "m.gguf", raw, "llama"))
    other = folder_facts(folder, name="gguf")
    assert replace(other, name="model", architectures=facts.architectures) == facts


def test_llama3_rotations_are_the_same_in_both_forms():
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    from outrider.models.config import ModelConfig

    raw = tiny_raw("llama")
    stretched = ModelConfig.from_hf(raw | {"rope_scaling": scaling})
    rope = stretched.layers[0].rope
    assert rope is not None
    plain = ModelConfig.from_hf(raw).layers[0].rope
    assert plain is not None
    table = (plain.frequencies(1) / rope.frequencies(1)).tolist()
    as_table = ModelConfig.from_hf(
        raw
        | {
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": table,
                "long_factor": table,
                "attention_factor": 1.0,
            }
        }
    )
    assert config_hash(stretched) == config_hash(as_table) != config_hash(ModelConfig.from_hf(raw))


def test_every_family_and_every_fact_has_its_own_hash():
    hashes = {config_hash(tiny_config(family)) for family in TINY_FAMILIES}
    assert len(hashes) == len(TINY_FAMILIES)
    config = tiny_config()
    for change in ({"norm_eps": 1e-6}, {"inner": 97}, {"qk_norm": True}, {"attention_scale": 1.0}):
        assert config_hash(replace(config, **change)) != config_hash(config)
    for change in ({"context_length": 9}, {"tied": False}, {"norm_eps": 1e-5 + 1e-13}):
        assert config_hash(replace(config, **change)) == config_hash(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("width", 9),
        ("layers", 7),
        ("vocab_size", 51),
        ("config_hash", "c1"),
        ("tokenizer_hash", "t1"),
    ],
)
def test_a_head_for_another_target_is_refused(key, value):
    with pytest.raises(DrafterMismatch, match=rf"target\.{key}"):
        check_fit(EAGLE3, replace(FACTS, name="other", **{key: value}))


def test_another_chat_template_is_a_warning():
    (line,) = check_fit(EAGLE3, replace(FACTS, template_hash="p1"))
    assert "p0" in line and "p1" in line
    assert check_fit(EAGLE3, FACTS) == []


def test_without_hashes_only_sizes_count():
    unsigned = replace(FACTS, config_hash="", tokenizer_hash="", template_hash="")
    assert check_fit(EAGLE3, unsigned) == []
    assert check_fit(replace(EAGLE3, target=unsigned), FACTS) == []
    bare = target_facts(tiny_config(), name="bare")
    assert (bare.tokenizer_hash, bare.template_hash) == ("", "")


def test_a_changed_template_changes_its_hash_alone(tmp_path, facts):
    folder = write_folder(tmp_path / "m")
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"chat_template": TEMPLATE + "!"}))
    other = folder_facts(folder, name="model")
    assert other != facts
    assert replace(other, template_hash=facts.template_hash) == facts
