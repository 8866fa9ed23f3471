"""The preflight: rows over planted faults, and the verb on tiny model folders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models_files import VOCAB, write_folder

from heads_fakes import head_config, random_head
from outrider.core.tree import DraftTree
from outrider.drafters.identity import folder_hash
from outrider.drafters.suffix import SuffixDrafter
from outrider.errors import InvalidParameter
from outrider.evaluate import preflight as rows
from outrider.evaluate.preflight import ModelFacts, Report, Row
from outrider.evaluate.preflight_files import (
    licence_of,
    model_facts,
    read_lock,
    recurrent,
    server_rows,
    write_lock,
)
from outrider.evaluate.preflight_probe import acceptance_row, memory_row
from outrider.models.heads.files import Head, write_head
from outrider.models.heads.fit import folder_facts
from outrider.testing.fakes import TableTarget

FACTS = ModelFacts(
    name="m",
    pieces=("a", "b", "c"),
    rows=4,
    special={"<end>": 2},
    added={"<end>": 2},
    normaliser="",
    pre_tokeniser='{"type": "ByteLevel"}',
    template_hash="t" * 64,
    renderings={"one turn": (1, 2)},
    samples={"ab": (0, 1)},
    ends=frozenset({2}),
    context=128,
    dtype="bfloat16",
    nbytes=1000,
    licence="apache-2.0",
    hash="h" * 64,
)
SMALL = replace(FACTS, name="d", nbytes=100)


def status(found: list[Row]) -> dict[str, str]:
    return {row.name: row.status for row in found}


def test_a_fitting_draft_model_passes_every_row():
    assert set(status(rows.compare_models(FACTS, SMALL)).values()) == {"pass"}


FAULTS = [
    ({"pieces": ("a", "x", "c")}, "vocabulary", "fail", "token"),
    ({"pieces": ("a", "b", "c", "d")}, "vocabulary", "fail", "only the drafter"),
    ({"rows": 8}, "padding rows", "warn", "padding alone"),
    ({"rows": 2}, "padding rows", "fail", "2 rows"),
    ({"special": {"<end>": 1}}, "special tokens", "fail", "<end>"),
    ({"added": {}}, "added tokens", "warn", "none"),
    ({"normaliser": '{"type": "NFKC"}'}, "normaliser", "warn", "NFKC"),
    ({"pre_tokeniser": ""}, "pre-tokeniser", "warn", "none"),
    ({"samples": {"ab": (1, 0)}}, "sample texts", "fail", "[0, 1]"),
    ({"template_hash": "u" * 64}, "chat template", "warn", "uuuu"),
    ({"renderings": {"one turn": (1, 1)}}, "rendered samples", "warn", "one turn"),
    ({"ends": frozenset({1})}, "stop tokens", "fail", "[1]"),
    ({"context": 64}, "context lengths", "warn", "64"),
    ({"nbytes": 900}, "size and dtype", "warn", "90%"),
    ({"recurrent": "mamba keeps a state"}, "rollback", "fail", "mamba"),
    ({"licence": ""}, "licence of the draft model", "warn", "none"),
    ({"licence": "proprietary"}, "licence of the draft model", "warn", "proprietary"),
]


@pytest.mark.parametrize(("changes", "name", "wanted", "words"), FAULTS)
def test_a_planted_fault_shows_in_its_row(changes, name, wanted, words):
    found = {r.name: r for r in rows.compare_models(FACTS, replace(SMALL, **changes))}
    row = found[name]
    assert row.status == wanted and row.remedy
    assert words in row.detail or words == "token"
    others = {r.status for r in found.values() if r.name != name}
    assert "fail" not in others


def test_an_unused_tail_of_the_vocabulary_is_padding():
    padded = replace(SMALL, pieces=("a", "b", "c", "", ""), rows=5)
    assert rows.vocabulary(FACTS, padded).status == "pass"


# -- heads --------------------------------------------------------------------------------------


def head_rows(head, *, ids=None, made_for=None, provenance=None) -> dict[str, Row]:
    facts = replace(
        head.target, name="t", config_hash="c", tokenizer_hash="k", template_hash="p" * 20
    )
    head = replace(head, target=made_for or facts)
    found = rows.compare_head(
        replace(FACTS, rows=97),
        facts,
        head,
        draft_ids=ids,
        stored="bf16",
        provenance=provenance or {"licence": "MIT"},
    )
    return {row.name: row for row in found}


def test_a_head_of_this_target_passes():
    found = head_rows(head_config(context_length=128))
    assert {row.status for row in found.values()} == {"pass"}, found


def test_a_head_of_another_target_fails():
    head = head_config(context_length=128)
    other = replace(head.target, config_hash="other", tokenizer_hash="k", template_hash="q")
    found = head_rows(head, made_for=other)
    assert found["binding"].status == "fail" and "configuration" in found["binding"].detail
    assert found["chat template"].status == "warn"
    unsigned = head_rows(head, made_for=replace(head.target, config_hash=""))
    assert unsigned["binding"].status == "warn" and "convert" in unsigned["binding"].remedy


def test_odd_heads_are_pointed_out():
    odd = head_config(fc_norm=True, features=(1, 1, 1), context_length=64)
    found = head_rows(odd, ids=[0, 0, 200], provenance={"data": {"license": "cc-by-nc-4.0"}})
    assert {name: row.status for name, row in found.items()} == {
        "binding": "pass",
        "feature layers": "warn",
        "norm flags": "warn",
        "draft vocabulary map": "fail",
        "chat template": "pass",
        "context lengths": "warn",
        "dtype": "pass",
        "licence of the head": "warn",
    }
    assert head_rows(odd, ids=[0, 1])["draft vocabulary map"].status == "warn"  # no end token
    assert head_rows(odd, ids=[0, 2])["draft vocabulary map"].status == "pass"


# -- the parts that run -------------------------------------------------------------------------


def repetitive() -> TableTarget:
    return TableTarget(vocab_size=16, order=1, sharpness=8.0, ripple=0.0, context_length=256)


class Noise(SuffixDrafter):
    """Guesses one token whatever was said."""

    def propose(self, views, budgets):
        return [DraftTree.chain((v.tokens[-1], (v.tokens[-1] + 7) % 16)) for v in views]


class Broken(SuffixDrafter):
    def propose(self, views, budgets):
        raise RuntimeError("no weights")


PROMPTS = [[1, 2, 3, 1, 2, 3], [4, 5, 4, 5, 4]]


def test_the_probe_tells_a_good_drafter_from_noise():
    good = acceptance_row(repetitive(), SuffixDrafter(), PROMPTS, floor=0.05)
    assert good.status == "pass" and "by position" in good.detail
    noise = acceptance_row(repetitive(), Noise(), PROMPTS, floor=0.3)
    assert noise.status == "fail" and "floor" in noise.detail
    broken = acceptance_row(repetitive(), Broken(), PROMPTS, floor=0.05)
    assert broken.status == "fail" and "fault" in broken.detail


def test_a_drafter_that_guesses_nothing_is_a_warning():
    assert rows.acceptance([(0, 0)], floor=0.05, per_step=0).status == "warn"


def test_the_memory_plan():
    assert memory_row(repetitive(), SuffixDrafter(), slots=2, context=64).status == "pass"
    parts = {"cache": 90, "weights": 20}
    assert rows.memory(parts, available=100, what="2 slots").status == "fail"
    assert rows.memory(parts, available=115, what="2 slots").status == "warn"
    assert rows.memory(parts, available=0, what="2 slots").status == "warn"


# -- files --------------------------------------------------------------------------------------


def test_facts_of_a_folder_and_its_hash(tmp_path):
    folder = write_folder(tmp_path / "m", torch_dtype="float32", license="mit")
    facts = model_facts(folder, name="m")
    assert len(facts.pieces) == facts.rows == VOCAB
    assert facts.special["<|im_end|>"] == facts.added["<|im_end|>"] == 2
    assert (
        facts.licence == "mit" and facts.dtype == "float32" and "ByteLevel" in facts.pre_tokeniser
    )
    assert facts.renderings["with a system prompt"] and facts.template_hash
    before = folder_hash(folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"mit"', '"x"'))
    assert folder_hash(folder) != before


def test_recurrent_models_are_recognised():
    assert "mamba" in recurrent({"model_type": "mamba2"})
    assert "linear_attention" in recurrent({"layer_types": ["linear_attention", "full_attention"]})
    assert recurrent({"model_type": "llama", "layer_types": ["full_attention"]}) == ""


def test_licences_are_found_where_they_are_written(tmp_path):
    assert licence_of(tmp_path, {}) == ""
    (tmp_path / "LICENSE").write_text("words")
    assert licence_of(tmp_path, {}) == "see LICENSE"
    (tmp_path / "README.md").write_text("---\nlicense: 'apache-2.0'\n---\n")
    assert licence_of(tmp_path, {}) == "apache-2.0"


def test_lock_files(tmp_path):
    path, now = tmp_path / "lock.json", {"target": "a" * 64, "drafter": "b" * 64}
    assert read_lock(path) is None and rows.lock(now, None, written=False).status == "warn"
    write_lock(path, now)
    assert rows.lock(now, read_lock(path), written=False).status == "pass"
    changed = rows.lock({**now, "drafter": "c" * 64}, read_lock(path), written=False)
    assert changed.status == "fail" and "drafter was bbbb" in changed.detail
    path.write_text("{}")
    with pytest.raises(InvalidParameter, match="no lock file"):
        read_lock(path)


def test_a_servers_tokenizer():
    expected = {"a": (1,), "b": (2, 3)}
    assert server_rows(expected, expected)[0].status == "pass"
    assert server_rows({"a": None, "b": None}, expected)[0].status == "warn"
    assert server_rows({"a": (1,), "b": (3, 2)}, expected)[0].status == "fail"


# -- the verb -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("t") / "target")


def report(outcome) -> tuple[str, dict[str, str]]:
    found = json.loads(outcome.out)
    return found["status"], {row["name"]: row["status"] for row in found["rows"]}


def check(cli, target: Path, *words: str):
    return cli("check", "--target", str(target), "--weights", "fp32", "--context", "64", *words)


def test_a_pair_is_checked_and_locked(real_cli, target, tmp_path):
    lock = tmp_path / "pair.json"
    words = ("--drafter", f"draft_model:{target}", "--lock", str(lock))
    outcome = check(real_cli, target, *words, "--json")
    verdict, found = report(outcome)
    assert outcome.code == 0 and verdict == "warn", outcome.out  # as large as the target
    assert found["vocabulary"] == found["acceptance probe"] == found["lock file"] == "pass"
    text = check(real_cli, target, *words, "--no-probe")
    assert "as locked" in text.out and text.code == 0
    held = json.loads(lock.read_text())
    held["outrider-lock"]["drafter"] = "0" * 64
    lock.write_text(json.dumps(held))
    assert check(real_cli, target, *words, "--no-probe").code == 1


def test_a_wrong_tokenizer_fails_before_anything_runs(real_cli, target, tmp_path):
    other = write_folder(tmp_path / "other")
    raw = json.loads((other / "tokenizer.json").read_text())
    vocab = raw["model"]["vocab"]
    vocab["[unused1]"], vocab["[unused2]"] = vocab["[unused2]"], vocab["[unused1]"]
    (other / "tokenizer.json").write_text(json.dumps(raw))
    lock = tmp_path / "never.json"
    outcome = check(
        real_cli, target, "--drafter", f"draft_model:{other}", "--lock", str(lock), "--json"
    )
    verdict, found = report(outcome)
    assert outcome.code == 1 and verdict == "fail"
    assert found["vocabulary"] == "fail" and found["acceptance probe"] == "warn"
    assert not lock.exists()


def head_of(folder: Path, target: Path, *, wrong: bool) -> Path:
    """A random EAGLE-3 head for the tiny target, or for one with other rotations."""
    facts = folder_facts(target, name="tiny")
    if wrong:
        facts = replace(facts, config_hash="0" * 32)
    config = head_config(target=facts, draft_vocab_size=VOCAB)
    write_head(Head(config, random_head(config)), folder, layout="native", precision="fp32")
    return folder


def test_a_head_of_another_target_is_refused(real_cli, target, tmp_path):
    wrong = head_of(tmp_path / "head", target, wrong=True)
    outcome = check(real_cli, target, "--drafter", str(wrong), "--json")
    _, found = report(outcome)
    assert outcome.code == 1 and found["binding"] == "fail"


def test_an_untrained_head_fails_by_the_floor(real_cli, target, tmp_path):
    torch.manual_seed(0)
    right = head_of(tmp_path / "head", target, wrong=False)
    outcome = check(real_cli, target, "--drafter", str(right), "--floor", "0.9", "--json")
    _, found = report(outcome)
    assert found["binding"] == "pass" and found["acceptance probe"] == "fail", outcome.out


def test_drafters_without_files_need_none(real_cli, target):
    outcome = check(real_cli, target, "--drafter", "ngram", "--no-probe")
    assert outcome.code == 0 and "no weights of its own" in outcome.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--floor", "2"), "--floor is 2"),
        (("--slots", "0"), "--slots"),
        (("--drafter", "nobody"), "nobody"),
        (("--lock", "no/such/lock.json"), "cannot be written"),
    ],
)
def test_wrong_requests_are_one_line(real_cli, target, words, told):
    outcome = check(real_cli, target, *words)
    assert outcome.code == 2 and told in outcome.err


def test_a_missing_head_is_a_failing_row(real_cli, target):
    outcome = check(real_cli, target, "--drafter", "eagle3:no/such/folder", "--json")
    _, found = report(outcome)
    assert outcome.code == 1 and found["drafter's files"] == "fail"


def test_the_worst_row_decides():
    def of(*words: rows.Status) -> str:
        return Report("t", "d", tuple(Row("r", word, "") for word in words)).status

    assert of("pass", "warn", "pass") == "warn" and of("warn", "fail") == "fail"
    assert of() == "pass"
