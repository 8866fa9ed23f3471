"""Settings in YAML files, and what is wrong in them, in one line. Knows no particular settings."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from outrider.errors import InvalidParameter

Settings = TypeVar("Settings", bound=BaseModel)


def read_yaml(path: Path, *, needs: str) -> dict[str, Any]:
    """The mapping in a YAML file.

    Args:
        needs: what a file without any settings is told to hold.

    Raises:
        InvalidParameter: the file cannot be read, is not YAML, or holds no mapping.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameter(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise InvalidParameter(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise InvalidParameter(f"{path} holds no settings; it needs {needs}")
    return values


def checked(
    kind: type[Settings],
    values: dict[str, Any],
    *,
    source: str,
    parts: Iterable[type[BaseModel]],
) -> Settings:
    """Settings from plain values.

    Args:
        parts: all models that the settings are made of; an unknown key is compared with theirs.

    Raises:
        InvalidParameter: the first thing that is wrong, in one line.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise InvalidParameter(f"{source}: {_first_fault(error, parts)}") from None


def _first_fault(error: ValidationError, parts: Iterable[type[BaseModel]]) -> str:
    faults = error.errors(include_url=False)
    # A name that is written wrongly is also missing where it should be.
    fault = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
    place = ".".join(str(part) for part in fault["loc"]) or "settings"
    if fault["type"] == "extra_forbidden":
        keys = sorted({name for part in parts for name in part.model_fields})
        near = difflib.get_close_matches(str(fault["loc"][-1]), keys, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"{place} is unknown{hint}"
    if fault["type"] == "missing":
        return f"{place} is missing"
    return f"{place}: {fault['msg'].removeprefix('Value error, ')}"
