"""`outrider demo`: five prompts, answered plainly and with speculation, compared token by token.

Both answers come from the same engine and the same seed; the only difference is the drafter.
Nothing is reused between them, so that each pays for its own prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from outrider.cli import options
from outrider.cli.follow import follow
from outrider.cli.render import REFRESH_PER_SECOND, PlainView, Summary, View
from outrider.cli.session import Loaded, Session, check_drafter

if TYPE_CHECKING:
    from outrider.core.sampling import SamplingParams
    from outrider.engine import Completion, Engine
    from outrider.evaluate.workloads import Prompt

PLAIN = "none"
BEST = "best"  # suffixes, with the trained head that ships for the target


# Family to temperature: one is sampled, since the tokens are the same there too.
FAMILIES = {"chat": 0.7, "edit": 0.0, "extract": 0.0, "code": 0.0, "agent": 0.0}


@dataclass(frozen=True)
class Pair:
    """One prompt's two answers."""

    name: str
    plain: Completion
    speculative: Completion

    def first_difference(self) -> int | None:
        """The index of the first output token that differs; `None` where all agree."""
        ours, theirs = self.speculative.tokens, self.plain.tokens
        for index in range(max(len(ours), len(theirs))):
            if ours[index : index + 1] != theirs[index : index + 1]:
                return index
        return None


def demo(
    context: typer.Context,
    target: Annotated[str, typer.Option(help="The model to run.")] = options.DEFAULT_TARGET,
    drafter: options.Drafter = BEST,
    max_tokens: options.MaxTokens = 96,
    seed: options.Seed = 7,
    weights: options.Weights = "auto",
    threads: options.Threads = None,
) -> None:
    """Answer five prompts with and without speculation, and compare them token by token.

    The drafter "best" is suffixes together with the trained head that ships for the target.
    """
    session: Session = context.obj
    params = options.sampling(temperature=0.0, max_tokens=max_tokens, seed=seed)
    if drafter != BEST:
        check_drafter(drafter)
    loaded = session.model(target, weights=weights, threads=threads)
    if drafter == BEST:
        from outrider.drafters.table import best_spec

        drafter = best_spec(loaded.target, loaded.source)
    engine = session.engine(loaded, [drafter], reuse_prefix=False)
    pairs = [
        run_pair(session, loaded, engine, replace(params, temperature=temperature), prompt, drafter)
        for prompt, temperature in prompts()
    ]
    session.out.print()
    session.out.print(results(pairs))
    if not verdict(session.out, pairs, loaded):
        raise typer.Exit(1)


def prompts() -> list[tuple[Prompt, float]]:
    """The shortest built-in prompt of each family, with its temperature."""
    from outrider.evaluate.workloads import load_workload

    return [
        (min(load_workload(f"builtin:{family}"), key=lambda p: (p.words, p.id)), temperature)
        for family, temperature in FAMILIES.items()
    ]


def run_pair(
    session: Session,
    loaded: Loaded,
    engine: Engine,
    params: SamplingParams,
    prompt: Prompt,
    drafter: str,
) -> Pair:
    """Answer one prompt twice."""
    tokens = loaded.tokenizer.chat(prompt.chat())
    session.out.print()
    asked = Text(f"{prompt.family}: {prompt.messages[-1].content}", style="bold")
    session.out.print(asked, soft_wrap=not session.out.is_terminal)  # words stay whole
    screen = screen_for(session.out, (PLAIN, drafter))
    try:
        plain = answer(engine, tokens, params, PLAIN, screen.view(0))
        speculative = answer(engine, tokens, params, drafter, screen.view(1))
    finally:
        screen.close()
    return Pair(prompt.family, plain, speculative)


def answer(
    engine: Engine, tokens: Sequence[int], params: SamplingParams, drafter: str, view: View
) -> Completion:
    """One answer to its end.

    Raises:
        KeyboardInterrupt: it was interrupted; half a comparison is worth nothing.
    """
    completion = follow(engine, tokens, params, drafter=drafter, view=view)
    if completion.finish_reason == "cancelled":
        raise KeyboardInterrupt
    return completion


def results(pairs: Sequence[Pair]) -> Table:
    """The table of numbers."""
    table = Table(title="Plain and speculative decoding", box=box.SIMPLE_HEAD)
    for column in ("prompt", "tokens", "plain\ntokens/s", "speculative\ntokens/s", "speed-up"):
        table.add_column(column, justify="left" if column == "prompt" else "right", no_wrap=True)
    for column in ("acceptance\nlength", "steps\nsaved"):
        table.add_column(column, justify="right", no_wrap=True)
    for pair in pairs:
        plain, ours = Summary.of(pair.plain), Summary.of(pair.speculative)
        ratio = ours.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s else 0.0
        table.add_row(
            pair.name,
            str(ours.tokens),
            f"{plain.tokens_per_s:.1f}",
            f"{ours.tokens_per_s:.1f}",
            f"{ratio:.2f}x",
            f"{ours.acceptance_length:.2f}",
            f"{ours.steps_saved} of {ours.tokens}",
        )
    return table


def verdict(out: Console, pairs: Sequence[Pair], loaded: Loaded) -> bool:
    """Say whether every pair agrees, and where the first difference is if one does not."""
    agree = True
    for pair in pairs:
        index = pair.first_difference()
        errors = [c.error for c in (pair.plain, pair.speculative) if c.error]
        if errors:
            out.print(f"FAILED: {pair.name}: {errors[0]}", markup=False)
        elif index is not None:
            plain, ours = (
                loaded.tokenizer.decode(c.tokens[index : index + 1])
                for c in (pair.plain, pair.speculative)
            )
            out.print(
                f"DIFFERENT: {pair.name}, output token {index}: "
                f"plain says {plain!r}, speculative says {ours!r}",
                markup=False,
            )
        agree = agree and index is None and not errors
    if agree:
        total = sum(len(pair.plain.tokens) for pair in pairs)
        out.print(f"Checked: all {total} tokens are the same with and without speculation.")
    return agree


class SequentialScreen:
    """Off a terminal: one answer after the other, as plain lines."""

    def __init__(self, console: Console, names: tuple[str, str]) -> None:
        self._console = console
        self._names = names

    def view(self, side: int) -> View:
        """Where the answer of this side goes."""
        self._console.print(f"-- {self._names[side]}", markup=False)
        return PlainView(self._console)

    def close(self) -> None:
        """Nothing is held back."""


class TwoColumns:
    """On a terminal: both answers side by side as they grow.

    While they grow, only as many last lines are shown as fit: a terminal cannot redraw what has
    left the screen. The end shows everything.
    """

    def __init__(self, console: Console, names: tuple[str, str]) -> None:
        self._names = names
        self._texts = ["", ""]
        self._counts = [(0, 0), (0, 0)]
        self._console = console
        self._live = Live(
            self._table(lines=self._room()), console=console, refresh_per_second=REFRESH_PER_SECOND
        )
        self._live.start()

    def view(self, side: int) -> View:
        """Where the answer of this side goes."""
        return _Column(self, side)

    def add(self, side: int, text: str, tokens: int) -> None:
        """New text for one side."""
        self._texts[side] += text
        count, steps = self._counts[side]
        self._counts[side] = (count + tokens, steps + (1 if tokens else 0))
        self._live.update(self._table(lines=self._room()))

    def close(self) -> None:
        """Leave the final state on the screen."""
        self._live.update(self._table(lines=None))
        self._live.stop()

    def _room(self) -> int:
        """Lines of text that fit below the head of a column."""
        return max(self._console.height - 2, 1)

    def _table(self, *, lines: int | None) -> Table:
        table = Table.grid(expand=True, padding=(0, 2))
        table.add_column(ratio=1)
        table.add_column(ratio=1)
        table.add_row(*(self._column(side, lines) for side in (0, 1)))
        return table

    def _column(self, side: int, lines: int | None) -> Group:
        count, steps = self._counts[side]
        name = "plain" if self._names[side] == PLAIN else self._names[side]
        text = Text(self._texts[side])
        if lines is not None:
            width = max((self._console.width - 2) // 2, 1)  # the padding between the columns is 2
            text = Text("\n").join(text.wrap(self._console, width)[-lines:])
        return Group(Text(f"{name}: {count} tokens in {steps} target steps", style="cyan"), text)


class _Column:
    """One side of `TwoColumns` as a `View`."""

    def __init__(self, screen: TwoColumns, side: int) -> None:
        self._screen = screen
        self._side = side

    def show(self, text: str, tokens: int) -> None:
        self._screen.add(self._side, text, tokens)

    def close(self) -> None:
        pass


def screen_for(console: Console, names: tuple[str, str]) -> SequentialScreen | TwoColumns:
    """The screen that fits where standard output goes."""
    return TwoColumns(console, names) if console.is_terminal else SequentialScreen(console, names)
