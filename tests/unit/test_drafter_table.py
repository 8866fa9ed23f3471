"""From a word on the command line to a drafter, and what is said where there is none."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from outrider.drafters import table
from outrider.drafters.hybrid import HybridDrafter
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
