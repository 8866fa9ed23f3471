"""Where results go: full disks, closed pipes, wrong paths, small terminals."""

from __future__ import annotations

import errno
import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from outrider.cli.bench import check_results
from outrider.cli.demo import TwoColumns
from outrider.cli.doctor import _cache
from outrider.cli.main import UNFIT, run
from outrider.cli.models import list_models
from outrider.cli.options import check_writable
from outrider.cli.render import LiveView
from outrider.cli.session import PIPE_CLOSED, Screen, Session
from outrider.errors import InvalidParameter


class Full(io.StringIO):
    """A file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


class Descriptor:
    """Standard output, as far as its number is asked for."""

    def fileno(self) -> int:
        return 1


def test_full_output_is_one_line_and_code_three():
    err = io.StringIO()
    code = run(["models"], session=Session(out=Screen(file=Full()), err=Console(file=err)))
    assert code == UNFIT
    assert err.getvalue().count("\n") == 1 and "no space left" in err.getvalue()


def test_a_reader_that_leaves_is_not_a_failed_check(monkeypatch):
    system = SimpleNamespace(open=lambda *_: 0, dup2=lambda *_: None, devnull="", O_WRONLY=1)
    monkeypatch.setattr("outrider.cli.session.os", system)
    monkeypatch.setattr("outrider.cli.session.sys", SimpleNamespace(stdout=Descriptor()))
    with pytest.raises(SystemExit) as end:
        Screen(file=io.StringIO()).on_broken_pipe()
    assert end.value.code == PIPE_CLOSED == 141


def test_results_are_refused_before_any_work(tmp_path):
    kept = tmp_path / "kept.jsonl"
    kept.write_text("old")
    for path, reason in ((tmp_path, "folder"), (tmp_path / "no" / "x.json", "no folder")):
        with pytest.raises(InvalidParameter, match=reason):
            check_writable(path)
    with pytest.raises(InvalidParameter, match="exists already"):
        check_results(None, kept)
    check_results(kept, tmp_path / "new.jsonl")
    assert kept.read_text() == "old" and not (tmp_path / "new.jsonl").exists()


@pytest.mark.parametrize("flag", ["--drafters", "--workload"])
def test_bench_refuses_an_empty_list(cli, flag):
    result = cli("bench", "--target", "fake", flag, ",")
    assert result.code == 2 and flag in result.err and "empty" in result.err


def test_a_model_file_that_is_not_there_is_not_listed_as_found(monkeypatch, tmp_path):
    monkeypatch.setenv("OUTRIDER_SMOLLM2", str(tmp_path / "gone.gguf"))
    row = list_models()[0]
    assert not row.found and "gone.gguf does not exist" in row.remedy


def test_doctor_says_when_the_cache_cannot_be_written(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert "cannot be written" in _cache(blocked / "cache")
    assert "MB free" in _cache(tmp_path / "new" / "cache")


def test_answers_longer_than_the_screen_are_drawn_whole_once():
    console = Console(file=io.StringIO(), force_terminal=True, width=40, height=8)
    screen = TwoColumns(console, ("none", "suffix"))
    for number in range(30):
        screen.view(0).show(f"line {number}\n", 1)
        screen._live.refresh()
    early = console.file.getvalue()  # type: ignore[attr-defined]
    screen.close()
    late = console.file.getvalue()[len(early) :]  # type: ignore[attr-defined]
    assert "line 29" in early and early.count("line 0") <= 8
    assert late.count("line 0") >= 1 and "line 17" in late


def test_a_paragraph_longer_than_the_screen_shows_its_end_and_whole_words():
    console = Console(file=io.StringIO(), force_terminal=True, soft_wrap=True, width=30, height=6)
    view = LiveView(console)
    for number in range(60):
        view.show(f"word{number:02d} ", 1)
    view._live.refresh()
    early = console.file.getvalue()  # type: ignore[attr-defined]
    view.close()
    late = console.file.getvalue()[len(early) :]  # type: ignore[attr-defined]
    assert "word59" in early
    assert all(f"word{number:02d}" in late for number in range(60))
    assert re.search(r"word03 *\nword04", late)
