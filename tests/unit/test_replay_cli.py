"""`outrider replay`: record a trace, read it back, predict from it; and every wrong request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heads_fakes import head_config, random_head
from outrider.cli.replay import budget_plans, draft_costs, specs
from outrider.core.sampling import SamplingParams
from outrider.drafters import table
from outrider.drafters.eagle import EagleDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.drafters.table import Setting
from outrider.engine import Engine, FixedBudget
from outrider.errors import InvalidParameter
from outrider.evaluate.replay import BudgetPlan, by_position
from outrider.evaluate.trace import (
    params_from_dict,
    params_to_dict,
    read_trace,
)
from outrider.models.config import ModelConfig
from outrider.models.heads.config import TargetFacts
from outrider.models.heads.eagle import EagleModel
from outrider.models.native import NativeTransformer
from outrider.models.tiny import tiny_raw
from outrider.models.weights import random_tensors
from outrider.records.files import RecordFileError
from outrider.testing.fakes import ByteTokenizer

SHORT = ("--limit", "2", "--max-tokens", "80")


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": str(i), "prompt": f"say {word}"} for i, word in enumerate(("yes", "no", "hm"))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def trace(cli, tmp_path: Path, prompts: str) -> Path:
    path = tmp_path / "trace.jsonl"
    done = cli(*_record(path, prompts), *SHORT, "-t", "0.3")
    assert done.code == 0, done.err
    assert "2 requests, 160 tokens" in done.out
    return path


def _record(path: Path, prompts: str) -> tuple[str, ...]:
    return ("replay", "--record", "--target", "fake", "--workload", prompts, "--trace", str(path))


def _replay(path: Path, *more: str) -> tuple[str, ...]:
    return ("replay", "--target", "fake", "--trace", str(path), *more)


def test_what_is_recorded_is_what_is_generated(cli, trace, prompts):
    found = read_trace(trace)
    assert [r.id for r in found.requests] == [f"{prompts}/0", f"{prompts}/1"]
    assert found.facts.verify_ms == {1: 100.0, 16: 110.0}
    for request, text in zip(found.requests, ("say yes", "say no"), strict=True):
        done = cli("generate", "fake", "-p", text, "-n", "80", "-t", "0.3", "--seed", "0", "--json")
        assert json.loads(done.out)["tokens"] == list(request.tokens)
        assert request.params.seed == 0 and request.tenant == request.id


def test_predictions_are_those_of_the_engine(cli, trace, fake_target, tmp_path):
    """What the engine's own run of the same requests accepts, exactly."""
    out = tmp_path / "out.json"
    words = ("--nodes", "8", "--draft-ms", "suffix=0.5", "--draft-ms", "ngram=0.5")
    result = cli(*_replay(trace, *words, "--json", str(out)))
    assert result.code == 0, result.err
    found = json.loads(out.read_text())
    assert [p["drafter"] for p in found["predictions"]] == ["none", "ngram", "suffix"]
    engine = Engine(
        fake_target(),
        drafters={"ngram": NgramDrafter(), "suffix": SuffixDrafter()},
        budget=FixedBudget(8, 8),
    )
    for prediction in found["predictions"]:
        steps = []
        for request in read_trace(trace).requests:
            name, tenant = prediction["drafter"], request.tenant
            id = engine.add(request.prompt, request.params, drafter=name, tenant=tenant)
            while engine.has_work:
                engine.step()
            done = engine.take(id)
            assert done.tokens == request.tokens
            steps += [step for step in done.steps if step.emitted]
        accepted = sum(min(step.accepted, step.emitted) for step in steps)
        assert prediction["steps"] == len(steps)
        assert prediction["acceptance_length"] == pytest.approx(1 + accepted / len(steps))
        assert prediction["by_position"] == list(by_position(steps))
        assert prediction["drafter"] in result.out
    suffix = found["predictions"][2]
    assert suffix["acceptance_length"] > 1.2 and suffix["speedup"] > 1.1
    assert found["trace"]["requests"] == 2 and found["costs"]["verify_ms"] == {"1": 100, "16": 110}


def test_every_budget_is_a_row(cli, trace):
    result = cli(*_replay(trace, "--drafters", "suffix", "--nodes", "auto,2,6", "--depth", "2,4"))
    rows = [line.split()[:2] for line in result.out.splitlines()[2:-1]]
    wanted = [("none", "-"), ("suffix", "auto"), ("suffix", "2x2")]
    assert rows == [*map(list, wanted), ["suffix", "6x2"], ["suffix", "6x4"]]


def _tiny() -> NativeTransformer:
    config = ModelConfig.from_hf({**tiny_raw("llama"), "vocab_size": ByteTokenizer.vocab_size})
    return NativeTransformer.build(
        config,
        random_tensors(config, 5).__getitem__,
        precision="fp32",
        name="tiny",
        fingerprint="tiny",
    )


def _head(argument: str, setting: Setting) -> EagleDrafter:
    """A head over the first tokens of a byte vocabulary."""
    facts = TargetFacts("tiny", (), 64, 3, setting.target.vocab_size)
    config = head_config("eagle3", target=facts, draft_vocab_size=setting.target.vocab_size)
    model = EagleModel(config, random_head(config), setting.target, None)
    return EagleDrafter(model, subset=None, sequences=1, length=512)


class Counted:
    """Counts the calls of a target's pass."""

    def __init__(self, forward):
        self.forward, self.calls = forward, 0

    def __call__(self, *args, **options):
        self.calls += 1
        return self.forward(*args, **options)


def test_hidden_states_are_kept_and_replayed(cli, prompts, tmp_path, monkeypatch):
    """With kept states no pass of the target is needed, and the figures are those of its own."""
    monkeypatch.setitem(table.BUILDERS, "eagle3", _head)
    target = _tiny()
    kept, bare = tmp_path / "kept.jsonl", tmp_path / "bare.jsonl"
    warm = (*SHORT, "-t", "1")
    features = ("--features", "--drafters", "eagle3")
    assert cli(*_record(kept, prompts), *warm, *features, target=target).code == 0
    assert cli(*_record(bare, prompts), *warm, target=target).code == 0
    assert (tmp_path / "kept.jsonl.features" / "index.jsonl").is_file()
    assert read_trace(kept).facts.features == (1, 2, 3)
    assert read_trace(kept).requests == read_trace(bare).requests
    found = {}
    for path in (kept, bare):
        out = path.with_suffix(".json")
        words = ("--drafters", "eagle3", "--nodes", "8", "--depth", "3", "--json", str(out))
        with monkeypatch.context() as patch:
            counted = Counted(target.forward)
            patch.setattr(target, "forward", counted)
            result = cli(*_replay(path, *words), target=target)
        assert result.code == 0, result.err
        found[path] = json.loads(out.read_text())["predictions"][1], counted.calls
    assert found[kept][1] == 0 and found[bare][1] == 2
    lengths = [found[path][0]["acceptance_length"] for path in (kept, bare)]
    assert lengths[0] == pytest.approx(lengths[1], rel=0.03) and lengths[1] > 1.05
    again = cli(*_record(kept, prompts), *warm, *features, target=target)
    assert again.code == 2 and "exists already" in again.err


def test_a_trace_of_another_target_is_refused(cli, trace, fake_target):
    other = fake_target()
    other.fingerprint = "another"
    result = cli(*_replay(trace), target=other)
    assert result.code == 2 and "was recorded from table" in result.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--nodes", "x"), "whole numbers"),
        (("--depth", "3"), "--depth goes with numbers"),
        (("--depth", "5", "--nodes", "4"), "more than --nodes"),
        (("--drafters", "sufix"), "did you mean suffix"),
        (("--draft-ms", "suffix=fast"), "DRAFTER=MS"),
        (("--draft-ms", "eagle3=1"), "one of ngram, suffix"),
        (("--workload", "builtin:chat"), "belong to --record"),
        (("--limit", "0"), "--limit is 0"),
    ],
)
def test_wrong_words(cli, trace, words, message):
    result = cli(*_replay(trace, *words))
    assert result.code == 2 and message in result.err and len(result.error_lines) == 1


def test_files_that_are_no_trace(cli, trace, tmp_path):
    lines = trace.read_text().splitlines(keepends=True)
    cases = {
        "absent": (None, "cannot be read"),
        "recording": ('{"prompt_sha": "0", "prompt_tokens": 1, "tokens": []}\n', "not a record"),
        "cut": ("".join(lines[:-1]), "cut off"),
        "facts": ("".join(line for line in lines if '"trace"' not in line), "no facts"),
        "token": ("".join(lines).replace('"tokens": [', '"tokens": ["x", '), "line 2"),
        "format": ("".join(lines).replace('"format": 1', '"format": 9'), "format is 9"),
    }
    for name, (text, message) in cases.items():
        path = tmp_path / f"{name}.jsonl"
        if text is not None:
            path.write_text(text)
        result = cli(*_replay(path))
        assert result.code in (2, 3) and message in result.err, (name, result.err)
    with pytest.raises(RecordFileError):
        read_trace(tmp_path / "absent.jsonl")


def test_recording_refuses_before_it_loads(cli, trace, prompts, tmp_path):
    new = tmp_path / "new.jsonl"
    for words, message in (
        ((*_record(trace, prompts),), "exists already"),
        ((*_record(new, prompts), "--features"), "needs --drafters"),
        ((*_record(new, prompts), "--drafters", "suffix"), "without --features"),
        ((*_record(new, "builtin:chta"),), "chta"),
    ):
        result = cli(*words)
        assert result.code == 2 and message in result.err
        assert "loading" not in result.err and not new.exists()
    result = cli(*_record(new, prompts), "--features", "--drafters", "suffix")
    assert result.code == 2 and "read no hidden states" in result.err


def test_parameters_come_back_as_they_were():
    params = SamplingParams(
        temperature=0.5, logit_bias={3: -1.5}, bad_words=((1, 2),), stop=("x",), seed=4
    )
    assert params_from_dict(json.loads(json.dumps(params_to_dict(params)))) == params


def test_words_of_the_command_line():
    assert specs(["suffix,eagle3:d,chain", "ngram, suffix"]) == [
        "suffix",
        "eagle3:d,chain",
        "ngram",
    ]
    assert budget_plans("auto", None) == [BudgetPlan()]
    assert budget_plans("4,8", None) == [BudgetPlan(4, 4), BudgetPlan(8, 8)]
    assert budget_plans("4,8", "6,2") == [BudgetPlan(4, 2), BudgetPlan(8, 6), BudgetPlan(8, 2)]
    cost = draft_costs(["a=b=0.5+1"], ["a=b"])["a=b"]
    assert (cost.base_ms, cost.level_ms) == (0.5, 1.0)
    with pytest.raises(InvalidParameter):
        draft_costs(["suffix=-1"], ["suffix"])
