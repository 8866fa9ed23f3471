"""What was changed, by whom and why, and the state that survives a restart. Files only.

The log is one JSON object per line, append-only, each line with the hash of the line before: a line
that was changed or taken out later shows. The state is one document, replaced whole. A disk that is
full never stops a rollback: the caller acts first and writes afterwards.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from outrider.errors import InvalidParameter
from outrider.records.files import RecordFileError, read_json, write_json
from outrider.rollout.ramp import Change, RolloutState

STATE: Final = "state.json"
LOG: Final = "audit.jsonl"
FIRST: Final = "0" * 64
"""Stands where the first line has no line before it."""

_MOST_PENDING = 1000


@dataclass(frozen=True)
class AuditLog:
    """What a log holds: entries in order, and the first fault in its chain, if any."""

    entries: tuple[dict[str, Any], ...]
    fault: str | None = None


class Ledger:
    """State and audit log of a rollout, in one folder: ``state.json`` and ``audit.jsonl``.

    One writer at a time. Readers need no lock.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pending: list[Change] = []

    @property
    def unwritten(self) -> int:
        """Changes that wait for the disk."""
        return len(self._pending)

    def load(self) -> RolloutState:
        """The persisted state; an empty one where there is none.

        Raises:
            RecordFileError: the file is damaged. The rollout must not start as if nothing had
                been: a latch may be in it.
        """
        path = self.folder / STATE
        if not path.exists():
            if (self.folder / LOG).exists():
                raise RecordFileError(
                    f"{path} is gone but {LOG} is there; put it back, or move both away"
                )
            return RolloutState()
        try:
            return RolloutState.from_dict(read_json(path))
        except InvalidParameter as fault:
            raise RecordFileError(f"{path}: {fault}; see {LOG} for what was in force") from None

    def save(self, state: RolloutState, changes: tuple[Change, ...] = ()) -> None:
        """Persist a state, then the changes that led to it. What fails is kept and tried again with
        the next call, in order.

        The state goes first: a latch that is not in the log is better than one that is lost.

        Raises:
            RecordFileError: the disk is full or fails.
        """
        self._pending += changes
        del self._pending[:-_MOST_PENDING]
        write_json(self.folder / STATE, state.to_dict())
        if self._pending:
            self._append(self._pending)
            self._pending = []

    def history(self) -> AuditLog:
        """The log; a half-written last line is left out.

        Raises:
            RecordFileError: it cannot be read.
        """
        path = self.folder / LOG
        try:
            lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        except OSError as fault:
            raise RecordFileError(f"{path} cannot be read: {fault.strerror}") from fault
        entries: list[dict[str, Any]] = []
        fault_found: str | None = None
        before = FIRST
        for number, line in enumerate(lines, start=1):
            try:
                entry = json.loads(line)
                chained = entry["previous"] == before
            except (ValueError, KeyError, TypeError):
                entry, chained = None, False
            if not chained and fault_found is None:
                fault_found = f"line {number} does not follow from the line before it"
            if entry is not None:
                entries.append(entry)
            before = _hash(line)
        return AuditLog(tuple(entries), fault_found)

    def _append(self, changes: list[Change]) -> None:
        """Write whole lines behind the last whole line, or nothing."""
        path = self.folder / LOG
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o644)
            try:
                held = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
                whole = held.rfind(b"\n") + 1
                os.ftruncate(descriptor, whole)
                lines = held[:whole].split(b"\n")
                before = _hash(lines[-2]) if whole else FIRST
                _write(descriptor, _lines(changes, before), whole)
            finally:
                os.close(descriptor)
        except OSError as fault:
            raise RecordFileError(f"{path} cannot be written: {fault.strerror}") from fault


def _lines(changes: list[Change], before: str) -> bytes:
    """The changes as chained lines."""
    lines = []
    for change in changes:
        entry = {**change.to_dict(), "previous": before}
        line = json.dumps(entry, ensure_ascii=False, allow_nan=False).encode()
        before = _hash(line)
        lines.append(line + b"\n")
    return b"".join(lines)


def _write(descriptor: int, data: bytes, before: int) -> None:
    """All of it, or the file as it was."""
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, before)
        raise


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
