"""Loads, runs on disk, sweeps: against the mock engine, with its faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import sys

import numpy as np
import pytest

from outrider.backends.base import EngineUnfit
from outrider.backends.connect import connect
from outrider.backends.settings import PLAIN, SERVED, Setting
from outrider.backends.started import command_words, started
from outrider.errors import InvalidParameter
from outrider.evaluate.load import Load, Saturation, generator_limit, slope_low
from outrider.evaluate.runs import MOST_BYTES, Run, RunWriter
from outrider.evaluate.sets import load_set, parse_set
from outrider.evaluate.summary import Limits, differences, quantile, summarise
from outrider.evaluate.sweep import SweepPlan, run_sweep
from outrider.records.files import RecordFileError
from outrider.records.manifest import run_manifest
from outrider.testing.mock_engine import MockSettings, mock_engine


def prompts(number):
    """A set of short prompts in two families."""
    lines = (
        json.dumps({"id": f"q{n}", "family": "ab"[n % 2], "prompt": f"tell {n} and more"})
        for n in range(number)
    )
    return parse_set("\n".join(lines).encode(), name="tiny")


PLANNED = {"sets": (prompts(8),), "max_tokens": 12}
QUICK = {"step_ms": 0.2, "prefill_ms": 0.2}


def plan_of(**more):
    return SweepPlan(**{**PLANNED, "settings": (Setting(SERVED),), "early_stop": False, **more})


def sweep(plan, folder, urls, *, resume=False, kind="auto", progress=lambda line: None):
    """Run a plan; ``urls`` is one address, or one per setting's name."""

    @contextlib.asynccontextmanager
    async def opener(setting):
        backend = await connect(urls if isinstance(urls, str) else urls[setting.name], kind=kind)
        try:
            yield backend
        finally:
            await backend.close()

    options = json.loads(json.dumps({"plan": plan.to_dict()}))
    manifest = run_manifest(seed=plan.seed, options=options)
    writer = RunWriter.resume(folder) if resume else RunWriter.create(folder, manifest)
    with writer:
        asyncio.run(run_sweep(plan, opener, writer, progress=progress))
        writer.finish()
    return Run.load(folder)


def test_a_run_is_written_read_and_asked(tmp_path):
    with mock_engine(MockSettings(tokens=3, **QUICK)) as url:
        run = sweep(plan_of(loads=(Load(), Load(concurrency=4))), tmp_path / "run", url)
    assert run.finished and run.faults() == [] and len(run.samples) == 16
    first = run.samples[0]
    assert first["engine"] == "vllm" and first["version"] == "0.33.0"
    assert first["completion_tokens"] == 12 or first["finish_reason"] == "stop"
    assert {s["acceptance_source"] for s in run.samples} == {"response"}
    assert all(s["ttft_ms"] > 0 and s["e2e_ms"] >= s["ttft_ms"] for s in run.samples)
    assert run.query("SELECT count(*) FROM samples WHERE load = 'c4'") == [(8,)]
    with pytest.raises(InvalidParameter, match="refuses"):
        run.query("DROP TABLE samples")
    longest = max((tmp_path / "run" / "samples.jsonl").read_bytes().split(b"\n")[1:-2], key=len)
    assert len(longest) <= MOST_BYTES
    # steps in our counting: with and without a guess, prefill's too
    assert all(s["target_steps"] == s["completion_tokens"] - s["accepted"] for s in run.samples)


def test_acceptance_comes_from_counters_where_the_answer_tells_none(tmp_path):
    with mock_engine(MockSettings(tokens=3, **QUICK)) as url:
        told = sweep(plan_of(), tmp_path / "told", url)
    silent = MockSettings(tokens=3, faults=frozenset({"no-acceptance"}), **QUICK)
    with mock_engine(silent) as url:
        counted = sweep(plan_of(), tmp_path / "counted", url)
    assert {s["acceptance_source"] for s in counted.samples} == {"counters"}
    for name in ("accepted", "drafted", "target_steps", "accepted_by_position"):
        a, b = ({s["id"]: s[name] for s in run.samples} for run in (told, counted))
        assert a == b, name


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("cut", "the answer broke off"),
        ("not-json", "no JSON object"),
        ("mid-error", "mock fault in mid-stream"),
        ("http-500", "HTTP 500: mock fault"),
    ],
)
def test_a_broken_answer_is_a_failed_sample(fault, words, tmp_path):
    with mock_engine(MockSettings(faults=frozenset({fault}), **QUICK)) as url:
        run = sweep(plan_of(), tmp_path / "run", url)
    assert len(run.samples) == 8 and all(words in s["error"] for s in run.samples)
    summary = summarise(run)
    assert summary.cells[0].failed == 8 and "8 of 8 requests failed" in summary.faults
    assert summary.cells[0].tokens_per_s in (None, 0)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no-usage", "8 answers came without usage: their tokens are unknown"),
        ("no-metrics", "/metrics cannot be read: no counters, no load"),
        ("other-model", "asked for model 'mock-model', answered by 'another'"),
    ],
)
def test_what_is_missing_is_said_and_not_guessed(fault, words, tmp_path):
    settings = MockSettings(tokens=2, faults=frozenset({fault}), **QUICK)
    with mock_engine(settings) as url:
        run = sweep(plan_of(), tmp_path / "run", url)
    assert any(words in found for found in summarise(run).faults), summarise(run).faults
    if fault == "no-usage":
        assert all(s["tpot_ms"] is None and s["completion_tokens"] is None for s in run.samples)


def test_a_wrong_version_is_refused():
    with (
        mock_engine(MockSettings(faults=frozenset({"old"}))) as url,
        pytest.raises(EngineUnfit, match=r"vllm 0\.1\.0; versions from 0\.10"),
    ):
        asyncio.run(connect(url))


def test_a_run_that_was_cut_off_goes_on_with_what_is_missing(tmp_path):
    folder, seen = tmp_path / "run", []
    with mock_engine(MockSettings(tokens=2, **QUICK)) as url:
        sweep(plan_of(), folder, url)
        path = folder / "samples.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:4]) + b'{"half": ')
        part = Run.load(folder)
        assert part.torn and not part.finished and len(part.samples) == 3
        assert any("PARTIAL" in fault for fault in summarise(part).faults)
        with pytest.raises(RecordFileError, match="exists already"):
            sweep(plan_of(), folder, url)
        run = sweep(plan_of(), folder, url, resume=True, progress=seen.append)
    assert run.finished and len(run.samples) == 8 and "5 prompts" in seen[0]
    path.write_bytes(path.read_bytes().replace(lines[2], b"{oops\n"))
    assert [bad.number for bad in Run.load(folder).bad_lines] == [3]


def test_failed_samples_are_tried_again(tmp_path):
    with mock_engine(MockSettings(faults=frozenset({"every-third"}), **QUICK)) as url:
        run = sweep(plan_of(), tmp_path / "run", url)
    failed = sum(bool(s["error"]) for s in run.samples)
    assert 0 < failed < 8
    with mock_engine(MockSettings(**QUICK)) as url:
        run = sweep(plan_of(), tmp_path / "run", url, resume=True)
    assert len(run.samples) == 8 and not any(s["error"] for s in run.samples)


def test_outputs_agree_with_and_without_guesses_and_the_hopeless_is_cut_short(tmp_path):
    settings = (PLAIN, Setting("ngram", 2), Setting("ngram", 4))
    plan = plan_of(
        sets=(prompts(20),),
        settings=settings,
        loads=(Load(), Load(concurrency=2)),
        early_stop=True,
    )
    slow = MockSettings(tokens=4, step_ms=3.0, extra=1.0, acceptance=0.0, prefill_ms=0.2)
    with (
        mock_engine(MockSettings(**QUICK)) as plain,
        mock_engine(MockSettings(tokens=2, **QUICK)) as good,
        mock_engine(slow) as bad,
    ):
        urls = {"baseline": plain, "ngram-k2": good, "ngram-k4": bad}
        run = sweep(plan, tmp_path / "run", urls)
    summary = summarise(run)
    stopped = {(c["setting"], c["load"]): c["stopped"] for c in run.cells}
    assert stopped["ngram-k4", "c1"].startswith("hopeless: at most")
    assert stopped["ngram-k4", "c2"].startswith("skipped, hopeless")
    assert any("skipped, hopeless" in fault for fault in summary.faults)
    [verdict] = [v for v in summary.recommendation.verdicts if v.setting == "ngram-k4"]
    assert verdict.pays is False and verdict.same_outputs[0] == verdict.same_outputs[1] > 0


def test_a_request_that_the_engine_cannot_honour_is_not_sent(tmp_path):
    from outrider.backends.embedded import EmbeddedBackend
    from outrider.engine import Engine, EngineConfig
    from outrider.testing.fakes import ByteTokenizer, TableTarget

    @contextlib.asynccontextmanager
    async def opener(setting):
        config = EngineConfig(slots=1, context=8192, reuse_prefix=False)
        target = TableTarget(vocab_size=ByteTokenizer.vocab_size, context_length=8192)
        engine = Engine(target, tokenizer=ByteTokenizer(), config=config)
        backend = EmbeddedBackend(engine, ByteTokenizer())
        yield backend
        await backend.close()

    plan = plan_of(sets=(load_set("builtin:regression").take(8),), settings=(PLAIN,))
    with RunWriter.create(tmp_path / "run", run_manifest(seed=0)) as writer:
        asyncio.run(run_sweep(plan, opener, writer, progress=lambda line: None))
    run = Run.load(tmp_path / "run")
    refused = [s for s in run.samples if s["error"]]
    assert {s["family"] for s in refused} == {"json", "tools"}
    assert all(s["error"].startswith("not sent: the embedded engine cannot") for s in refused)


def test_cancelled_requests_count_apart(tmp_path):
    loads = (Load(cancel_share=1.0, cancel_after_s=0.0, warm_up=0),)
    with mock_engine(MockSettings(step_ms=5)) as url:
        run = sweep(plan_of(loads=loads), tmp_path / "run", url)
    [cell] = summarise(run).cells
    assert cell.cancelled == 8 and cell.failed == 0 and cell.goodput_share is None


def test_goodput_counts_who_kept_the_limits(tmp_path):
    with mock_engine(MockSettings(**QUICK)) as url:
        run = sweep(plan_of(), tmp_path / "run", url)
    [all_good] = summarise(run, limits=Limits(ttft_ms=1e6, tpot_ms=1e6)).cells
    [none_good] = summarise(run, limits=Limits(tpot_ms=1e-6)).cells
    assert all_good.goodput_share == 1.0 and none_good.goodput_share == 0.0


def test_open_loops_have_their_times():
    assert Load(shape="constant", rate=4).times(3) == [0, 0.25, 0.5]
    assert Load(shape="burst", concurrency=2, rate=4).times(5) == [0, 0, 0.5, 0.5, 1.0]
    times = Load(shape="poisson", rate=50, seed=1).times(4000)
    assert times == Load(shape="poisson", rate=50, seed=1).times(4000)
    gaps = np.diff(times)
    assert abs(gaps.mean() - 0.02) < 0.002 and abs(gaps.std() - 0.02) < 0.002
    for wrong in ({"shape": "wave"}, {"shape": "poisson"}, {"concurrency": 0}, {"cancel_share": 2}):
        with pytest.raises(InvalidParameter):
            Load(**wrong)


def test_an_open_loop_runs(tmp_path):
    loads = (Load(shape="poisson", rate=400.0), Load(shape="burst", rate=400.0, concurrency=4))
    with mock_engine(MockSettings(**QUICK)) as url:
        run = sweep(plan_of(loads=loads), tmp_path / "run", url)
    assert len(run.samples) == 16 and not any(s["error"] for s in run.samples)
    assert {s["load"] for s in run.samples} == {"poisson@400/s", "burstx4@400/s"}


def test_saturation_needs_both_slopes():
    def verdict(flying, ttft):
        state = Saturation(rows=[(i * 0.5, flying(i), ttft(i)) for i in range(60)])
        return state.verdict()

    grows, steady = (lambda i: 1 + 0.5 * i), (lambda i: 3 + (i % 3))
    assert verdict(grows, grows).startswith("over-saturated")
    assert verdict(grows, steady) == verdict(steady, grows) == verdict(steady, steady) == ""
    assert slope_low(np.arange(9.0), np.ones(9), confidence=0.95) == 0


def test_the_generators_own_limit_is_measured():
    limit = asyncio.run(generator_limit(seconds=0.2, concurrency=8))
    assert limit.requests > 0 and limit.failed == 0 and limit.requests_per_s > 0


def test_quantiles_have_intervals_by_prompt_and_none_where_data_are_few():
    values = [(f"p{i % 20}", float(i)) for i in range(200)]
    found = quantile(values, 0.5)
    assert found.interval.low < found.value < found.interval.high
    assert quantile(values[:50], 0.99) is None and quantile([], 0.5) is None


def test_two_runs_say_in_what_they_differ(tmp_path):
    with mock_engine(MockSettings(**QUICK)) as url:
        runs = [sweep(plan_of(max_tokens=n), tmp_path / str(n), url) for n in (6, 7)]
    assert [d.name for d in differences(*runs) if "plan" in d.name] == ["options.plan.max_tokens"]


def test_a_plan_without_sense_is_refused():
    one = load_set("builtin:regression").take(2)
    for wrong, words in (
        ({"settings": ()}, "needs settings"),
        ({"settings": (PLAIN, PLAIN)}, "setting 'baseline' is there twice"),
        ({"sets": (one, one)}, "is there twice"),
        ({"repeats": 0}, "repeats is 0"),
        ({"loads": (Load(), Load())}, "load 'c1' is there twice"),
    ):
        with pytest.raises(InvalidParameter, match=words):
            plan_of(**wrong)


def test_an_engine_that_ends_at_once_tells_why(tmp_path):
    python = shlex.quote(sys.executable)
    command = f"{python} -c 'import sys; sys.exit(\"no such model\")' {{port}} {{speculative}}"

    async def start():
        async with started(command, PLAIN, kind="vllm", folder=tmp_path, ready_s=20):
            pass

    with pytest.raises(EngineUnfit, match="ended with code 1: no such model"):
        asyncio.run(start())
    with pytest.raises(InvalidParameter, match=r"needs \{port\}"):
        command_words("vllm serve", port=1, extra=())
    assert command_words("a {port} {speculative} b", port=7, extra=["x", "y z"]) == [
        *("a", "7", "x", "y z", "b"),
    ]


def test_settings_take_turns_every_few_prompts_where_all_can_be_open(tmp_path):
    settings, opened = (PLAIN, Setting("ngram", 2)), []

    @contextlib.asynccontextmanager
    async def opener(setting):
        opened.append(setting.name)
        backend = await connect(url)
        yield backend
        await backend.close()

    plan = plan_of(settings=settings, repeats=2)
    with (
        mock_engine(MockSettings(tokens=2, **QUICK)) as url,
        RunWriter.create(tmp_path / "run", run_manifest(seed=0)) as writer,
    ):
        asyncio.run(run_sweep(plan, opener, writer, progress=lambda line: None, slice_size=3))
    run = Run.load(tmp_path / "run")
    assert opened == ["baseline", "ngram-k2"] and len(run.samples) == 32
    turns = [c["setting"] for c in run.cells]
    assert turns[:6] == ["baseline", "ngram-k2", "ngram-k2", "baseline", "baseline", "ngram-k2"]
    order = [[s["id"] for s in run.samples if s["setting"] == name] for name in opened]
    assert sorted(order[0]) == sorted(order[1]) and len(run.cells) == 12


def test_counters_do_not_speak_for_a_request_that_was_not_alone():
    from outrider.backends.base import Ask

    async def test():
        backend = await connect(url)
        try:
            alone = backend.answer_alone(Ask("a long one", max_tokens=60))
            others = (backend.answer(Ask(f"short {n}", max_tokens=4)) for n in range(3))
            return (await asyncio.gather(alone, *others))[0]
        finally:
            await backend.close()

    silent = MockSettings(tokens=2, faults=frozenset({"no-acceptance"}), step_ms=4)
    with mock_engine(silent) as url:
        answer = asyncio.run(test())
    assert answer.acceptance is None
    assert any("other requests ran beside this one" in note for note in answer.notes)
