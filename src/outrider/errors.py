"""Errors that a user can act on.

Each names the thing, the value and the remedy in one line. `exit_code` is what the command line
returns: 2 for a wrong request (usage), 3 for something wrong with the machine or its files.
"""

from __future__ import annotations


class OutriderError(Exception):
    """Base of every error that Outrider raises on purpose."""

    exit_code = 2


class InvalidParameter(OutriderError, ValueError):
    """A request or a configuration asks for something out of range."""


class ContextExceeded(InvalidParameter):
    """A prompt, or what it wants for an answer, does not fit the context."""


class GrammarLimit(InvalidParameter):
    """Following a grammar takes more work than one request may cost; it would every time."""


class InvalidTree(OutriderError, ValueError):
    """A draft tree breaks its own rules; a fault of the drafter that made it."""


class DrafterMismatch(OutriderError, ValueError):
    """A drafter does not fit its target."""


class ModelError(OutriderError):
    """A model's files are missing, damaged, or of a kind that is not supported."""

    exit_code = 3


class NonFiniteLogits(OutriderError, ArithmeticError):
    """The target gave NaN or infinite logits, or every token is forbidden."""

    exit_code = 3


class OutOfMemory(OutriderError, MemoryError):
    """The memory plan does not fit; refused before anything is allocated."""

    exit_code = 3


class Overloaded(OutriderError):
    """No room for another request now; the same request may succeed later."""

    exit_code = 3


class TrainingFailed(OutriderError):
    """A training run cannot go on; what was saved before is whole."""

    exit_code = 1


class NoSpace(TrainingFailed):
    """The disk cannot hold what a run writes; what was saved before is whole."""

    exit_code = 3
