"""The generated reference page is current and no page links to nowhere."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_command_line_page_is_current(docs):
    assert docs.CLI_PAGE.read_text(encoding="utf-8") == docs.cli_page(), "run `make docs`"


def test_no_page_links_to_nowhere(docs):
    assert [fault for page in docs.pages() for fault in docs.broken_links(page)] == []


def test_a_broken_link_is_found(docs, tmp_path, monkeypatch):
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# Here\n[a](no.md) [b](page.md#here) [c](#gone)\n```\n[d](fenced.md)\n```\n")
    assert list(docs.broken_links(page)) == [
        "page.md: no.md is not there",
        "page.md:  has no heading for #gone",
    ]


def test_no_command_has_more_than_25_flags(docs):
    for section in docs.cli_page().split("\n## ")[1:]:
        flags = [line for line in section.splitlines() if line.startswith("  -")]
        assert len(flags) - 1 <= 25, section.splitlines()[0]  # --help is not counted
