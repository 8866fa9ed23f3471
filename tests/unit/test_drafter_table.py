"""From a word on the command line to a drafter, and what is said where there is none."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from outrider.drafters import table
from outrider.drafters.heads import HeadSpec, read_spec
from outrider.drafters.hybrid import HybridDrafter
from outrider.drafters.identity import drafter_identity, head_folder
from outrider.drafters.none import NoneDrafter
from outrider.drafters.table import Setting, build_drafter
from outrider.errors import InvalidParameter
from outrider.testing.fakes import TableTarget

SETTING = Setting(TableTarget())


def with_plugin(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    point = EntryPoint(name="mine", value=value, group=table.ENTRY_POINTS)

    def entry_points(*, group: str, name: str = "mine") -> list[EntryPoint]:
        return [point] if name == "mine" else []

    monkeypatch.setattr(table, "entry_points", entry_points)


def make_none(argument: str, setting: Setting) -> NoneDrafter:
    return NoneDrafter()


@pytest.mark.parametrize("name", ["none", "ngram", "suffix", "hybrid"])
def test_a_name_becomes_a_drafter(name: str) -> None:
    assert build_drafter(name, SETTING).name == name


def test_a_hybrid_takes_its_members_from_the_spec() -> None:
    assert isinstance(build_drafter("hybrid:ngram+suffix", SETTING), HybridDrafter)


def test_a_plugin_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with_plugin(monkeypatch, f"{__name__}:make_none")
    assert build_drafter("mine", SETTING).name == "none"


def test_a_plugin_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with_plugin(monkeypatch, "no_such_package:build")
    with pytest.raises(InvalidParameter, match=r"plug-in for drafter 'mine'.*no_such_package"):
        build_drafter("mine", SETTING)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sufix", "did you mean suffix"),
        ("ngram:7", "takes no argument"),
        ("draft_model", "draft_model:PATH"),
        ("replay", "replay:FILE"),
    ],
)
def test_wrong_specs_are_refused_with_a_remedy(spec: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        build_drafter(spec, SETTING)


@pytest.mark.parametrize(
    "spec", ["eagle3:{}", "{}", "{},chain", "draft_model:{}", "hybrid:suffix+draft_model={}"]
)
def test_what_a_drafter_is_depends_on_its_files_not_on_their_place(
    spec: str, tmp_path: Path
) -> None:
    def identity(place: str, weights: bytes, config: str = "{}") -> str:
        folder = tmp_path / place
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(config)
        (folder / "model.safetensors").write_bytes(weights)
        return drafter_identity(spec.format(folder), source=tmp_path, name="fake")

    first = identity("a", b"1")
    assert identity("b", b"1") == first
    assert identity("a", b"2") != first and identity("a", b"1") == first
    assert identity("a", b"1", '{"x": 1}') != first
    assert drafter_identity(f"{spec.format(tmp_path / 'b')}", source=tmp_path, name="x") == first


@pytest.mark.parametrize("spec", ["eagle3:{},chain", "eagle3:chain,{}", "{},chain"])
def test_chains_are_another_drafter_wherever_the_word_stands(spec: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1")
    trees = drafter_identity(f"eagle3:{tmp_path}", source=tmp_path, name="fake")
    assert drafter_identity(spec.format(tmp_path), source=tmp_path, name="fake") != trees


def test_a_head_s_spec_is_read_once_and_for_all(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    here = str(tmp_path)
    assert read_spec("suffix") is None and read_spec("draft_model:x") is None
    assert read_spec("eagle3") == HeadSpec("eagle3", None, False)
    assert read_spec("eagle:chain") == HeadSpec("eagle", None, True)
    assert read_spec(f"eagle3:{here},chain") == HeadSpec("eagle3", tmp_path, True)
    assert read_spec(f"{here},chain") == HeadSpec(None, tmp_path, True)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("eagle3:a,b", "write eagle3:DIR or eagle3:DIR,chain"),
        ("medusa:a,chain", "write medusa:DIR$"),
        ("{},b", "write DIR or DIR,chain"),
    ],
)
def test_malformed_head_specs_are_refused_with_the_forms(
    spec: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidParameter, match=message):
        head_folder(spec.format(tmp_path), source=tmp_path, name="fake")


def test_drafters_without_files_are_their_spec() -> None:
    here = Path("fake")
    found = {drafter_identity(s, source=here, name="x") for s in ("ngram", "suffix", "hybrid")}
    assert len(found) == 3
