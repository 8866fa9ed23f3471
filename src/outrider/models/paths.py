"""Where Outrider keeps what it can make again: converted models, measured costs, file hashes.

Also the two safe ways to write there: whole files and whole folders, each complete or absent.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.errors import ModelError


def cache_folder() -> Path:
    """``$OUTRIDER_CACHE``, else ``outrider`` in the user's cache folder. It may not exist yet."""
    chosen = os.environ.get("OUTRIDER_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "outrider"


@contextmanager
def complete_folder(final: Path) -> Iterator[Path]:
    """A temporary folder beside ``final`` that becomes it when the block ends well.

    On any error nothing stays behind. If somebody else made ``final`` meanwhile, theirs is kept:
    equal content is what its name stands for.

    Raises:
        ModelError: the disk is full, or the folder cannot be written.
    """
    with writing(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=final.parent))
    try:
        with writing(final):
            yield temporary
            if not final.exists():
                _rename(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _rename(temporary: Path, final: Path) -> None:
    try:
        temporary.rename(final)
    except OSError:
        if not final.exists():
            raise


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Turn an operating system error into one line that names the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(place) from None
        raise ModelError(
            f"cannot write {place}: {error.strerror or error}; set OUTRIDER_CACHE to another folder"
        ) from None


def disk_full(place: Path) -> ModelError:
    """The error for a full disk."""
    return ModelError(
        f"no space left for {place}; free some, or set OUTRIDER_CACHE to a folder on another disk"
    )


def file_hash(path: Path) -> str:
    """The SHA-256 of a file's content, in hex.

    Remembered in the cache folder by path, size and modification time (in nanoseconds), so that a
    large file is read once. Where the cache cannot be written it is computed every time.
    """
    path = path.resolve()
    stat = path.stat()
    known = {"path": str(path), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    name = hashlib.sha256(str(path).encode()).hexdigest()[:32]
    entry = cache_folder() / "hashes" / f"{name}.json"
    try:
        remembered = json.loads(entry.read_text())
        if {key: remembered[key] for key in known} == known:
            return str(remembered["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # nothing usable is remembered; compute it
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    _remember(entry, {**known, "sha256": digest})
    return digest


def _remember(entry: Path, content: dict[str, object]) -> None:
    """Write a small JSON file whole; a memo that cannot be written is only slower."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=entry.parent, delete=False) as file:
            json.dump(content, file)
        os.replace(file.name, entry)
    except OSError:
        pass
