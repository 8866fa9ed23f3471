"""What may come next in a request whose output must follow a grammar.

A grammar is asked at a node of a draft tree: which tokens may follow the committed output and the
guesses that lead there? So it acts along a path exactly as penalties do, and nothing needs rolling
back when guesses are rejected. The module knows no grammar language; `engine.grammar` does.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]


class Grammar(Protocol):
    """The state of one request's grammar. It follows committed tokens and can look ahead."""

    @property
    def finished(self) -> bool:
        """The output is complete, and nothing but an end token may follow."""
        ...

    def allowed(self, path: tuple[int, ...]) -> Mask:
        """Bool [V]: what may follow the committed output and ``path``. Not to be changed.

        Raises:
            InvalidParameter: the path itself breaks the grammar, or the grammar cannot go on.
        """
        ...

    def fits(self, path: Sequence[int]) -> int:
        """How many of these guesses, from the first, may follow the committed output in a row."""
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """These tokens are committed. End tokens are not passed.

        Raises:
            InvalidParameter: the grammar does not allow them here.
        """
        ...
