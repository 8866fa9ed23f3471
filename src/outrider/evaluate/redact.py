"""Takes personal data and secrets out of texts, and counts what it took. Pure; knows no files.

A value becomes a placeholder such as ``<email-1>``; the same value in the same conversation gets
the same one, because repetition is what a drafter lives on. The report counts, it never quotes.

Patterns find what has a form: no name of a person has one. Who needs more adds patterns of his own;
nothing found is no proof that nothing is there, and the report says so.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.errors import InvalidParameter

PATTERNS: Mapping[str, str] = {
    "key": (
        r"\b(?:sk|pk|rk)[-_][A-Za-z0-9_-]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bAKIA[A-Z0-9]{16}\b"
        r"|\bxox[abprs]-[A-Za-z0-9-]{10,}|\bglpat-[A-Za-z0-9_-]{16,}|\bhf_[A-Za-z0-9]{20,}"
        r"|\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"
        r"|(?i:(?<=bearer )[A-Za-z0-9._~+/-]{16,})"
    ),
    "email": r"\b[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63})+\b",
    "uuid": r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b",
    "iban": r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){3,7}(?: ?[A-Z0-9]{1,3})?\b",
    "card": r"\b\d(?:[ -]?\d){12,18}\b",
    "ip": r"\b(?:\d{1,3}\.){3}\d{1,3}\b",
    "hash": r"\b[0-9a-fA-F]{32,}\b",
    "phone": r"(?<![\w.])(?:\+|00)\d[\d ()/.-]{6,18}\d\b"
    r"|(?<![\w.,-])0\d{1,4}[ /-]\d[\d /-]{4,12}\d\b"
    r"|(?<!\w)\(?\d{3}\)?[ .-]\d{3}[ .-]\d{4}\b",
    "id": r"\b(?=[A-Z0-9-]*\d{4})[A-Z]{1,4}-?\d{4,}[A-Z0-9-]*\b|\b\d{9,}\b",
}
SAID = (
    "names of people and places have no form that a pattern could find, and definitions of tools "
    "are kept as they are; read a sample before you share the set"
)


@dataclass
class Redactor:
    """Replaces what its patterns find.

    Attributes:
        own: the user's patterns by name, tried before ours.
        counts: replacements so far, by kind.
    """

    own: Mapping[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._patterns: list[tuple[str, re.Pattern[str]]] = []
        for name, text in {**self.own, **PATTERNS}.items():
            if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
                raise InvalidParameter(
                    f"pattern name {name!r}: use lower-case letters, digits and _"
                )
            try:
                pattern = re.compile(text)
            except re.error as fault:
                raise InvalidParameter(
                    f"pattern {name} is no regular expression: {fault}"
                ) from None
            if pattern.match("") is not None:
                raise InvalidParameter(f"pattern {name} matches nothing at all; make it longer")
            self._patterns.append((name, pattern))

    def conversation(self, texts: Sequence[str]) -> list[str]:
        """The texts of one conversation, with placeholders that agree among them."""
        seen: dict[tuple[str, str], str] = {}
        numbers: Counter[str] = Counter()

        def replace(kind: str, value: str) -> str:
            if kind == "card" and not _is_card(value):
                return value
            if (kind, value) not in seen:
                numbers[kind] += 1
                seen[kind, value] = f"<{kind}-{numbers[kind]}>"
            self.counts[kind] += 1
            return seen[kind, value]

        return [self._one(text, replace) for text in texts]

    def _one(self, text: str, replace: Callable[[str, str], str]) -> str:
        for kind, pattern in self._patterns:

            def put(found: re.Match[str], kind: str = kind) -> str:
                return replace(kind, found.group())

            text = pattern.sub(put, text)
        return text

    def report(self) -> dict[str, object]:
        """What was replaced, by kind; never the values."""
        return {"replaced": dict(sorted(self.counts.items())), "note": SAID}


def _is_card(value: str) -> bool:
    """Luhn's check digit, so that other long numbers are not taken for cards."""
    digits = [int(character) for character in value if character.isdigit()]
    doubled = [d if i % 2 == 0 else sum(divmod(2 * d, 10)) for i, d in enumerate(reversed(digits))]
    return sum(doubled) % 10 == 0
