"""The transactional cache against a list of rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import InvalidParameter
from outrider.models.cache import CacheShape, KVCache

SHAPE = CacheShape(layers=2, kv_heads=3, head_dim=2, dtype=torch.float32)
SLOTS, LENGTH = 2, 9


def write(cache: KVCache, slot: int, start: int, rows: list[int]) -> None:
    """Every number of a row says which row, layer, head and half it is."""
    for i, row in enumerate(rows):
        for layer in range(2):
            for head in range(3):
                mark = row * 10 + layer * 4 + head
                cache.keys[layer, slot, head, start + i] = mark
                cache.values[layer, slot, head, start + i] = -mark - 1


def read(cache: KVCache, slot: int) -> list[int]:
    """The rows that are committed, or an error where a row is torn."""
    found = []
    for position in range(cache.lengths[slot]):
        row = int(cache.keys[0, slot, 0, position, 0]) // 10
        found.append(row)
        expected = KVCache(SHAPE, slots=1, length=1)
        write(expected, 0, 0, [row])
        for name in ("keys", "values"):
            held = vars(cache)[name][:, slot, :, position]
            assert torch.equal(held, vars(expected)[name][:, 0, :, 0])
    return found


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_it_behaves_like_a_list_of_rows(data: st.DataObject) -> None:
    cache = KVCache(SHAPE, slots=SLOTS, length=LENGTH)
    model: list[list[int]] = [[] for _ in range(SLOTS)]
    fresh = iter(range(1000))
    for _ in range(data.draw(st.integers(1, 8))):
        slot = data.draw(st.integers(0, SLOTS - 1))
        if data.draw(st.booleans()):
            room = LENGTH - len(model[slot])
            rows = [next(fresh) for _ in range(data.draw(st.integers(0, room)))]
            assert cache.stage(slot, len(rows)) == len(model[slot])
            write(cache, slot, len(model[slot]), rows)
            kept = [i for i in range(len(rows)) if data.draw(st.booleans())]
            cache.keep(slot, kept)
            model[slot] += [rows[i] for i in kept]
        else:
            length = data.draw(st.integers(0, len(model[slot])))
            cache.truncate(slot, length)
            del model[slot][length:]
        cache.check_integrity()
        assert [read(cache, s) for s in range(SLOTS)] == model


def test_staging_twice_or_too_much_is_refused_and_changes_nothing() -> None:
    cache = KVCache(SHAPE, slots=1, length=4)
    with pytest.raises(InvalidParameter, match="cannot add 5 rows to 0; the cache holds 4"):
        cache.stage(0, 5)
    with pytest.raises(InvalidParameter, match="cannot add -1 rows"):
        cache.stage(0, -1)
    cache.stage(0, 3)
    with pytest.raises(InvalidParameter, match="slot 0 has 3 staged rows"):
        cache.stage(0, 1)
    with pytest.raises(AssertionError, match="staged 3"):
        cache.check_integrity()
    with pytest.raises(InvalidParameter, match="3 staged"):
        cache.truncate(0, 0)
    assert (cache.lengths, cache.staged) == ([0], [3])


@pytest.mark.parametrize("rows", [[3], [1, 0], [1, 1], [-1], [-1, 0]], ids=str)
def test_only_staged_rows_in_order_are_kept(rows: list[int]) -> None:
    cache = KVCache(SHAPE, slots=1, length=6)
    cache.stage(0, 2)
    cache.keep(0, [0, 1])
    cache.stage(0, 3)
    with pytest.raises(InvalidParameter, match="cannot keep rows"):
        cache.keep(0, rows)
    assert (cache.lengths, cache.staged) == ([2], [3])


def test_truncating_beyond_the_committed_rows_is_refused() -> None:
    cache = KVCache(SHAPE, slots=1, length=6)
    for length in (1, -1):
        with pytest.raises(InvalidParameter, match=f"cannot cut slot 0 to {length}"):
            cache.truncate(0, length)


def test_integrity_sees_a_length_beyond_the_capacity() -> None:
    cache = KVCache(SHAPE, slots=2, length=3)
    cache.lengths[1] = 4
    with pytest.raises(AssertionError, match="slot 1"):
        cache.check_integrity()


def test_bytes_are_those_of_the_tensors() -> None:
    shape = CacheShape(layers=3, kv_heads=2, head_dim=8, dtype=torch.bfloat16)
    cache = KVCache(shape, slots=2, length=5)
    assert shape.nbytes(2, 5) == cache.keys.nbytes + cache.values.nbytes
    assert cache.slots == 2
