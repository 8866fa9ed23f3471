"""Hidden states of the target: cached in memory-mapped shards while it writes its answers, or
computed again from its tokens whenever they are wanted.

`FeatureStore` is a folder: shards of raw bf16 rows [R, F, D] and an index with one JSON line per
sample, written after the rows, so that a run that was cut off loses at most the sample under way.
`Recorder` is a drafter that guesses nothing and keeps the features that its sequences commit: the
engine computes them anyway, so caching them costs no further pass.

Shapes: R rows (tokens of a sample but its last), F features, D width.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.core.tree import DraftTree
from outrider.drafters.base import Commit, Needs, NodeBudget, SequenceView
from outrider.errors import InvalidParameter
from outrider.models.target import Segment, Target

SHARD_ROWS = 1 << 18


class Features(Protocol):
    """Where features of samples come from."""

    @property
    def features(self) -> tuple[int, ...]:
        """Which hidden states, as `HeadConfig.features`."""
        ...

    @property
    def rows(self) -> int:
        """Rows of all samples that were added."""
        ...

    def __contains__(self, sample: str) -> bool: ...

    def add(self, sample: str, rows_RFD: Tensor) -> None:
        """Keep the features of a sample."""
        ...

    def prefetch(self, samples: Mapping[str, Sequence[int]]) -> None:
        """These samples (ids and tokens) are wanted next, together."""
        ...

    def get(self, sample: str) -> Tensor:
        """[R, F, D] in bf16."""
        ...


@dataclass(frozen=True)
class _Place:
    shard: int
    start: int
    rows: int


class FeatureStore:
    """Features by sample id.

    Attributes:
        folder: where they lie.
        features: which hidden states, as `HeadConfig.features`.
        width: D.
    """

    def __init__(self, folder: Path, *, features: tuple[int, ...], width: int) -> None:
        self.folder = folder
        self.features = features
        self.width = width
        folder.mkdir(parents=True, exist_ok=True)
        self._index = folder / "index.jsonl"
        self._check_header()
        self._places: dict[str, _Place] = {}
        self._maps: dict[int, np.memmap[tuple[int, ...], np.dtype[np.uint8]]] = {}
        self._torn = False
        self._load()

    @property
    def row_bytes(self) -> int:
        return len(self.features) * self.width * 2

    def _check_header(self) -> None:
        header = {"features": list(self.features), "width": self.width}
        path = self.folder / "features.json"
        if not path.exists():
            path.write_text(json.dumps(header))
            return
        text = path.read_text()
        try:
            same = json.loads(text) == header
        except ValueError:
            same = False
        if not same:
            raise InvalidParameter(
                f"{self.folder} holds other features ({text.strip()}); use another folder"
            )

    def _load(self) -> None:
        if self._index.exists():
            text = self._index.read_text("utf-8")
            whole = text[: text.rfind("\n") + 1]
            # mended when a sample is added: reading changes nothing
            self._torn = whole != text
            for number, line in enumerate(whole.splitlines(), 1):
                try:
                    entry = json.loads(line)
                    place = _Place(entry["shard"], entry["start"], entry["rows"])
                except (ValueError, KeyError, TypeError):
                    raise InvalidParameter(
                        f"{self._index}, line {number} is damaged; remove it"
                    ) from None
                self._places[entry["id"]] = place
        self._drop_lost()
        places = self._places.values()
        self._shard = max((p.shard for p in places), default=0)
        ends = [p.start + p.rows for p in places if p.shard == self._shard]
        self._rows = max(ends, default=0)

    def _drop_lost(self) -> None:
        """Forget samples whose rows are not in the files (a machine that lost power)."""
        held = {
            shard: path.stat().st_size if path.exists() else 0
            for shard in {place.shard for place in self._places.values()}
            for path in (self._shard_path(shard),)
        }
        self._places = {
            sample: place
            for sample, place in self._places.items()
            if (place.start + place.rows) * self.row_bytes <= held[place.shard]
        }

    def __contains__(self, sample: str) -> bool:
        return sample in self._places

    def __len__(self) -> int:
        return len(self._places)

    @property
    def rows(self) -> int:
        """Rows of all samples together."""
        return sum(place.rows for place in self._places.values())

    def add(self, sample: str, rows_RFD: Tensor) -> None:
        """Keep the features of a sample."""
        if rows_RFD.shape[1:] != (len(self.features), self.width):
            raise InvalidParameter(f"features of shape {list(rows_RFD.shape)} do not fit the store")
        if self._torn:
            cut_last_line(self._index)
            self._torn = False
        if self._rows >= SHARD_ROWS:
            self._shard, self._rows = self._shard + 1, 0
        path = self._shard_path(self._shard)
        raw = rows_RFD.bfloat16().contiguous().cpu().view(torch.int16).numpy().tobytes()
        with path.open("r+b" if path.exists() else "w+b") as file:
            file.seek(self._rows * self.row_bytes)
            file.write(raw)
        place = _Place(self._shard, self._rows, len(rows_RFD))
        with self._index.open("a", encoding="utf-8") as index:
            index.write(json.dumps({"id": sample, **vars(place)}) + "\n")
        self._places[sample] = place
        self._rows += len(rows_RFD)

    def prefetch(self, samples: Mapping[str, Sequence[int]]) -> None:
        """Nothing to do: the files are mapped."""

    def get(self, sample: str) -> Tensor:
        """[R, F, D] in bf16, from the mapping."""
        place = self._places[sample]
        begin, end = place.start * self.row_bytes, (place.start + place.rows) * self.row_bytes
        found = self._maps.get(place.shard)
        if found is None or end > found.nbytes:
            found = np.memmap(self._shard_path(place.shard), dtype=np.uint8, mode="r")
            self._maps[place.shard] = found
        # bytes behind the last whole row may be left of a write that was cut off
        rows = torch.from_numpy(np.array(found[begin:end])).view(torch.bfloat16)
        return rows.view(place.rows, len(self.features), self.width)

    def _shard_path(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:04d}.bf16"


class OnlineFeatures:
    """Features computed by the frozen target when they are wanted; nothing is kept on disk.

    A pass of the target for every batch of every epoch: for disks that cannot hold the features.
    """

    def __init__(self, target: Target, features: tuple[int, ...]) -> None:
        self.features = features
        self._target = target
        self._tokens: dict[str, Sequence[int]] = {}
        self._ready: dict[str, Tensor] = {}

    @property
    def rows(self) -> int:
        return sum(len(tokens) - 1 for tokens in self._tokens.values())

    def __contains__(self, sample: str) -> bool:
        return True

    def note(self, sample: str, tokens: Sequence[int]) -> None:
        """Know a sample's tokens."""
        self._tokens[sample] = tokens

    def add(self, sample: str, rows_RFD: Tensor) -> None:
        """Nothing is kept."""

    def prefetch(self, samples: Mapping[str, Sequence[int]]) -> None:
        found = compute_features(self._target, list(samples.values()), self.features)
        rows = [rows.bfloat16().cpu() for rows in found]
        self._ready = dict(zip(samples, rows, strict=True))

    def get(self, sample: str) -> Tensor:
        if sample not in self._ready:
            self.prefetch({sample: self._tokens[sample]})
        return self._ready[sample]


def cut_last_line(path: Path) -> None:
    """Cut off a last line without its end, so that appending is safe. Changes the file."""
    with path.open("rb+") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)


def feature_bytes(rows: int, *, features: int, width: int) -> int:
    """Bytes of so many rows on disk."""
    return rows * features * width * 2


class Recorder:
    """A drafter that guesses nothing and remembers the features of its sequences."""

    name = "recorder"

    def __init__(self, features: tuple[int, ...]) -> None:
        self.needs = Needs(layers=features)
        self._rows: dict[int, list[Tensor]] = {}
        self._done: dict[tuple[int, ...], Tensor] = {}
        self._tokens: dict[int, list[int]] = {}

    def observe(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            self._tokens.setdefault(commit.sequence, []).extend(commit.tokens)
            if commit.features is not None:
                rows = commit.features.bfloat16()
                self._rows.setdefault(commit.sequence, []).append(rows)

    def propose(
        self, views: Sequence[SequenceView], budgets: Sequence[NodeBudget]
    ) -> list[DraftTree]:
        return [DraftTree.root_only(view.root) for view in views]

    def forget(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            tokens, rows = self._tokens.pop(sequence, []), self._rows.pop(sequence, [])
            if rows:
                self._done[tuple(tokens)] = torch.cat(rows)

    def take(self, tokens: tuple[int, ...]) -> Tensor:
        """The features [R, F, D] of a finished sequence; handed out once."""
        return self._done.pop(tokens)


@torch.no_grad()
def compute_features(
    target: Target, sequences: Sequence[Sequence[int]], features: tuple[int, ...]
) -> list[Tensor]:
    """[R, F, D] for each sequence in one pass, R its tokens but the last."""
    longest = max(map(len, sequences))
    cache = target.new_cache(slots=len(sequences), length=longest + 1)
    segments = [Segment(slot, tuple(tokens[:-1])) for slot, tokens in enumerate(sequences)]
    found = target.forward(segments, cache, features=features).features
    assert found is not None  # features were asked for
    return list(found)
