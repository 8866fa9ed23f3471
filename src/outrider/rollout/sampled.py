"""Do a profile's sampled tokens follow their target's law? Evidence over all requests, in a test
that may be looked at after each of them.

For engines without exactness: two sampled answers may differ there and both be right, so tokens are
held against the probabilities that the engine tells for their places. Whether *those* are the
target's is what the greedy comparison with the baseline shows. Pure; clocks and networks are
elsewhere, the test itself is `outrider.core.law.EProcess`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from outrider.core.law import EProcess, Setting, law_of, token_label

TOP: Final = 20
"""Likeliest tokens asked for at each place; what an engine adds beyond them is left out, since it
may have been added because it was drawn."""

Told = Sequence[tuple[str, Sequence[tuple[str, float]]]]
"""Each token of an answer, and the log-probabilities at temperature 1 of the likeliest at its
place."""


@dataclass
class SampledLaw:
    """What one profile's engine has shown since it was started.

    Attributes:
        alpha: the chance that an engine that samples rightly is ever accused.
        undecided: tokens whose law the log-probabilities do not decide.
    """

    alpha: float
    undecided: int = 0
    _process: EProcess = field(init=False)

    def __post_init__(self) -> None:
        self._process = EProcess(alpha=self.alpha)

    @property
    def tokens(self) -> int:
        """Tokens that were tested."""
        return self._process.tokens

    @property
    def evidence(self) -> float:
        """Logarithm of the e-value now; it accuses at `-log(alpha)`."""
        return self._process.log_e

    def saw(self, told: Told, setting: Setting) -> str | None:
        """Take in one answer; what the engine is accused of, once the evidence suffices.

        An answer counts up to the first place of which nothing is told. Whether a place counts
        depends on what came before it and on its law alone, never on the token that came.
        """
        for token, likeliest in told:
            top = sorted(likeliest, key=lambda item: -item[1])[:TOP]
            if not top:
                break
            law = law_of(top, setting)
            if law is None:
                self.undecided += 1
                continue
            self._process.update(law, token_label(token))
            if self._process.rejected:
                break
        return self._why() if self._process.rejected else None

    def _why(self) -> str:
        found = self._process.peak
        odds = f"1e{found / math.log(10):.0f} to 1" if math.isfinite(found) else "certain"
        return (
            f"sampled tokens do not follow the law of their log-probabilities: evidence {odds} "
            f"after {self.tokens} tokens"
        )
