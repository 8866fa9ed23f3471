"""The planner against a twin that walks step by step, and against arithmetic."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from outrider.cli.main import run
from outrider.cli.session import Session
from outrider.errors import InvalidParameter
from outrider.rollout.planner import (
    Costs,
    Engine,
    Lengths,
    Load,
    Traffic,
    crossover,
    fewest,
    kinds,
    plan,
    serve,
    simulate,
    steps_needed,
    work_of,
)

COSTS = Costs({1: 4.5, 8: 5.3, 16: 8.0, 32: 14.0}, host_ms=0.4, draft_base_ms=0.3)
ENGINE = Engine(COSTS, (0.7, 0.5, 0.35), slots=4, chunk=64, busy_chunk=16)
TRAFFIC = Traffic(3.0, Lengths(60, 0.7), Lengths(40, 0.7), requests=1500)


def twin(load: Load, engine: Engine) -> tuple[list[float], list[float]]:
    """The same day, one step at a time; steps of fixed depth."""
    n, depth = len(load.arrivals), len(engine.reached)
    first, last = [0.0] * n, [0.0] * n
    waiting, reading, running, now = list(range(n)), [], {}, 0.0
    while waiting or reading or running:
        while (
            waiting
            and load.arrivals[waiting[0]] <= now
            and (len(reading) + len(running) < engine.slots)
        ):
            request = waiting.pop(0)
            reading.append([request, load.prompts[request]])
        if not reading and not running:
            now = load.arrivals[waiting[0]]
            continue
        room = engine.busy_chunk if running else engine.chunk
        if engine.step_tokens is not None:
            room = engine.step_tokens - len(running) * (1 + depth)
        rows, through = 0, []
        for entry in reading:
            taken = min(entry[1], room - rows)
            entry[1] -= taken
            rows += taken
            if not entry[1]:
                through.append(entry[0])
        reading = [entry for entry in reading if entry[1]]
        now += engine.step_ms(len(running), depth=depth if running else 0, prompt_rows=rows)
        for request in list(running):
            running[request] -= 1
            if running[request] <= 0:
                last[request] = now
                del running[request]
        for request in through:
            first[request] = last[request] = now
            if load.work[request] > 0:
                running[request] = load.work[request]
    return first, last


@pytest.mark.parametrize("reached", [(), (0.7, 0.5, 0.35)])
@pytest.mark.parametrize("rate", [1.0, 4.0, 40.0])
@pytest.mark.parametrize("step_tokens", [None, 24])
def test_jumps_and_steps_agree(reached, rate, step_tokens):
    shape = {"slots": 4, "chunk": 64, "busy_chunk": 16, "step_tokens": step_tokens}
    engine = Engine(COSTS, reached, adaptive=False, **shape)
    rng = np.random.default_rng(3)
    load = Load(
        np.cumsum(rng.exponential(1000 / rate, 200)).tolist(),
        rng.integers(1, 150, 200).tolist(),
        rng.integers(0, 60, 200).astype(float).tolist(),
    )
    served = serve(load, engine)
    first, last = twin(load, engine)
    assert served.first == pytest.approx(first)
    assert served.last == pytest.approx(last)


def test_steps_follow_their_law():
    rng = np.random.default_rng(0)
    reached, tokens = (0.7, 0.5, 0.35), 40
    drawn = steps_needed(np.full(20_000, tokens), reached, rng)
    walked = np.array([_walk(tokens, reached, rng) for _ in range(3000)])
    assert drawn.mean() == pytest.approx(walked.mean(), rel=0.01)
    assert drawn.std() == pytest.approx(walked.std(), rel=0.08)
    long = steps_needed(np.full(4000, 3000), reached, rng)
    assert long.mean() == pytest.approx(3000 / 2.55 + 0.5, rel=0.003)
    assert (steps_needed(np.array([0, 1, 7]), (), rng) == [0, 1, 7]).all()
    assert (steps_needed(np.array([0, 1, 8]), (1.0, 1.0, 1.0), rng) == [0, 1, 2]).all()


def _walk(tokens, reached, rng):
    out = steps = 0
    while out < tokens:
        depth, steps = rng.random(), steps + 1
        out += 1 + sum(depth < share for share in reached)
    return steps


def test_one_request_by_hand():
    """A prompt of 64 in one chunk, then 40 plain steps."""
    engine = Engine(COSTS, (), chunk=64)
    served = serve(Load([5.0], [64], [40.0]), engine)
    assert served.first[0] == pytest.approx(5 + COSTS.verify(64) + 0.4)
    assert served.last[0] - served.first[0] == pytest.approx(40 * 4.9)


def test_prompts_get_what_decoding_leaves_of_a_step():
    """Two decode one token in each step; of 10 tokens, 8 are left for the third's prompt of 20."""
    engine = Engine(COSTS, (), slots=4, step_tokens=10)
    served = serve(Load([0.0, 0.0, 100.0], [5, 5, 20], [90.0, 90.0, 0.0]), engine)
    steps = [COSTS.verify(10) + 0.4] * 2 + [COSTS.verify(6) + 0.4]  # 8 + 8 + 4
    wait = served.first[2] - 100
    assert sum(steps) <= wait < sum(steps) + COSTS.verify(2) + 0.4


def test_every_sequence_that_decodes_costs_something():
    engine = replace(ENGINE, costs=replace(COSTS, sequence_ms=0.5))
    for sequences in (1, 4):
        more = engine.step_ms(sequences, depth=2, prompt_rows=9)
        assert more - ENGINE.step_ms(sequences, depth=2, prompt_rows=9) == 0.5 * sequences


def test_speculation_helps_where_rows_are_free():
    plain, ours = simulate(TRAFFIC, ENGINE.plain), simulate(TRAFFIC, ENGINE)
    assert ours.tpot["p50"] < 0.75 * plain.tpot["p50"] and ours.busy < plain.busy
    assert plain.stable and ours.stable


def test_an_adaptive_depth_is_never_worse_and_stops_where_it_does_not_pay():
    dear = Costs({1: 4.0, 2: 8.0, 64: 256.0})
    engine = Engine(dear, (0.3, 0.1))
    assert engine.depth(1) == 0
    assert simulate(TRAFFIC, engine).tpot["p50"] == pytest.approx(
        simulate(TRAFFIC, engine.plain).tpot["p50"], rel=0.1
    )
    fixed = Engine(dear, (0.3, 0.1), adaptive=False)
    assert simulate(TRAFFIC, fixed).tpot["p50"] > 1.3 * simulate(TRAFFIC, engine).tpot["p50"]
    assert crossover(TRAFFIC, engine, requests=300) == 0.0


def test_a_fixed_depth_has_a_crossover():
    costs = Costs({1: 4.0, 4: 4.2, 8: 6.0, 64: 60.0})
    where = crossover(TRAFFIC, Engine(costs, (0.7, 0.5, 0.3), adaptive=False), requests=600)
    assert where is not None and where > 0.5


def test_overload_is_seen_and_replicas_are_counted():
    busy = Traffic(40.0, Lengths(60, 0.7), Lengths(40, 0.7), requests=1500)
    assert not simulate(busy, ENGINE).stable
    found = [fewest(busy, e, ttft_ms=400, tpot_ms=12, most=32) for e in (ENGINE.plain, ENGINE)]
    assert found[1] < found[0]
    assert fewest(busy, ENGINE, ttft_ms=0.1, tpot_ms=12, most=4) is None
    answer = plan(busy, ENGINE, replicas=4, ttft_ms=400, tpot_ms=12, most_replicas=32)
    assert answer.saved == found[0] - found[1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Costs({}),
        lambda: Costs({1: 0.0}),
        lambda: Engine(COSTS, (0.5, 0.6)),
        lambda: Engine(COSTS, (1.5,)),
        lambda: Engine(COSTS, slots=0),
        lambda: Engine(COSTS, (0.5,), slots=8, step_tokens=16),
        lambda: Traffic(0.0, Lengths(1), Lengths(1)),
        lambda: simulate(TRAFFIC, ENGINE, replicas=0),
    ],
)
def test_what_cannot_be(make):
    with pytest.raises(InvalidParameter):
        make()


def command(capsys, *words):
    code = run(["plan", *words], session=Session())
    return code, capsys.readouterr()


def test_the_command(tmp_path, capsys):
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"verify_ms": {"1": 4.5, "8": 5.3, "32": 14.0}}))
    target = tmp_path / "plan.json"
    code, shown = command(
        capsys,
        *("--costs", str(costs), "--acceptance", "0.7,0.5,0.3", "--rate", "2"),
        *("--prompt-tokens", "60", "--output-tokens", "40", "--requests", "300"),
        *("--tpot-ms", "9", "--json", str(target)),
    )
    assert code == 0 and "TPOT" in shown.out and "saved" in shown.out
    assert json.loads(target.read_text())["plan"]["speculative"]["tpot"]["p50"] > 0


def test_the_command_takes_a_replay(tmp_path, capsys):
    report = {
        "costs": {"verify_ms": {"1": 4.5, "8": 5.3}, "host_ms": 0.2},
        "predictions": [
            {"drafter": "suffix", "by_position": [0.6, 0.4], "draft_ms": 0.3},
        ],
    }
    path = tmp_path / "replay.json"
    path.write_text(json.dumps(report))
    words = ("--costs", str(path), "--rate", "1", "--requests", "200")
    assert command(capsys, *words, "--drafter", "suffix")[0] == 0
    code, shown = command(capsys, *words, "--drafter", "eagle")
    assert code == 2 and "suffix" in shown.err
    assert command(capsys, *words)[0] == 2


def test_the_command_takes_a_replays_requests(tmp_path, capsys):
    accepted = ([0, 0], [40, 20], [10])
    requests = [{"accepted_by_position": counts, "target_steps": 50} for counts in accepted]
    prediction = {"drafter": "suffix", "rows_per_step": 2.5, "requests": requests}
    report = {"costs": {"verify_ms": {"1": 4.5, "8": 5.3}}, "predictions": [prediction]}
    path, out = tmp_path / "replay.json", tmp_path / "plan.json"
    words = ("--costs", str(path), "--rate", "1", "--requests", "200", "--drafter", "suffix")
    path.write_text(json.dumps(report))
    assert command(capsys, *words, "--json", str(out))[0] == 0
    engine = json.loads(out.read_text())["engine"]
    assert engine["reached"] == [50 / 150, 20 / 150] and engine["guessed"] == 0.75
    assert engine["mix"] == [[], [0.2], [0.8, 0.4]]
    del requests[0]["target_steps"]
    path.write_text(json.dumps(report))
    code, shown = command(capsys, *words)
    assert code == 2 and "target_steps" in shown.err


def test_requests_of_different_kinds_need_their_own_steps():
    engine = Engine(COSTS, (0.5,), mix=((), (1.0,)))
    work = work_of(np.full(400, 20), engine, np.random.default_rng(0))
    assert set(work) == {10.0, 20.0}
    assert 150 < (work == 10).sum() < 250
    assert (work_of(np.full(5, 20), engine.plain, np.random.default_rng(0)) == 20).all()


def test_kinds_are_groups_by_what_was_accepted():
    assert kinds([[8, 4], [], [2]], [10, 10, 10]) == ((), (0.2,), (0.8, 0.4))
    many = kinds([[n] for n in range(100)], [100] * 100)
    assert len(many) == 8
    assert [round(share, 2) for (share,) in many][::7] == [0.06, 0.94]
    assert kinds([], []) == ((),)


def test_guesses_that_are_not_always_made_take_fewer_rows():
    half, all_of_them = Engine(COSTS, (0.7, 0.5), guessed=0.5), Engine(COSTS, (0.7, 0.5))
    assert (half.rows(4, 2), all_of_them.rows(4, 2)) == (8, 12)
    assert half.step_ms(4, depth=2) < all_of_them.step_ms(4, depth=2)
    with pytest.raises(InvalidParameter, match="guessed"):
        Engine(COSTS, (0.7,), guessed=-1.0)
    with pytest.raises(InvalidParameter, match="acceptance"):
        Engine(COSTS, (0.7,), mix=((0.2, 0.4),))
