"""What every streamed token passes through: waits, events, tallies."""

from __future__ import annotations

import asyncio
import json

from outrider.core.sampling import SamplingParams
from outrider.engine import Update
from outrider.engine.engine import Load
from outrider.serve.metrics import LUMP, Metrics
from outrider.serve.wire import Events, event
from outrider.serve.worker import Group, Job

JOB = Job((1,), SamplingParams())


def test_a_wait_ends_with_news_and_otherwise_after_its_time() -> None:
    async def test() -> None:
        group = Group([JOB])
        loop = asyncio.get_running_loop()
        loop.call_soon(group.deliver, 0, Update(0, (5,)), None)
        await group.wait(60)
        assert group.ready and group.take() == [(0, Update(0, (5,)))]
        group.close()
        await Group([JOB]).wait(0.01)  # nothing comes

    asyncio.run(asyncio.wait_for(test(), 20))


def test_the_alarm_of_an_earlier_wait_does_not_end_a_later_one() -> None:
    async def test() -> None:
        group = Group([JOB])
        loop = asyncio.get_running_loop()
        group.deliver(0, Update(0), None)
        group.take()
        loop.call_later(0.02, group.deliver, 0, Update(0, (1,)), None)
        await group.wait(0.1)
        group.take()
        begin = loop.time()
        await group.wait(0.3)  # the first one's alarm rings meanwhile
        assert not group.ready and loop.time() - begin >= 0.3
        group.close()

    asyncio.run(asyncio.wait_for(test(), 20))


def test_a_fault_ends_a_wait() -> None:
    async def test() -> None:
        group = Group([JOB])
        asyncio.get_running_loop().call_soon(group.fail, ValueError("no"))
        await group.wait(60)
        assert group.ready and group.done
        group.close()

    asyncio.run(asyncio.wait_for(test(), 20))


def test_events_are_those_of_the_whole_object() -> None:
    frame = {"id": "a", "model": 'm"\u00e9\u2028', "created": 1}
    rest = {"choices": [{"delta": {"content": "x\n\ud83d"}}], "usage": None}
    assert Events(frame).of(rest) == event({**frame, **rest})
    assert list(json.loads(Events(frame).of({"a": 1})[6:])) == ["id", "model", "created", "a"]


def test_a_reader_of_the_registry_finds_what_a_tally_still_holds() -> None:
    metrics = Metrics()
    value = metrics.registry.get_sample_value
    labels = {"profile": "p", "prompt_type": "code"}
    for number in range(LUMP + 3):
        metrics.token_gaps("p", "code").observe(0.001 * number)
        metrics.stepped(Load(running=2, waiting=1, slots=4, rows=3, capacity=12), 0.5)
    assert value("outrider_inter_token_seconds_count", labels) == LUMP + 3
    assert value("outrider_step_seconds_sum") == (LUMP + 3) * 0.5
    assert value("outrider_batch_size_sum") == 2 * (LUMP + 3)
    assert value("outrider_requests_running") == 2 and value("outrider_requests_waiting") == 1
    assert value("outrider_kv_cache_usage_ratio") == 0.25
    metrics.chunk_gaps("p", "code").observe(1.0)
    assert 'outrider_chunk_gap_seconds_count{profile="p",prompt_type="code"} 1' in (
        metrics.text().decode()
    )
