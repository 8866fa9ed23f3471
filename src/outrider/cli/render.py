"""How an answer and the numbers about it are shown, on a terminal and off it.

Numbers: *tokens/s* counts the time after the first tokens (the prompt's time is shown on its own as
time to first token); *acceptance length* is tokens per target step, the next token included, so
plain decoding is 1.0.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

if TYPE_CHECKING:
    from outrider.engine import Completion
    from outrider.records.step import StepRecord

REFRESH_PER_SECOND = 12


@dataclass(frozen=True)
class Summary:
    """One finished request in numbers.

    Attributes:
        tokens: output tokens.
        steps: target steps that gave output.
        proposed: nodes put to the target.
        accepted_draft_tokens: nodes it agreed with, the next tokens not counted.
        tokens_per_s: output tokens per second after the first step's; 0 where there was one step.
        ttft_s: seconds to the first token.
        e2e_s: seconds from the request to its end.
    """

    tokens: int
    steps: int
    proposed: int
    accepted_draft_tokens: int
    tokens_per_s: float
    ttft_s: float
    e2e_s: float

    @classmethod
    def of(cls, completion: Completion) -> Summary:
        """The numbers of a finished request, from its step records and its clock."""
        steps = [step for step in completion.steps if step.emitted]
        ttft_s = completion.ttft_s if completion.ttft_s is not None else completion.e2e_s
        later = sum(step.emitted for step in steps[1:])
        seconds = completion.e2e_s - ttft_s
        return cls(
            tokens=len(completion.tokens),
            steps=len(steps),
            proposed=sum(step.proposed for step in steps),
            accepted_draft_tokens=sum(step.accepted for step in steps),
            tokens_per_s=later / seconds if seconds > 0 else 0.0,
            ttft_s=ttft_s,
            e2e_s=completion.e2e_s,
        )

    @property
    def acceptance_length(self) -> float:
        """Tokens per target step; plain decoding is 1.0."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def steps_saved(self) -> int:
        """Target steps that plain decoding would have needed beyond these."""
        return self.tokens - self.steps

    def line(self) -> str:
        """One line for people."""
        return (
            f"{self.tokens} tokens in {self.e2e_s:.2f} s"
            f" | first token {self.ttft_s:.2f} s"
            f" | {self.tokens_per_s:.1f} tokens/s"
            f" | acceptance length {self.acceptance_length:.2f}"
            f" | {self.steps} target steps"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {
            "tokens": self.tokens,
            "target_steps": self.steps,
            "proposed_draft_tokens": self.proposed,
            "accepted_draft_tokens": self.accepted_draft_tokens,
            "acceptance_length": round(self.acceptance_length, 4),
            "tokens_per_s": round(self.tokens_per_s, 3),
            "ttft_s": round(self.ttft_s, 6),
            "e2e_s": round(self.e2e_s, 6),
        }


def why_plain(steps: Iterable[StepRecord]) -> str:
    """The most frequent reason for steps without a guess; empty where every step had one."""
    reasons = [step.reason for step in steps if step.reason]
    return max(sorted(set(reasons)), key=reasons.count) if reasons else ""


class View(Protocol):
    """Where a streamed answer goes."""

    def show(self, text: str, tokens: int) -> None:
        """New text, and how many tokens the step brought."""
        ...

    def close(self) -> None:
        """The answer is over; leave the cursor at the start of a line."""
        ...


class PlainView:
    """Writes text as it comes and nothing else: for pipes, files and logs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = "\n"

    def show(self, text: str, tokens: int) -> None:
        if text:
            self._console.out(text, end="", highlight=False)
            self._console.file.flush()
            self._last = text[-1]

    def close(self) -> None:
        if self._last != "\n":
            self._console.out("")
            self._last = "\n"


class SilentView:
    """Shows nothing: for `--json`."""

    def show(self, text: str, tokens: int) -> None:
        pass

    def close(self) -> None:
        pass


class LiveView:
    """A terminal's view: the answer with a line of numbers that keeps up with it.

    Finished lines are printed for good and only the end of the last one is redrawn, so an answer
    longer than the screen scrolls as it should. Words stay whole.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._line = ""
        self._tokens = 0
        self._steps = 0
        self._started: float | None = None
        self._first_tokens = 0
        self._live = Live(console=console, refresh_per_second=REFRESH_PER_SECOND, transient=True)
        self._live.start()

    def show(self, text: str, tokens: int) -> None:
        self._count(tokens)
        *finished, self._line = (self._line + text).split("\n")
        for line in finished:
            self._live.console.print(Text(line), soft_wrap=False)
        wrapped = Text(self._line).wrap(self._console, self._console.width)
        visible = Text("\n").join(wrapped[-max(self._console.height - 3, 1) :])
        self._live.update(Group(visible, Text(self._status(), style="dim")))

    def close(self) -> None:
        self._live.stop()
        if self._line:
            self._console.print(Text(self._line), soft_wrap=False)
        self._line = ""

    def _count(self, tokens: int) -> None:
        self._tokens += tokens
        self._steps += 1 if tokens else 0
        if tokens and self._started is None:
            self._started, self._first_tokens = time.perf_counter(), tokens

    def _status(self) -> str:
        if self._started is None:
            return "reading the prompt"
        seconds = time.perf_counter() - self._started
        rate = (self._tokens - self._first_tokens) / seconds if seconds > 0.2 else 0.0
        return (
            f"{self._tokens} tokens | {rate:.1f} tokens/s"
            f" | acceptance length {self._tokens / self._steps:.2f}"
        )


def view_for(console: Console) -> View:
    """The view that fits where standard output goes."""
    return LiveView(console) if console.is_terminal else PlainView(console)
