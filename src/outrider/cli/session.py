"""What the verbs get from outside: model loading, drafters, the screen. Tests give fakes instead.

A session knows how to put a model, drafters and an engine together from command-line words; it
knows nothing of what a verb does with them.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from outrider.errors import InvalidParameter

if TYPE_CHECKING:
    from outrider.engine import Engine
    from outrider.models.target import Target
    from outrider.models.tokenizer import Tokenizer

ProgressCallback = Callable[[str, float], None]
"""Told the stage and how much of it is done, 0 to 1."""


class Loaded(Protocol):
    """A model that is ready to run, and its tokenizer."""

    @property
    def target(self) -> Target: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def source(self) -> Path: ...


class Loader(Protocol):
    """Loads a model: the library's `load_model`, or a fake."""

    def __call__(
        self, spec: str, *, weights: str, device: str, exact: bool, progress: ProgressCallback
    ) -> Loaded: ...


def load_from_library(
    spec: str, *, weights: str, device: str, exact: bool, progress: ProgressCallback
) -> Loaded:
    """`outrider.models.load.load_model`, imported when a model is wanted and not before."""
    from outrider.models.load import load_model

    return load_model(spec, weights=weights, device=device, exact=exact, progress=progress)


PIPE_CLOSED = 141  # as a shell reports SIGPIPE; 1 would claim that a check failed


class Screen(Console):
    """A console whose reader may leave, as in ``outrider ... | head -1``."""

    def on_broken_pipe(self) -> None:
        """Drop what is still to come and end quietly."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(PIPE_CLOSED)


@dataclass
class Session:
    """One run of the command line.

    Attributes:
        load: where models come from.
        out, err: standard output for answers, standard error for everything about them.
        debug: show tracebacks.
    """

    load: Loader = load_from_library
    out: Console = field(default_factory=lambda: Screen(soft_wrap=True, highlight=False))
    err: Console = field(
        default_factory=lambda: Screen(
            stderr=True,
            soft_wrap=not sys.stderr.isatty(),  # for people, words stay whole
            highlight=False,
        )
    )
    debug: bool = False

    def model(
        self,
        spec: str,
        *,
        weights: str = "auto",
        device: str = "auto",
        exact: bool = False,
        threads: int | None = None,
    ) -> Loaded:
        """Load a model and show how far it is.

        Raises:
            ModelError: the files are missing, damaged or of an unsupported kind.
            InvalidParameter: the number of threads is out of range.
        """
        set_threads(threads)
        with LoadProgress(self.err, spec) as progress:
            return self.load(
                spec, weights=weights, device=device, exact=exact, progress=progress.update
            )

    def engine(
        self,
        loaded: Loaded,
        drafters: Sequence[str],
        *,
        rule: str = "walk",
        context: int | None = None,
        reuse_prefix: bool = True,
    ) -> Engine:
        """An engine for one request at a time, with the drafters named by their specs.

        Raises:
            InvalidParameter, DrafterMismatch: a drafter does not exist or does not fit.
        """
        from outrider.drafters.table import Setting, build_drafter
        from outrider.engine import Engine, EngineConfig

        setting = Setting(
            loaded.target, loaded.tokenizer, sequences=1, context=context, source=loaded.source
        )
        built = {spec: build_drafter(spec, setting) for spec in drafters}
        config = EngineConfig(slots=1, context=context, rule=rule, reuse_prefix=reuse_prefix)
        return Engine(loaded.target, drafters=built, tokenizer=loaded.tokenizer, config=config)


def set_threads(threads: int | None) -> None:
    """Use this many CPU threads; `None` leaves the tensor library's choice.

    Raises:
        InvalidParameter: less than one, or more than the machine has.
    """
    if threads is None:
        return
    most = os.cpu_count() or 1
    if not 1 <= threads <= most:
        raise InvalidParameter(f"--threads is {threads}; use 1 to {most} on this machine")
    import torch

    torch.set_num_threads(threads)


def check_drafter(spec: str) -> None:
    """Refuse an unknown drafter before a model is loaded.

    Raises:
        InvalidParameter: no drafter has that name.
    """
    from outrider.drafters.table import drafter_names

    name, known = spec.partition(":")[0], list(drafter_names())
    a_folder = (Path(spec.partition(",")[0]).expanduser() / "config.json").is_file()
    if name not in known and not a_folder:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(known)}"
        raise InvalidParameter(f"drafter {name!r} is unknown; {hint}")


class LoadProgress(AbstractContextManager["LoadProgress"]):
    """Shows the loading of a model: a bar on a terminal, nothing but the start elsewhere."""

    def __init__(self, console: Console, spec: str) -> None:
        self._console = console
        self._spec = spec
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(f"loading {spec}", total=None)

    def __enter__(self) -> LoadProgress:
        if not self._console.is_terminal:
            self._console.print(f"loading {self._spec}", markup=False)
        self._bar.start()
        return self

    def update(self, stage: str, done: float) -> None:
        """The loader's callback."""
        self._bar.update(
            self._task, description=f"loading {self._spec}: {stage}", completed=done, total=1.0
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()


def is_interactive() -> bool:
    """Is a person typing at the other end?"""
    return sys.stdin.isatty()
