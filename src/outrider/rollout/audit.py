"""What was changed, by whom and why, and the state that survives a restart. Files only.

The log is one JSON object per line, append-only, each line with the hash of the line before: a line
that was changed or taken out later shows. The state is one document, replaced whole. A disk that is
full never stops a rollback: the caller acts first and writes afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.rollout.ramp import Change, RolloutState


@dataclass(frozen=True)
class AuditLog:
    """What a log holds: entries in order, and the first fault in its chain, if any."""

    entries: tuple[dict[str, Any], ...]
    fault: str | None = None


class Ledger:
    """State and audit log of a rollout, in one folder: ``state.json`` and ``audit.jsonl``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self) -> RolloutState:
        """The persisted state; an empty one where there is none.

        Raises:
            RecordFileError: the file is damaged. The rollout must not start as if nothing had
                been: a latch may be in it.
        """
        raise NotImplementedError

    def save(self, state: RolloutState, changes: tuple[Change, ...] = ()) -> None:
        """Persist a state, then the changes that led to it. What fails is kept and tried again with
        the next call, in order.

        Raises:
            RecordFileError: the disk is full or fails.
        """
        raise NotImplementedError

    def history(self) -> AuditLog:
        """The log; a half-written last line is left out."""
        raise NotImplementedError


def evidence_id(details: object) -> str:
    """A short name for a piece of evidence: a hash of its JSON."""
    raise NotImplementedError
