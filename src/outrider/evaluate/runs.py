"""A run on disk: one line per sample, an index to ask it by, and a way to go on after a crash.

A run is a folder. `samples.jsonl` is the truth: a manifest, a line per sample, appended and never
changed. `index.sqlite` is made from it and may be deleted at any time. A sample without text is at
most `MOST_BYTES` long: per-step lists are dropped first, and the sample says so.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.backends.base import NO_COUNTERS, Answer, Ask, EngineInfo
from outrider.backends.settings import BASELINE
from outrider.errors import InvalidParameter
from outrider.evaluate.load import Shot
from outrider.evaluate.sets import Item
from outrider.records.files import BadLine, JsonlWriter, read_jsonl
from outrider.records.manifest import RunManifest

if TYPE_CHECKING:
    from pandas import DataFrame

SAMPLES, INDEX, PLAN = "samples.jsonl", "index.sqlite", "plan.json"
MOST_BYTES = 2048
INDEXED = (
    *("setting", "temperature", "load", "concurrency", "family", "id", "repeat", "error"),
    *("finish_reason", "ttft_ms", "tpot_ms", "e2e_ms", "prompt_tokens", "completion_tokens"),
    *("accepted", "drafted", "target_steps"),
)
# Dropped in this order where a sample is too long.
BULKY = ("per_step_drafted", "per_step_accepted", "arrivals_ms", "sampling", "told", "notes")


@dataclass(frozen=True)
class Where:
    """Which cell of a run a sample belongs to.

    Attributes:
        setting: how the engine guessed; "baseline" for plain decoding.
        temperature: of the run; an item's own wins and stands in the sample.
        load: name of the load.
        concurrency: requests in flight at most, for closed loops and bursts.
        kind: of the set.
    """

    setting: str
    temperature: float
    load: str
    concurrency: int
    kind: str = "workload"

    def key(self) -> tuple[str, float, str]:
        return (self.setting, self.temperature, self.load)


def sample(shot: Shot, item: Item, where: Where, info: EngineInfo, *, text: bool) -> dict[str, Any]:
    """The line of one sample; times in ms.

    Args:
        text: keep the prompt and the answer in it.
    """
    ask, answer = shot.job.ask, shot.answer
    line: dict[str, Any] = {
        "kind": "sample",
        "id": item.prompt.id,
        "family": item.prompt.family,
        "set_kind": where.kind,
        "repeat": shot.job.repeat,
        "setting": where.setting,
        "temperature": where.temperature,
        "load": where.load,
        "concurrency": where.concurrency,
        "engine": info.kind,
        "version": info.version,
        "model": answer.model or info.model,
        "sampling": _sampling(ask),
        "seed": ask.seed,
        "sent_ms": _ms(shot.sent_s),
        "late_ms": _ms(max(0.0, shot.sent_s - shot.due_s)),
        "in_flight": shot.in_flight,
        **_timings(answer),
        **_acceptance(answer, plain=where.setting == BASELINE),
        "finish_reason": answer.finish_reason,
        "error": None if answer.error is None else answer.error[:300],
        "status": answer.status,
        "output_sha256": _hash(answer),
        "notes": [n for n in answer.notes if where.setting != BASELINE or n != NO_COUNTERS],
    }
    line = {name: value for name, value in line.items() if value not in (None, [], {}, "")}
    for name in ("error", "ttft_ms", "tpot_ms", "completion_tokens", "accepted"):
        line.setdefault(name, None)
    line = _fit(line)
    if text:
        line["prompt"] = item.prompt.chat()
        line["text"] = answer.text
        if answer.tool_calls:
            line["tool_calls"] = [list(call) for call in answer.tool_calls]
    return line


def _sampling(ask: Ask) -> dict[str, Any]:
    names = (
        *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
        *("repetition_penalty", "max_tokens"),
    )
    found = {name: getattr(ask, name) for name in names if getattr(ask, name) is not None}
    for name in ("tools", "response_format", "stop"):
        if getattr(ask, name):
            found[name] = True
    return found


def _timings(answer: Answer) -> dict[str, Any]:
    gaps = sorted(answer.gaps_s)
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "ttft_ms": _ms(answer.ttft_s),
        "tpot_ms": _ms(answer.tpot_s),
        "e2e_ms": _ms(answer.end_s),
        "queue_ms": _ms(answer.queue_s),
        "chunks": len(answer.arrivals_s),
        "gap_p50_ms": _ms(gaps[len(gaps) // 2]) if gaps else None,
        "gap_max_ms": _ms(gaps[-1]) if gaps else None,
        "arrivals_ms": [round(at * 1000, 1) for at in answer.arrivals_s],
    }


def _acceptance(answer: Answer, *, plain: bool) -> dict[str, Any]:
    told, tokens = answer.acceptance, answer.completion_tokens
    if told is None and plain and tokens:  # an engine that does not guess has nothing to tell
        return {"acceptance_source": "plain", "accepted": 0, "drafted": 0, "target_steps": tokens}
    if told is None:
        return {}
    found: dict[str, Any] = {
        "acceptance_source": told.source,
        "accepted": told.accepted,
        "drafted": told.drafted,
        "draft_steps": None if told.counts_plain_steps else told.steps,
        "target_steps": None if not tokens else told.target_steps(tokens),
        "width": told.width,
        "accepted_by_position": _list(told.positions()),
        "rejected_by_position": _list(told.rejections()),
        "per_step_accepted": _list(told.per_step_accepted),
        "per_step_drafted": _list(told.per_step_drafted),
        "told": {k: round(v, 4) if isinstance(v, float) else v for k, v in told.told.items()},
    }
    if told.drafted_is_nominal:
        found["drafted_is_nominal"] = True
    return found


def _list(values: Sequence[int] | None) -> list[int] | None:
    return None if values is None else list(values)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def _hash(answer: Answer) -> str | None:
    """Of the output, so that two runs can be compared without their texts."""
    if answer.error is not None or not (answer.text or answer.tool_calls or answer.reasoning):
        return None
    whole = json.dumps([answer.text, answer.reasoning, answer.tool_calls])
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def _fit(line: dict[str, Any]) -> dict[str, Any]:
    """The line at most `MOST_BYTES` long."""
    dropped = []
    for name in BULKY:
        if len(json.dumps(line, ensure_ascii=False).encode()) <= MOST_BYTES - 80:
            break
        if name in line:
            dropped.append(name)
            del line[name]
            line["dropped"] = dropped
    return line


class RunWriter:
    """Writes a run; make one with `create` or `resume`. A context manager: leaving it closes the
    file without an end, so that a run cut off counts as unfinished."""

    def __init__(
        self, folder: Path, lines: JsonlWriter, earlier: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """
        Args:
            earlier: what the file holds already.
        """
        self.folder = folder
        self.earlier = tuple(earlier)
        self._lines = lines
        self._done = {
            _key(line) for line in earlier if line.get("kind") == "sample" and not line.get("error")
        }

    @classmethod
    def create(cls, folder: Path, manifest: RunManifest) -> RunWriter:
        """Begin a run in a new folder.

        Raises:
            RecordFileError: there is a run already, or it cannot be written.
        """
        return cls(folder, JsonlWriter.create(folder / SAMPLES, manifest))

    @classmethod
    def resume(cls, folder: Path) -> RunWriter:
        """Go on with a run; a half-written last line is cut off. Failed samples count as not done.

        Raises:
            RecordFileError: there is no run.
        """
        found = read_jsonl(folder / SAMPLES)
        return cls(folder, JsonlWriter.resume(folder / SAMPLES), found.records)

    @property
    def manifest(self) -> RunManifest:
        return self._lines.manifest

    def has(self, where: Where, id: str, repeat: int) -> bool:
        """Is this sample there already?"""
        return (*where.key(), id, repeat) in self._done

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line.

        Raises:
            RecordFileError: the disk is full or fails.
        """
        self._lines.write(line)
        if line.get("kind") == "sample":
            self._done.add(_key(line))

    def finish(self) -> RunManifest:
        """The run is whole."""
        return self._lines.finish()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()


def _key(line: Mapping[str, Any]) -> tuple[Any, ...]:
    return (
        *(line.get("setting"), line.get("temperature"), line.get("load")),
        *(line.get("id"), line.get("repeat")),
    )


@dataclass(frozen=True)
class Run:
    """A run as read back.

    Attributes:
        folder: where it lies.
        manifest: how it was made; `finished` is `None` for a run that was cut off.
        samples: one per request; of a sample that was tried again, the last one.
        cells: what was found around each turn of a cell: wall time, counters, why it was cut short;
            a turn that was cut off has none.
        bad_lines, torn: what could not be read.
    """

    folder: Path
    manifest: RunManifest
    samples: tuple[Mapping[str, Any], ...]
    cells: tuple[Mapping[str, Any], ...]
    bad_lines: tuple[BadLine, ...] = ()
    torn: bool = False

    @classmethod
    def load(cls, path: str | Path) -> Run:
        """Read a run's folder, or its `samples.jsonl`.

        Raises:
            RecordFileError: there is none, or its first line is no manifest.
        """
        folder = Path(path)
        if folder.name == SAMPLES:
            folder = folder.parent
        found = read_jsonl(folder / SAMPLES)
        latest: dict[tuple[Any, ...], Mapping[str, Any]] = {}
        cells: list[Mapping[str, Any]] = []
        for line in found.records:
            if line.get("kind") == "sample":
                latest[_key(line)] = line
            elif line.get("kind") == "cell":
                cells.append(line)
        return cls(
            folder=folder,
            manifest=found.manifest,
            samples=tuple(latest.values()),
            cells=tuple(cells),
            bad_lines=found.bad_lines,
            torn=found.torn,
        )

    @property
    def finished(self) -> bool:
        return self.manifest.finished is not None

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def faults(self) -> list[str]:
        """What is wrong with the record itself, for people."""
        found = [f"line {bad.number} cannot be read: {bad.reason}" for bad in self.bad_lines]
        if self.torn:
            found.append("the last line is half-written: the run was cut off while it wrote")
        if not self.finished:
            found.append("PARTIAL: the run did not come to its end; resume it to complete it")
        return found

    def to_dicts(self) -> list[dict[str, Any]]:
        return [dict(line) for line in self.samples]

    def to_frame(self) -> DataFrame:
        """A pandas DataFrame, one row per sample.

        Raises:
            InvalidParameter: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise InvalidParameter(
                "pandas is not installed; install it, or use Run.to_dicts()"
            ) from None
        return pandas.DataFrame(self.to_dicts())

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Ask the index; its table is `samples`, its columns are `INDEXED`. Read only.

        Raises:
            InvalidParameter: SQLite refuses the question.
        """
        path = self.index()
        try:
            with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
                return list(connection.execute(sql))
        except sqlite3.Error as fault:
            raise InvalidParameter(f"the index refuses {sql!r}: {fault}") from None

    def index(self) -> Path:
        """Make the index anew where it is older than the samples."""
        path, source = self.folder / INDEX, self.folder / SAMPLES
        if path.exists() and path.stat().st_mtime_ns >= source.stat().st_mtime_ns:
            return path
        path.unlink(missing_ok=True)
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(f"CREATE TABLE samples ({', '.join(INDEXED)})")
            marks = ", ".join("?" * len(INDEXED))
            rows = [tuple(line.get(name) for name in INDEXED) for line in self.samples]
            connection.executemany(f"INSERT INTO samples VALUES ({marks})", rows)
            connection.execute("CREATE INDEX by_cell ON samples (setting, temperature, load, id)")
        return path
