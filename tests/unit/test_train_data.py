"""Training data: prompts of every form, answers, features, the split, and going on after a stop."""

from __future__ import annotations

import errno
import functools
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from train_fakes import FEATURES, WIDTH, data_config, prompts, tiny_data, tiny_model

from outrider.errors import InvalidParameter, NoSpace
from outrider.models.heads.fit import folder_facts
from outrider.train import prepare as preparing
from outrider.train.features import FeatureStore, compute_features
from outrider.train.prepare import TrainingData, check_space, claim, estimate_bytes, prepare
from outrider.train.prompts import Writer, held_out_ids, make_prompt, read_prompts, unique
from outrider.train.samples import Sample, append_samples, read_samples
from outrider.train.setup import default_features, stored_features


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("train")


def contents(path: Path, text: str) -> list[list[dict[str, str]]]:
    path.write_text(text, encoding="utf-8")
    return [[dict(turn) for turn in prompt.messages] for prompt in read_prompts(path)]


# ---------------------------------------------------------------------------------------- prompts

USER = {"role": "user", "content": "Hi"}
SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes?"}]}
OPENAI = {"messages": [{"role": "system", "content": "Be brief."}, USER]}
PARTS = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("a.jsonl", '{"prompt": "Hi"}\n\n', [[USER]]),
        ("a.jsonl", json.dumps(SHAREGPT), [[USER]]),  # the closing answer is dropped
        ("a.json", json.dumps([SHAREGPT, OPENAI]), [[USER], OPENAI["messages"]]),
        ("a.jsonl", json.dumps(PARTS), [[USER]]),
        ("a.txt", "Hi\n\n[1] what?\n", [[USER], [{"role": "user", "content": "[1] what?"}]]),
        ("a.jsonl", '{"prompt": "Hi"}\n{"prompt": " HI "}\n', [[USER]]),  # once
        ("a.jsonl", '{"prompt": "a\u2028b"}', [[{"role": "user", "content": "a\u2028b"}]]),
    ],
)
def test_prompts_are_read_in_every_form(tmp_path, name, text, wanted):
    assert contents(tmp_path / name, text) == wanted


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.jsonl", "", "holds no prompts"),
        ("a.jsonl", '{"messages": []}', "holds no prompts"),
        ("a.jsonl", '{"prompt": "Hi"}\n{"prompt": 3}', "line 2"),
        ("a.jsonl", '{"prompt": "Hi"}\n{"pro', "line 2: no JSON"),
        ("a.jsonl", "[]", "holds no prompts"),
        ("a.jsonl", "7", "line 1"),
        ("a.json", '[{"prompt": "Hi"}, {"answer": "Hi"}]', "entry 2"),
        ("a.json", '[{"prompt": "Hi"}', "no JSON array"),
    ],
)
def test_prompts_that_cannot_be_used_are_named(tmp_path, name, text, says):
    with pytest.raises(InvalidParameter, match=says):
        contents(tmp_path / name, text)
    with pytest.raises(InvalidParameter, match="cannot be read"):
        read_prompts(tmp_path / "absent")


def test_the_writer_is_a_function_of_its_seed():
    def wrote(seed: int) -> list[str]:
        writer = Writer(seed)
        return [writer.task().id for _ in range(20)] + [writer.about("some words here").id]

    assert wrote(3) == wrote(3)
    assert wrote(3) != wrote(4)


def test_what_is_held_out_depends_on_the_prompt_alone():
    many = prompts(2000)
    own = {p.id for p in many if p.held_out}
    assert 20 < len(own) < 120  # of 2,000: 3 %
    assert held_out_ids(many) == own
    few = prompts(10)
    assert len(held_out_ids(few)) == 1  # even where none of them says so
    assert held_out_ids(few) == held_out_ids(few[::-1])
    assert held_out_ids(few[:1]) == frozenset()


def test_repetitions_are_dropped():
    a = make_prompt("x", [{"role": "user", "content": "Say  it"}])
    b = make_prompt("y", [{"role": "user", "content": "say it"}])
    assert a.id == b.id
    assert list(unique([a, b])) == [a]


# ------------------------------------------------------------------------------ answers, features


def test_every_prompt_is_answered_once_with_features(home):
    data = tiny_data(home)
    assert len({s.id for s in data.samples}) == len(data.samples) == 40
    assert {s.temperature for s in data.samples} == {0.0, 1.0}
    for sample in data.samples:
        assert len(data.store.get(sample.id)) == len(sample.tokens) - 1
    train, held_out = data.split(False), data.split(True)
    assert train and held_out
    assert not {s.id for s in train} & {s.id for s in held_out}


def test_recorded_features_are_those_of_a_pass_of_its_own(home):
    data, model = tiny_data(home), tiny_model(home)
    chosen = data.samples[:3]
    found = compute_features(model.target, [s.tokens for s in chosen], FEATURES)
    for sample, rows in zip(chosen, found, strict=True):
        torch.testing.assert_close(
            data.store.get(sample.id).float(), rows.float(), rtol=0.02, atol=0.05
        )
        off_by_one = data.store.get(sample.id)[1:].float() - rows[:-1].float()
        assert off_by_one.abs().max() > 0.5  # the comparison can fail


def prepared(home: Path, folder: Path, **how: Any) -> TrainingData:
    model = tiny_model(home)
    return prepare(
        model.target,
        model.tokenizer,
        folder,
        how.pop("config", data_config()),
        features=FEATURES,
        width=WIDTH,
        **how,
    )


def lines(data: TrainingData) -> list[str]:
    return sorted(f"{s.id} {s.tokens} {s.held_out}" for s in data.samples)


def test_answers_go_on_where_they_were_stopped(home, tmp_path):
    calls = iter(range(10**6))
    half = prepared(home, tmp_path / "a", prompts=prompts(40), stop=lambda: next(calls) > 60)
    assert not half.complete
    assert 0 < len(half.samples) < 40
    (tmp_path / "a" / "samples.jsonl").open("a").write('{"id": "torn')  # as a kill leaves it
    (tmp_path / "a" / "features" / "index.jsonl").open("a").write('{"id": "to')
    with (tmp_path / "a" / "features" / "shard-0000.bf16").open("ab") as shard:
        shard.write(b"\x01\x02\x03")
    before = [path.read_bytes() for path in sorted((tmp_path / "a").rglob("*.*"))]
    again = TrainingData.open(tmp_path / "a", features=FEATURES, width=WIDTH)
    assert before == [path.read_bytes() for path in sorted((tmp_path / "a").rglob("*.*"))]
    assert lines(again) == lines(half)
    assert torch.equal(again.store.get(again.samples[-1].id), half.store.get(half.samples[-1].id))
    whole = prepared(home, tmp_path / "a", prompts=prompts(40))
    assert whole.complete
    assert lines(whole) == lines(tiny_data(home))


def test_rounds_go_on_where_they_were_stopped(home, tmp_path):
    config = data_config(max_prompt=400)
    config = replace(config, tokens=1800, own_turns=6, tasks=6, texts=6)
    once = prepared(home, tmp_path / "once", config=config)
    assert once.complete and {s.family for s in once.samples} > {"own", "extract"}
    count, complete = 0, False
    while not complete:
        calls = itertools.count()
        stop = functools.partial(lambda calls: next(calls) > 200, calls)
        complete = prepared(home, tmp_path / "often", config=config, stop=stop).complete
        count += 1
        assert count < 40
    assert count > 2
    often = TrainingData.open(tmp_path / "often", features=FEATURES, width=WIDTH)
    assert lines(often) == lines(once)


def test_texts_of_held_out_answers_do_not_become_prompts(home):
    data, model = tiny_data(home), tiny_model(home)
    samples = [replace(s, held_out=True) for s in data.samples]
    found = preparing.follow_ups(samples, model.tokenizer, Writer(0), count=5, seed=0)
    assert found == []
    assert preparing.follow_ups(data.samples, model.tokenizer, Writer(0), count=5, seed=0)


def test_prompts_that_do_not_fit_are_counted(home, tmp_path):
    long = make_prompt("test", [{"role": "user", "content": "x" * 500}])
    alien = make_prompt("test", [{"role": "alien", "content": "hi"}])
    data = prepared(home, tmp_path / "a", prompts=[*prompts(4), long, alien])
    assert (data.left_out.too_long, data.left_out.refused) == (1, 1)
    assert "no aliens" in data.left_out.reason
    assert len(data.samples) == 4
    with pytest.raises(InvalidParameter, match="none of 1 prompts can be used: 1 do not fit"):
        prepared(home, tmp_path / "b", prompts=[long])


def test_answers_end_at_the_context(home, tmp_path):
    config = data_config(max_tokens=4000, max_prompt=4000)
    data = prepared(home, tmp_path / "a", prompts=prompts(2), config=config)
    assert max(len(s.tokens) for s in data.samples) <= tiny_model(home).target.context_length


# ------------------------------------------------------------------------------------- the folder


def sample(name: str, length: int = 5) -> Sample:
    return Sample(name, "test", tuple(range(length)), 2, 0.0, False)


def rows(length: int = 4) -> torch.Tensor:
    return torch.randn(length, len(FEATURES), WIDTH)


def test_a_full_disk_keeps_what_was_written(tmp_path, monkeypatch):
    data = TrainingData.open(tmp_path, features=FEATURES, width=WIDTH)
    data.add(sample("a"), rows())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(preparing, "append_samples", full)
        with pytest.raises(NoSpace, match="after 1 samples"):
            data.add(sample("b"), rows())
    again = TrainingData.open(tmp_path, features=FEATURES, width=WIDTH)
    assert [s.id for s in again.samples] == ["a"]
    again.add(sample("b"), rows())
    last = TrainingData.open(tmp_path, features=FEATURES, width=WIDTH)
    assert [s.id for s in last.samples] == ["a", "b"]


def test_samples_whose_features_were_lost_are_answered_again(tmp_path):
    data = TrainingData.open(tmp_path, features=FEATURES, width=WIDTH)
    data.add(sample("a"), rows())
    data.add(sample("b"), rows())
    shard = tmp_path / "features" / "shard-0000.bf16"
    shard.write_bytes(shard.read_bytes()[:-1])
    again = TrainingData.open(tmp_path, features=FEATURES, width=WIDTH)
    assert [s.id for s in again.samples] == ["a"]
    again.add(sample("b"), rows())
    last = TrainingData.open(tmp_path, features=FEATURES, width=WIDTH)
    assert [s.id for s in last.samples] == ["a", "b"]  # and not twice


def test_damaged_files_are_named(tmp_path):
    append_samples(tmp_path / "s.jsonl", [sample("a")])
    with (tmp_path / "s.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(InvalidParameter, match="line 2 is damaged"):
        list(read_samples(tmp_path / "s.jsonl"))
    FeatureStore(tmp_path / "f", features=FEATURES, width=WIDTH)
    with pytest.raises(InvalidParameter, match="holds other features"):
        FeatureStore(tmp_path / "f", features=(1, 4), width=WIDTH)
    (tmp_path / "f" / "index.jsonl").write_text("what\n")
    with pytest.raises(InvalidParameter, match="line 1 is damaged"):
        FeatureStore(tmp_path / "f", features=FEATURES, width=WIDTH)


def test_the_size_is_known_and_checked_before(home, tmp_path, monkeypatch):
    config = replace(data_config(), tokens=10_000)
    needed = estimate_bytes(tmp_path, config, features=FEATURES, width=WIDTH)
    assert needed == 16_000 * len(FEATURES) * WIDTH * 2
    given = estimate_bytes(tmp_path, config, features=FEATURES, width=WIDTH, lengths=[10, 64, 65])
    assert given == (10 + 40 + 64 + 40) * len(FEATURES) * WIDTH * 2
    check_space(tmp_path / "not" / "yet", needed)
    with pytest.raises(NoSpace, match=r"needs about 1,000,000,000\.00 GB .* are free"):
        check_space(tmp_path, 10**18)


def test_a_folder_belongs_to_one_target(home, tmp_path):
    model = tiny_model(home)
    facts = folder_facts(model.source, name="mine", tokenizer=model.tokenizer)
    assert claim(tmp_path, facts, fingerprint="a") == []
    assert claim(tmp_path, facts, fingerprint="a") == []
    [warning] = claim(tmp_path, facts, fingerprint="b")
    assert "other weights" in warning
    [warning] = claim(tmp_path, replace(facts, template_hash="f00d"), fingerprint="a")
    assert "chat template" in warning and "f00d" in warning
    with pytest.raises(InvalidParameter, match="config_hash"):
        claim(tmp_path, replace(facts, config_hash="0"), fingerprint="a")


def test_features_of_small_targets():
    assert default_features(30) == (2, 15, 27)
    assert default_features(7) == (2, 3, 4)
    for layers in range(4, 40):
        found = default_features(layers)
        assert len({*found}) == 3 and min(found) > 0 and max(found) < layers
        assert list(found) == sorted(found)
    with pytest.raises(InvalidParameter, match="the target has 3 layers"):
        default_features(3)
    assert stored_features(3) == (3,)
