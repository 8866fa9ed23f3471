"""Runs one request to its end and stops it cleanly on Ctrl-C.

The interrupt is noted and honoured *between* two steps, so a step is never torn apart: the target's
cache stays whole and the engine can go on with the next request. A second Ctrl-C during the same
answer interrupts at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.cli.render import View
    from outrider.core.sampling import SamplingParams
    from outrider.engine import Completion, Engine


class Interrupt(AbstractContextManager["Interrupt"]):
    """Notes the first Ctrl-C instead of raising; off the main thread it does nothing."""

    def __init__(self) -> None:
        self.requested = False
        self._active = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Interrupt:
        if self._active:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._active:
            before = signal.default_int_handler if self._before is None else self._before
            signal.signal(signal.SIGINT, before)  # none: it was not Python's

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


def follow(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, *, drafter: str, view: View
) -> Completion:
    """Run one request, show it as it grows, and give it back finished or cancelled.

    Raises:
        InvalidParameter: the engine refuses the request.
        KeyboardInterrupt: Ctrl-C came twice.
    """
    with Interrupt() as interrupt:
        try:
            request = engine.add(prompt, params, drafter=drafter)
            while engine.has_work:
                if interrupt.requested:
                    engine.cancel(request)
                for update in engine.step():
                    view.show(update.text, len(update.tokens))
        finally:
            view.close()
        return engine.take(request)
