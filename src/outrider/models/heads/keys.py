"""Reading a JSON object that somebody else wrote: every value of the type that is asked for, or an
error that names the file, the key and the value. It knows nothing of heads.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from outrider.errors import ModelError

MOST = 10**8  # no size of a model is larger; a damaged one would take all memory


class Keys:
    """The values of a JSON object, each of the type that is asked for.

    Raises:
        ModelError: from every method, naming the file, the key and the value.
    """

    def __init__(self, raw: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.raw = raw
        self.source = source
        self._prefix = prefix

    def has(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, least: int = 0) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST:
            raise self.wrong(key, f"a whole number, {least} to {MOST}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(key, "a number above 0")
        if not 0 < value < 1e18 or not math.isfinite(value):
            raise self.wrong(key, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str) or not value.isprintable():
            raise self.wrong(key, "a string of one line")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._value(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "a list of strings")
        return tuple(value)

    def integers(self, key: str) -> tuple[int, ...]:
        value = self._value(key, None)
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self.wrong(key, "a list of whole numbers")
        return tuple(value)

    def section(self, key: str) -> Keys:
        """A nested object; an empty one where the key is absent or null."""
        value = {} if self.raw.get(key) is None else self.raw[key]
        if not isinstance(value, Mapping):
            raise self.wrong(key, "a JSON object")
        return Keys(value, self.source, f"{self._prefix}{key}.")

    def sections(self, key: str) -> list[Keys]:
        """A list of nested objects; none where the key is absent."""
        value = self._value(key, [])
        if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            raise self.wrong(key, "a list of JSON objects")
        return [
            Keys(item, self.source, f"{self._prefix}{key}[{i}].") for i, item in enumerate(value)
        ]

    def refuse(self, key: str, allowed: Collection[object], why: str) -> None:
        """Refuse every value of a key but those allowed; absent and null always are."""
        value = self.raw.get(key)
        plain = value is None or isinstance(value, (bool, int, float, str))
        if not plain or (value is not None and value not in allowed):
            raise ModelError(f"{self.source}: {self._prefix}{key} is {short(value)}; {why}")

    def must_state(self, names: Collection[str]) -> None:
        """Refuse defaults for these keys."""
        for name in names:
            if not self.has(name):
                raise self.wrong(name, "given in a native head")

    def wrong(self, key: str, wanted: str) -> ModelError:
        where = f"{self.source}: {self._prefix}{key}"
        if key not in self.raw:
            return ModelError(f"{where} is missing; it must be {wanted}")
        return ModelError(f"{where} is {short(self.raw[key])}; it must be {wanted}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        return default if value is None else value


def short(value: object) -> str:
    """A value on part of a line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
