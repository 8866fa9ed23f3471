"""Measures what a step costs on this machine, once, and remembers it.

The figures are kept in a small JSON file keyed by machine, model, dtype and thread count, so that
only the first start pays for the measurement (well under two seconds for a 135M model).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from outrider.core.tree import NO_PARENT, DraftTree
from outrider.engine.budget import CostTable
from outrider.models.cache import KVCache
from outrider.models.target import Segment, Target

ROWS = (1, 2, 4, 8, 16, 32)
MANY_ROWS = (*ROWS, 64)  # for engines whose batches get there without a guess
CONTEXT = 128  # committed rows while measuring
REPEATS = 7


def measure(
    target: Target,
    cache: KVCache,
    *,
    slot: int,
    rows: Sequence[int] = ROWS,
    repeats: int = REPEATS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, float]:
    """Milliseconds of a pass by number of rows: the best of several, the sizes interleaved.

    The best, because other work on the machine only ever adds time.

    Uses ``slot``, which must be free, and leaves it empty.
    """
    most = min(cache.capacity, target.context_length) - max(rows)
    context = max(1, min(CONTEXT, target.context_length // 2, most))
    token = 1 % target.vocab_size
    target.forward([Segment(slot, (token,) * context)], cache)
    cache.keep(slot, range(context))
    times: dict[int, list[float]] = {n: [] for n in rows}
    for repeat in range(repeats + 1):
        for n in rows:
            tree = DraftTree((token,) * n, tuple(range(NO_PARENT, n - 1)))
            begin = clock()
            target.forward([Segment(slot, (), tree)], cache)
            if repeat:  # the first round warms up
                times[n].append((clock() - begin) * 1000)
            cache.keep(slot, ())
    cache.truncate(slot, 0)
    return {n: min(t) for n, t in times.items()}


def cached_costs(target: Target, cache: KVCache, *, slot: int, folder: Path) -> CostTable:
    """The cost table from ``folder``, measured first where it is not there yet.

    Engines with many slots get figures for larger batches as well.
    """
    most = min(cache.capacity, target.context_length)
    rows = [n for n in (ROWS if cache.slots < 8 else MANY_ROWS) if n < most] or [1]
    path = folder / f"{_key(target, cache)}.json"
    try:
        stored = {int(n): float(ms) for n, ms in json.loads(path.read_text())["verify_ms"].items()}
        if set(stored) >= set(rows):
            return CostTable(stored)
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        pass  # absent or damaged: measure again
    table = CostTable(measure(target, cache, slot=slot, rows=rows))
    _store(path, table)
    return table


def _key(target: Target, cache: KVCache) -> str:
    parts = (
        platform.node(),
        platform.machine(),
        str(os.cpu_count()),
        str(torch.get_num_threads()),
        str(cache.shape.dtype),
        str(cache.keys.device),
        torch.__version__,
        target.fingerprint,
    )
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:24]


def _store(path: Path, table: CostTable) -> None:
    """Write atomically. A cache that cannot be written only costs the next start its time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({"verify_ms": dict(table.verify_ms)}, file)
        os.replace(file.name, path)
    except OSError:
        return
