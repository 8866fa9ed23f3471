"""Record files: JSON lines that survive a crash, and JSON documents that are whole or absent.

A line file begins with ``{"manifest": ...}``; a record per line follows; a finished run closes it
with ``{"manifest_end": ...}``, the same manifest with the load and time of the end. Lines are only
ever appended, each with one write, so a crash can spoil the last line at most: reading reports it,
and resuming cuts it off. This module knows JSON and files, not what a record means.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import uuid4

from outrider.errors import OutriderError
from outrider.records.manifest import RunManifest

_TAIL_BLOCK = 1 << 16


class RecordFileError(OutriderError):
    """A record file cannot be written, or is not one."""

    exit_code = 3


@dataclass(frozen=True)
class BadLine:
    """A line that is no record: its number (1-based) and why."""

    number: int
    reason: str


@dataclass(frozen=True)
class RecordFile:
    """What a line file holds.

    Attributes:
        manifest: of the run; its end is filled in if the run finished.
        records: the record lines, in order.
        bad_lines: lines inside the file that could not be read.
        torn: the last line is half-written: the run was cut off while it wrote.
    """

    manifest: RunManifest
    records: tuple[dict[str, Any], ...]
    bad_lines: tuple[BadLine, ...] = ()
    torn: bool = False

    @property
    def finished(self) -> bool:
        return self.manifest.finished is not None


class JsonlWriter:
    """Appends records to a line file. Make one with `create` or `resume`; a context manager.

    Every `write` reaches the operating system before it returns; `close` also waits for the disk.
    One writer per file.
    """

    def __init__(self, path: Path, manifest: RunManifest, descriptor: int) -> None:
        self.path = path
        self.manifest = manifest
        self._descriptor = descriptor
        self._closed = False

    @classmethod
    def create(cls, path: str | os.PathLike[str], manifest: RunManifest) -> JsonlWriter:
        """Begin a new file with its manifest; folders on the way are made.

        Raises:
            RecordFileError: the file exists already, or cannot be written.
        """
        target = Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o644)
        except OSError as fault:
            raise _cannot_write(target, fault) from fault
        writer = cls(target, manifest, descriptor)
        try:
            writer.write({"manifest": manifest.to_dict()})
        except BaseException:
            writer._abandon()
            raise
        return writer

    @classmethod
    def resume(cls, path: str | os.PathLike[str]) -> JsonlWriter:
        """Go on with an existing file, after cutting off a half-written last line.

        Raises:
            RecordFileError: there is no such file, it is no record file, or cannot be written.
        """
        target = Path(path)
        manifest = read_jsonl(target).manifest
        try:
            descriptor = os.open(target, os.O_RDWR | os.O_APPEND)
            os.ftruncate(descriptor, _whole_lines(descriptor))
        except OSError as fault:
            raise _cannot_write(target, fault) from fault
        return cls(target, manifest, descriptor)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record. If that fails, the file is as it was before.

        Raises:
            RecordFileError: the disk is full or fails, the writer is closed, or the record is not
                JSON (NaN is not).
        """
        if self._closed:
            raise RecordFileError(f"{self.path}: the writer is closed; resume the file to go on")
        data = (_encode(record, self.path, indent=None) + "\n").encode()
        before = os.fstat(self._descriptor).st_size
        try:
            _write_all(self._descriptor, data)
        except OSError as fault:
            with suppress(OSError):
                os.ftruncate(self._descriptor, before)
            raise _cannot_write(self.path, fault) from fault

    def finish(self) -> RunManifest:
        """Write the end of the run (time and load), close, and give the completed manifest."""
        ended = self.manifest.finish()
        self.write({"manifest_end": ended.to_dict()})
        self.close()
        return ended

    def close(self) -> None:
        """Wait for the disk and close; without `finish` the run counts as unfinished."""
        if self._closed:
            return
        self._closed = True
        try:
            os.fsync(self._descriptor)
        except OSError as fault:
            raise _cannot_write(self.path, fault) from fault
        finally:
            os.close(self._descriptor)

    def _abandon(self) -> None:
        self._closed = True
        os.close(self._descriptor)
        with suppress(OSError):
            self.path.unlink()

    def __enter__(self) -> JsonlWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_jsonl(path: str | os.PathLike[str]) -> RecordFile:
    """Read a line file, keeping every line that can be read and naming those that cannot.

    Raises:
        RecordFileError: the file is missing or its first line is no manifest.
        InvalidRecord: the manifest is malformed or of a newer schema.
    """
    source = Path(path)
    try:
        data = source.read_bytes()
    except OSError as fault:
        raise RecordFileError(f"{source} cannot be read: {fault.strerror}") from fault
    lines = data.split(b"\n")
    # Every whole line ends in a newline, so what follows the last one is a half-written line.
    torn = bool(lines.pop())
    first = _decode(lines[0]) if lines else "the file is empty"
    if isinstance(first, str) or not isinstance(first.get("manifest"), dict):
        raise RecordFileError(
            f'{source} is not a record file: line 1 must be {{"manifest": ...}}; it may have been '
            "cut off before its first line was written"
        )
    started = manifest = RunManifest.from_dict(first["manifest"])
    records: list[dict[str, Any]] = []
    bad: list[BadLine] = []
    for number, line in enumerate(lines[1:], start=2):
        record = _decode(line)
        if isinstance(record, str):
            bad.append(BadLine(number, record))
        elif set(record) == {"manifest_end"}:
            manifest = RunManifest.from_dict(record["manifest_end"])
        else:
            manifest = started  # a run that was resumed after its end has not ended yet
            records.append(record)
    return RecordFile(manifest, tuple(records), tuple(bad), torn)


def write_json(path: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """Write a JSON document so that readers see the old one or the new one, never a part.

    Raises:
        RecordFileError: the disk is full or fails, or the document is not JSON (NaN is not).
    """
    target = Path(path)
    data = (_encode(document, target, indent=2) + "\n").encode()
    temporary = target.with_name(f".{target.name}.{uuid4().hex}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        try:
            _write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, target)
    except OSError as fault:
        raise _cannot_write(target, fault) from fault
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a JSON document.

    Raises:
        RecordFileError: it is missing, or is not a JSON object.
    """
    source = Path(path)
    try:
        record = _decode(source.read_bytes())
    except OSError as fault:
        raise RecordFileError(f"{source} cannot be read: {fault.strerror}") from fault
    if isinstance(record, str):
        raise RecordFileError(f"{source} is not a JSON document: {record}")
    return record


def _decode(line: bytes) -> dict[str, Any] | str:
    """The object on a line, or the reason why there is none."""
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return "not UTF-8"
    except RecursionError:
        return "nested too deeply"
    except ValueError as fault:
        return f"not JSON: {fault}"
    return value if isinstance(value, dict) else f"a JSON {type(value).__name__}, not an object"


def _encode(record: Mapping[str, Any], path: Path, *, indent: int | None) -> str:
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False, indent=indent)
    except (TypeError, ValueError) as fault:
        raise RecordFileError(
            f"{path}: a record is not JSON: {fault}; nothing was written"
        ) from None


def _write_all(descriptor: int, data: bytes) -> None:
    """One write normally; the system may take less at once, near a full disk above all."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _whole_lines(descriptor: int) -> int:
    """The size of the file up to and with its last newline."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - _TAIL_BLOCK)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _cannot_write(path: Path, fault: OSError) -> RecordFileError:
    if fault.errno == errno.ENOSPC:
        return RecordFileError(f"{path}: the disk is full; free some space and resume")
    if fault.errno == errno.EDQUOT:
        return RecordFileError(f"{path}: the disk quota is used up; free some space and resume")
    if fault.errno == errno.EEXIST:
        return RecordFileError(f"{path} exists already; resume it, or choose another name")
    return RecordFileError(f"{path} cannot be written: {fault.strerror}")
