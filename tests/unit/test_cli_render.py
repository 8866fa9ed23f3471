"""How answers and numbers are shown: the summary's arithmetic, and the terminal's views."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from outrider.cli.demo import TwoColumns, screen_for
from outrider.cli.render import LiveView, PlainView, Summary, view_for, why_plain
from outrider.core.sampling import SamplingParams
from outrider.engine import Completion
from outrider.records.step import StepRecord


def step(*, emitted: int, accepted: int = 0, proposed: int = 0, reason: str = "") -> StepRecord:
    return StepRecord(
        request=0,
        step=0,
        drafter="suffix",
        rule="walk",
        precision="int8",
        lossless=True,
        proposed=proposed,
        proposed_depth=proposed,
        offered=proposed,
        accepted=accepted,
        emitted=emitted,
        rows=1,
        sequences=1,
        draft_ms=0.0,
        verify_ms=1.0,
        host_ms=0.0,
        reason=reason,
    )


def completion(steps: tuple[StepRecord, ...], *, ttft_s: float | None, e2e_s: float) -> Completion:
    return Completion(
        request=0,
        prompt=(1,),
        tokens=tuple(range(sum(s.emitted for s in steps))),
        text="",
        finish_reason="length",
        error=None,
        logprobs=(),
        steps=steps,
        params=SamplingParams(),
        seed=0,
        drafter="suffix",
        queue_s=0.0,
        ttft_s=ttft_s,
        e2e_s=e2e_s,
    )


def test_the_summary_counts_steps_that_gave_output():
    steps = (
        step(emitted=0, reason="prefill"),
        step(emitted=1),
        step(emitted=4, accepted=3, proposed=5),
        step(emitted=5, accepted=4, proposed=5),
    )
    summary = Summary.of(completion(steps, ttft_s=1.0, e2e_s=4.0))
    assert (summary.tokens, summary.steps) == (10, 3)
    assert summary.acceptance_length == pytest.approx(10 / 3)
    assert summary.steps_saved == 7
    assert summary.accepted_draft_tokens == 7 and summary.proposed == 10
    # 9 tokens came in the 3 seconds after the first step's.
    assert summary.tokens_per_s == pytest.approx(3.0)


def test_a_request_without_output_has_zeros_and_no_division():
    summary = Summary.of(completion((), ttft_s=None, e2e_s=0.5))
    assert summary.acceptance_length == 0.0 and summary.tokens_per_s == 0.0
    assert "0 tokens" in summary.line()


def test_why_plain_names_the_most_frequent_reason():
    steps = [step(emitted=1, reason=r) for r in ("a", "b", "b")] + [step(emitted=2)]
    assert why_plain(steps) == "b"
    assert why_plain([step(emitted=2)]) == ""


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=90, height=20)


def test_the_live_view_leaves_exactly_the_answer_behind():
    console = terminal()
    view = view_for(console)
    assert isinstance(view, LiveView)
    for text in ("first ", "line\nsecond", " line\n", "[bold]not markup[/bold]"):
        view.show(text, 2)
    view.close()
    written = console.file.getvalue()
    assert "first line" in written and "second line" in written
    assert "[bold]not markup[/bold]" in written
    assert "tokens/s" in written and "acceptance length 2.00" in written


def test_the_plain_view_writes_what_it_is_given_and_ends_the_line():
    console = Console(file=io.StringIO(), soft_wrap=True)
    view = view_for(console)
    assert isinstance(view, PlainView)
    long = "word " * 60 + "[red]x[/red]"
    view.show(long, 1)
    view.show("", 1)
    view.close()
    view.close()
    assert console.file.getvalue() == long + "\n"


def test_two_columns_show_both_answers():
    console = terminal()
    screen = screen_for(console, ("none", "suffix"))
    assert isinstance(screen, TwoColumns)
    screen.view(0).show("plain words", 2)
    screen.view(1).show("the same words", 2)
    screen.close()
    written = console.file.getvalue()
    assert "plain: 2 tokens in 1 target steps" in written
    assert "the same words" in written
