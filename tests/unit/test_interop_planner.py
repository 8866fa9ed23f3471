"""The checks of vLLM against the planner and behind the gateway: what they compute, without it."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType

import pytest

from outrider.backends.base import Answer
from outrider.rollout import planner
from outrider.rollout.config import make_rollout

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "interop"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module


@pytest.fixture(scope="module")
def check() -> ModuleType:
    return script("vllm_planner")


def stream(begin: float, times: list[float]) -> Answer:
    return Answer(begin=begin, end_s=times[-1], arrivals_s=tuple(times))


def test_the_step_is_timed_while_all_streams_decode(check):
    """Steps of 20 ms from 1.0 s on, when the second stream begins; of 10 ms before that."""
    alone = [0.5 + 0.01 * i for i in range(50)]
    both = [1.0 + 0.02 * i for i in range(20)]
    one = stream(0.0, alone + both)
    two = stream(1.0, [t - 1.0 for i, t in enumerate(both) if i != 7])  # a token without text
    assert check.steady_ms([one, two]) == pytest.approx(20)
    with pytest.raises(check.Unmeasured, match="steps with all of 2"):
        check.steady_ms([one, stream(1.3, [0.0, 0.02, 0.04])])


def test_a_stream_costs_what_its_row_does_not(check):
    by_rows = {1: 20.0, 4: 23.0, 8: 27.0, 16: 35.0}
    streams = {n: 19.0 + n + 1.5 * n for n in (1, 2, 4, 8, 16)}
    assert check.costs_of(streams, by_rows).sequence_ms == pytest.approx(1.5)
    free = {n: 0.9 * (19.0 + n) for n in (1, 2, 4, 8, 16)}
    assert check.costs_of(free, by_rows).sequence_ms == 0.0


@pytest.mark.parametrize("each", [0.0, 1.5])
def test_the_planner_at_the_capacity_is_just_busy(check, each):
    costs = planner.Costs({1: 20.0, 16: 35.0, 80: 120.0}, sequence_ms=each)
    most = check.capacity(costs, prompt=150, tokens=64)
    engine = planner.Engine(costs, slots=check.SLOTS, step_tokens=check.STEP_TOKENS)
    busy = []
    for share in (0.5, 0.95, 1.5):
        times = itertools.count()
        sent = [(next(times) / (share * most), 150, 64) for _ in range(400)]
        found = check.planned(sent, engine)
        busy.append(found["tokens_per_s"] / (64 * share * most))
    assert busy[0] > 0.95 and busy[1] > 0.9 and busy[2] < 0.75


def test_what_lies_outside_the_engine_is_waited_for(check):
    engine = planner.Engine(planner.Costs({1: 20.0, 80: 100.0}), step_tokens=80)
    sent = [(float(i), 40, 2) for i in range(10)]
    at_once, later = check.planned(sent, engine), check.planned(sent, engine, outside_s=0.05)
    assert later["ttft_p50_ms"] - at_once["ttft_p50_ms"] == pytest.approx(50)
    assert later["tpot_p50_ms"] == pytest.approx(at_once["tpot_p50_ms"])


def test_the_rollout_in_front_of_vllm(tmp_path):
    module = script("vllm_gateway")
    values = module.rollout(tmp_path, tmp_path / "head", "http://127.0.0.1:1", state=tmp_path)
    config = make_rollout(values)
    assert config.canaries == (module.EAGLE, module.TWIN) and config.trip_wires.sampled
    assert config.profiles[module.EAGLE].backend.url is None  # started and supervised
    assert config.profiles[module.TWIN].backend.url == config.profiles["baseline"].backend.url
