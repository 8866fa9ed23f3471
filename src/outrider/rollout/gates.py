"""What must be on disk and pass before a profile serves anything. Reads files, decides no more.

A certificate carries a seal over its content; one that was changed afterwards opens no gate.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from outrider.records.files import RecordFileError, read_json
from outrider.rollout.config import Gates
from outrider.rollout.ramp import GateResult

SEAL: Final = "sha256"
OPENS: Final = ("pass", "warn")
"""A preflight's warnings are for people to read; they shut nothing."""


def check_gates(gates: Gates, *, now: float) -> GateResult:
    """The gates as they are now.

    Args:
        gates: which are asked for.
        now: wall-clock seconds, for their age.
    """
    wanted = {
        name: path
        for name, path in (
            ("certificate", gates.certificate),
            ("preflight", gates.preflight),
            ("evaluation", gates.evaluation),
        )
        if path is not None
    }
    if not wanted:
        return GateResult(True, "no gate is asked for")
    created: list[float] = []
    for name, path in wanted.items():
        found = read_evidence(path)
        if isinstance(found, str):
            return GateResult(False, f"{name}: {found}")
        status, at = found
        if status not in OPENS:
            return GateResult(False, f"{name} {path.name} says {status}")
        if gates.fresh_s is not None and now - at > gates.fresh_s:
            return GateResult(False, f"{name} {path.name} is older than {gates.fresh_s:g} s")
        created.append(at)
    why = f"{', '.join(wanted)} pass"
    return GateResult(True, why, min(created), " ".join(str(path) for path in wanted.values()))


def read_evidence(path: Path) -> tuple[str, float] | str:
    """Status and time (wall-clock seconds) of a document, or in a line why there is none."""
    try:
        document = read_json(path)
        modified = path.stat().st_mtime
    except (RecordFileError, OSError) as fault:
        return str(fault) if path.exists() else f"{path} is missing"
    if "certificate" in document and not _sealed(document):
        return f"{path} was changed after it was sealed"
    status = document.get("verdict", document.get("status"))
    if not isinstance(status, str):
        return f"{path} holds no status"
    return status, _time(document.get("created"), modified)


def _sealed(document: Mapping[str, Any]) -> bool:
    """Does the seal of `outrider certify` hold: SHA-256 over all but itself, in canonical JSON?"""
    content = {key: value for key, value in document.items() if key != SEAL}
    text = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest() == document.get(SEAL)


def _time(created: object, modified: float) -> float:
    """When a document was made, by its own word, else by its file."""
    try:
        return datetime.fromisoformat(created).timestamp() if isinstance(created, str) else modified
    except ValueError:
        return modified
