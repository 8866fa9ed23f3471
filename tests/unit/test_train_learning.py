"""The loop and its losses: they fall, they resume bit for bit, they stop where they must."""

from __future__ import annotations

import errno
import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from models_files import write_folder
from train_fakes import FAST, FEATURES, VOCAB, ShiftedStore, learner, tiny_data, tiny_model

from outrider.drafters.heads import draft_ids, runnable, target_head_rows
from outrider.drafters.medusa import RANKS
from outrider.errors import DrafterMismatch, InvalidParameter, NoSpace, TrainingFailed
from outrider.models.heads.files import Head, read_head
from outrider.models.load import open_folder
from outrider.models.tiny import tiny_config
from outrider.train import checkpoint
from outrider.train.acceptance import head_builder
from outrider.train.batches import Batch, make_batch, plan_batches
from outrider.train.calibrate import accuracy_by_rank
from outrider.train.config import TrainConfig
from outrider.train.draft_model import (
    DraftModelLearner,
    DraftModule,
    check_trainable,
    draft_model_builder,
    draw_words,
    picked_layers,
    start_layers,
)
from outrider.train.learners import HeadLearner, Learner, known_tokens
from outrider.train.loop import BEST, CHECKPOINT, LOG, Loop, Progress
from outrider.train.losses import feature_loss, hard_loss, soft_loss
from outrider.train.prepare import TrainingData
from outrider.train.run import (
    RunConfig,
    gate_sample,
    held_out_prompts,
    overfit_gate,
    read_log,
    run_time_agreement,
    train_head,
)
from outrider.train.samples import Sample
from outrider.train.setup import frozen_parts, with_vocabulary

STYLES = ("eagle", "eagle3", "eagle3.1", "eagle3-token", "medusa", "draft_model")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("train")


def make(style: str, home: Path, config: TrainConfig = FAST) -> Learner:
    model, data = tiny_model(home), tiny_data(home)
    if style != "draft_model":
        return learner(style, model, data, config)[0]
    target = runnable(model.target)
    small, tensors = start_layers(model.source, 2)
    rows = target_head_rows(target, model.source, torch.arange(target.vocab_size))
    return DraftModelLearner(
        DraftModule(small, tensors),
        frozen_parts(target, rows),
        config,
        stored=FEATURES,
        last=target.layers,
        frequent=torch.arange(target.vocab_size),
    )


def losses(folder: Path) -> list[float]:
    return [entry["loss"] for entry in read_log(folder) if entry["kind"] == "train"]


def loop(style: str, home: Path, folder: Path, config: TrainConfig = FAST, **how) -> Loop:
    data = tiny_data(home)
    return Loop(
        make(style, home, config),
        data.split(False),
        data.store,
        config,
        folder=folder,
        report_every=1,
        **how,
    )


def test_a_run_goes_on_from_a_head(home: Path, tmp_path: Path) -> None:
    """It starts from the head's values and vocabulary; another shape from what they share."""
    model, data = tiny_model(home), tiny_data(home)
    still = replace(FAST, epochs=0.01, muon_rate=1e-9, rate=1e-9, evaluate_every=1)
    first = RunConfig("eagle3", 50, replace(FAST, evaluate_every=1), gate_steps=0, held_out=2)
    train_head(model, data, first, work=tmp_path / "w1", out=tmp_path / "one")
    one = read_head(tmp_path / "one")
    for style in ("eagle3", "eagle3-token"):
        again = RunConfig(style, 20, still, gate_steps=0, held_out=2, start=tmp_path / "one")
        train_head(model, data, again, work=tmp_path / f"w-{style}", out=tmp_path / style)
        head = read_head(tmp_path / style)
        assert torch.equal(head.tensors["d2t"], one.tensors["d2t"])
        assert head.provenance["started_from"]["style"] == "eagle3"
        for name, value in one.tensors.items():
            torch.testing.assert_close(head.tensors[name], value, rtol=1e-2, atol=1e-4)


def test_a_run_goes_on_with_a_wider_vocabulary(home: Path, tmp_path: Path) -> None:
    """The former tokens keep their rows, the new ones start from the target's."""
    model, data = tiny_model(home), tiny_data(home)
    still = replace(FAST, epochs=0.01, muon_rate=1e-9, rate=1e-9, evaluate_every=1)
    first = RunConfig("medusa", 50, replace(FAST, evaluate_every=1), gate_steps=0, held_out=2)
    train_head(model, data, first, work=tmp_path / "w1", out=tmp_path / "one")
    wide = replace(first, draft_vocab_size=90, train=still, start=tmp_path / "one")
    train_head(model, data, wide, work=tmp_path / "w2", out=tmp_path / "two")
    one, two = (read_head(tmp_path / name) for name in ("one", "two"))
    former, ids = draft_ids(one), draft_ids(two)
    assert former is not None and ids is not None
    assert (len(former), len(ids)) == (50, 90)
    assert set(former.tolist()) < set(ids.tolist())
    kept = torch.isin(ids, former)
    target = runnable(model.target)
    rows = target_head_rows(target, model.source, ids).bfloat16()
    for name, value in two.tensors.items():
        if name.startswith("lm_heads."):
            torch.testing.assert_close(value[kept], one.tensors[name], rtol=1e-2, atol=1e-4)
            torch.testing.assert_close(value[~kept], rows[~kept], rtol=1e-2, atol=1e-4)
        elif name.startswith("blocks."):
            torch.testing.assert_close(value, one.tensors[name], rtol=1e-2, atol=1e-4)


def test_a_run_goes_on_from_a_draft_model(home: Path, tmp_path: Path) -> None:
    model, data = tiny_model(home), tiny_data(home)
    still = replace(FAST, epochs=0.01, muon_rate=1e-9, rate=1e-9, evaluate_every=1)
    quick = replace(FAST, evaluate_every=1)
    first = RunConfig("draft_model", 50, quick, gate_steps=0, held_out=2, layers=2)
    train_head(model, data, first, work=tmp_path / "w1", out=tmp_path / "one")
    again = replace(first, train=still, layers=3, start=tmp_path / "one")
    train_head(model, data, again, work=tmp_path / "w2", out=tmp_path / "two")
    one, two = (start_layers(model.source, 9, tmp_path / name) for name in ("one", "two"))
    assert len(two[0].layers) == 2
    fresh = start_layers(model.source, 2)[1]
    for name, value in one[1].items():
        torch.testing.assert_close(two[1][name], value, rtol=1e-2, atol=1e-4)
    assert any(not torch.equal(one[1][name], value) for name, value in fresh.items())
    write_folder(tmp_path / "other", num_key_value_heads=4)
    with pytest.raises(DrafterMismatch, match="no draft model of this target"):
        start_layers(model.source, 2, tmp_path / "other")


# ----------------------------------------------------------------------------------------- losses


def test_losses_by_hand():
    p = torch.tensor([[0.7, 0.2, 0.1]])
    q = torch.tensor([[0.5, 0.25, 0.25]])
    cross = -(p * q.log()).sum()
    assert soft_loss(q.log(), p.log(), "ce").item() == pytest.approx(cross.item())
    entropy = -(p * p.log()).sum()
    assert soft_loss(q.log(), p.log(), "kl").item() == pytest.approx((cross - entropy).item())
    assert soft_loss(p.log(), p.log() + 3, "kl").item() == pytest.approx(0, abs=1e-6)
    assert hard_loss(q.log(), torch.tensor([1])).item() == pytest.approx(-math.log(0.25))
    assert feature_loss(torch.zeros(1, 2), torch.tensor([[0.5, 2.0]])).item() == pytest.approx(
        (0.125 + 1.5) / 2
    )


def test_a_draft_model_starts_from_layers_far_apart(home):
    assert picked_layers(1, 30) == [0] and picked_layers(4, 30) == [0, 10, 19, 29]
    assert picked_layers(3, 4) == [0, 2, 3]
    source = tiny_model(home).source
    _, stored = open_folder(source)
    _, start = start_layers(source, 3)
    for place, old in enumerate(picked_layers(3, 4)):
        weight = "self_attn.q_proj.weight"
        mine, theirs = f"model.layers.{place}.{weight}", f"model.layers.{old}.{weight}"
        assert torch.equal(start[mine], stored.read(theirs))


def test_words_of_a_loss():
    """All that the batch needs, and others that stand for the rest, the same ones every time."""
    frequent, answered = torch.tensor([1, 3, 5]), torch.tensor([5, 7, 7])
    words = draw_words(frequent, answered, 20, 4)
    assert words.ids[:4].tolist() == [1, 3, 5, 7] and words.offset[:4].tolist() == [0.0] * 4
    drawn = words.ids[4:].tolist()
    assert len(set(drawn)) == 4 and not set(drawn) & {1, 3, 5, 7}
    assert words.offset[4:].exp().tolist() == pytest.approx([16 / 4] * 4)
    assert torch.equal(draw_words(frequent, answered, 20, 4).ids, words.ids)
    assert draw_words(frequent, answered + 1, 20, 4).ids.tolist() != words.ids.tolist()
    every = draw_words(frequent, answered, 20, 16)
    assert every.ids.tolist() == list(range(20)) and not every.offset.any()


def test_drawn_words_estimate_the_whole_vocabulary():
    """The mean over many draws of the sum of exponentials is that of all tokens."""
    logits = torch.randn(200, generator=torch.Generator().manual_seed(0))
    frequent = torch.arange(10)
    sums = []
    for seed in range(1, 401):
        words = draw_words(frequent, torch.tensor([seed % 10, seed // 10 % 10] * seed), 200, 40)
        sums.append(float((logits[words.ids] + words.offset).exp().sum()))
    assert sum(sums) / len(sums) == pytest.approx(float(logits.exp().sum()), rel=0.02)


@pytest.mark.parametrize("style", STYLES)
def test_every_loss_falls(style, home, tmp_path):
    config = replace(FAST, epochs=8.0, feature_weight=0.1)
    assert loop(style, home, tmp_path, config).run()
    found = losses(tmp_path)
    assert found[-1] < 0.8 * found[0]
    entries = read_log(tmp_path)
    steps = {"eagle": 2, "medusa": 4, "draft_model": 1}.get(style, 2)
    assert all(len(e["by_step"]) == len(e["agreement"]) == steps for e in entries)


def batch() -> Batch:
    """Two samples of 7 and 5 tokens with prompts of 3 and 2."""
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 0, 0]])
    features = torch.zeros(2, 6, 1, 4)
    return Batch(tokens, features, torch.tensor([7, 5]), torch.tensor([3, 2]))


def test_supervision_covers_the_answer_and_nothing_else():
    every = torch.ones(9, dtype=torch.bool)
    for step in range(4):
        rows = batch().supervised(step, every)
        for which, (length, prompt) in enumerate(((7, 3), (5, 2))):
            guessed = {row + 2 + step for row in rows[which].nonzero()[:, 0].tolist()}
            # every answer token that has the rows for it: rows begin at 0
            assert guessed == set(range(max(prompt, 2 + step), length))
    known = every.clone()
    known[5] = False  # token 5 is at positions 4 and 4
    rows = batch().supervised(0, known)
    assert rows.nonzero().tolist() == [[0, 1], [0, 3], [0, 4], [1, 0], [1, 1]]
    assert batch().guessed(rows, 0).tolist() == [4, 6, 7, 3, 4]
    assert batch().answered().nonzero()[:, 1].tolist() == [2, 3, 4, 5, 1, 2, 3]


def test_batches_hold_every_sample_once(home):
    samples = tiny_data(home).samples
    for epoch in range(3):
        plan = plan_batches(samples, rows=200, seed=1, epoch=epoch, longest=60)
        assert sorted(i for b in plan for i in b) == list(range(len(samples)))
        for chosen in plan:
            longest = max(min(len(samples[i].tokens), 60) for i in chosen)
            assert len(chosen) == 1 or len(chosen) * longest <= 200
    again = plan_batches(samples, rows=200, seed=1, epoch=0, longest=60)
    assert again == plan_batches(samples, rows=200, seed=1, epoch=0, longest=60)
    assert again != plan_batches(samples, rows=200, seed=2, epoch=0, longest=60)


@pytest.mark.parametrize("style", STYLES)
def test_answers_too_short_to_guess_count_nothing(style, home):
    """A batch without a single supervised row at a step has a loss of 0, not of NaN."""
    data = tiny_data(home)
    short = [replace(s, tokens=s.tokens[: s.prompt_length + 1]) for s in data.samples[:2]]
    made = make(style, home, replace(FAST, unroll=4))
    found, agreement = made.losses(make_batch(short, data.store, longest=80))
    assert all(torch.isfinite(value) for value in found)
    assert all(math.isfinite(share) for share in agreement)
    none = [replace(s, tokens=s.tokens[: s.prompt_length]) for s in data.samples[:2]]
    found, _ = made.losses(make_batch(none, data.store, longest=80))
    total = sum(found, torch.zeros(()))
    total.backward()
    assert total.item() == 0


# ------------------------------------------------------------------------------------- going on


@pytest.mark.parametrize("style", ["eagle3", "medusa", "draft_model"])
def test_a_stopped_run_goes_on_to_the_same_losses_bit_for_bit(style, home, tmp_path):
    config = replace(FAST, epochs=3.0, accumulate=2, save_every=2)
    whole = loop(style, home, tmp_path / "whole", config)
    assert whole.run()
    stopped = iter(range(100))
    part = loop(style, home, tmp_path / "part", config)
    assert not part.run(stop=lambda: next(stopped) == 2)
    assert part.step == 3
    with (tmp_path / "part" / LOG).open("a") as log:  # a kill between two checkpoints
        log.write('{"kind": "train", "step": 4, "loss": 7}\n{"kind": "tr')
    rest = loop(style, home, tmp_path / "part", config)
    assert rest.step == 3
    assert rest.run()
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")
    for name, tensor in whole.learner.tensors().items():
        assert torch.equal(tensor, rest.learner.tensors()[name])


def test_features_computed_online_give_the_same_losses(home, tmp_path):
    model, data = tiny_model(home), tiny_data(home)
    assert loop("eagle3", home, tmp_path / "cached").run()
    online = TrainingData.online(data.folder, model.target, features=FEATURES)
    assert [s.id for s in online.samples] == [s.id for s in data.samples]
    assert online.store.rows == data.store.rows
    run = Loop(
        make("eagle3", home),
        online.split(False),
        online.store,
        FAST,
        folder=tmp_path / "online",
        report_every=1,
    )
    assert run.run()
    assert losses(tmp_path / "online") == pytest.approx(losses(tmp_path / "cached"), rel=0.02)


def test_time_that_is_over_stops_with_a_checkpoint(home, tmp_path):
    run = loop("medusa", home, tmp_path)
    assert not run.run(until=0.0)
    assert run.step == 1
    assert (tmp_path / CHECKPOINT).exists()


def test_other_settings_or_data_are_refused(home, tmp_path):
    config = replace(FAST, epochs=1.0)
    loop("medusa", home, tmp_path, config).run()
    with pytest.raises(InvalidParameter, match=r"other settings \(decay\)"):
        loop("medusa", home, tmp_path, replace(config, decay=0.5))
    with pytest.raises(InvalidParameter, match="the drafter's shape"):
        loop("eagle3", home, tmp_path, config)
    data = tiny_data(home)
    with pytest.raises(InvalidParameter, match="the data"):
        Loop(make("medusa", home), data.samples[:5], data.store, config, folder=tmp_path)
    with pytest.raises(InvalidParameter, match="no samples"):
        Loop(make("medusa", home), [], data.store, config, folder=tmp_path)


def test_a_checkpoint_of_before_new_settings_goes_on(home, tmp_path):
    config = replace(FAST, epochs=1.0)
    loop("medusa", home, tmp_path, config).run()
    tensors, facts = checkpoint.load(tmp_path / CHECKPOINT)
    del facts["config"]["accumulate"], facts["data"]
    checkpoint.save(tmp_path / CHECKPOINT, tensors, facts)
    assert loop("medusa", home, tmp_path, config).step > 0


# --------------------------------------------------------------------------------- what goes wrong


class Poisoned:
    """A learner whose loss (or gradient alone) is NaN at one step."""

    def __init__(self, inner: Learner, at: int, *, gradient: bool) -> None:
        self.inner, self.at, self.gradient, self.calls = inner, at, gradient, 0
        self.device = inner.device

    def parameters(self):
        return self.inner.parameters()

    def tensors(self):
        return self.inner.tensors()

    def restore(self, tensors) -> None:
        self.inner.restore(tensors)

    def describe(self) -> str:
        return self.inner.describe()

    def losses(self, batch: Batch):
        found, agreement = self.inner.losses(batch)
        self.calls += 1
        if self.calls == self.at:
            zero = found[0] * 0
            # the square root's slope at 0 is infinite, and 0 times that is NaN
            found[0] = found[0] + (zero.sqrt() * 0 if self.gradient else zero * math.nan)
        return found, agreement


@pytest.mark.parametrize("gradient", [False, True])
def test_nan_stops_and_keeps_the_last_good_checkpoint(home, tmp_path, gradient):
    config, data = replace(FAST, save_every=2), tiny_data(home)
    bad = Poisoned(make("medusa", home), 4, gradient=gradient)
    run = Loop(bad, data.split(False), data.store, config, folder=tmp_path)
    what = "gradient" if gradient else "loss"
    with pytest.raises(TrainingFailed, match=rf"the {what} is nan at step 4 of .* last good"):
        run.run()
    again = loop("medusa", home, tmp_path, config)
    assert again.step == 2
    assert all(bool(torch.isfinite(t).all()) for t in again.learner.tensors().values())
    first = Poisoned(make("medusa", home), 1, gradient=gradient)
    fresh = Loop(first, data.split(False), data.store, config, folder=tmp_path / "new")
    with pytest.raises(TrainingFailed, match="nothing was saved yet"):
        fresh.run()


def test_a_full_disk_leaves_the_last_good_checkpoint(home, tmp_path, monkeypatch):
    config = replace(FAST, save_every=2)
    run = loop("medusa", home, tmp_path, config)
    real, calls = checkpoint.save_file, iter(range(100))

    def save(tensors, path, **how):
        if next(calls) == 1:
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, path, **how)

    monkeypatch.setattr(checkpoint, "save_file", save)
    with pytest.raises(NoSpace, match="the one before it is whole") as caught:
        run.run()
    assert caught.value.exit_code == 3
    assert [p.name for p in tmp_path.iterdir()].count("checkpoint.new") == 0
    assert loop("medusa", home, tmp_path, config).step == 2


def test_a_damaged_checkpoint_is_named(home, tmp_path):
    (tmp_path / CHECKPOINT).write_bytes(b"nothing")
    with pytest.raises(TrainingFailed, match="is damaged"):
        loop("medusa", home, tmp_path)


def test_settings_that_cannot_be():
    for name, value in (("rows", 0), ("unroll", 0), ("epochs", 0.0), ("muon_rate", -1.0)):
        with pytest.raises(InvalidParameter, match=name):
            TrainConfig(**{name: value})
    with pytest.raises(InvalidParameter, match="kl or ce"):
        TrainConfig(loss="l2")  # type: ignore[arg-type]
    assert json.loads(json.dumps(asdict(TrainConfig()))) == asdict(TrainConfig())


def test_states_that_the_data_lacks_are_named(home):
    made = make("eagle3", home)
    assert isinstance(made, HeadLearner)
    every = torch.arange(VOCAB)
    with pytest.raises(InvalidParameter, match=r"lacks hidden states \[2, 4\]"):
        HeadLearner(made.module, made.frozen, FAST, stored=(1, 3), draft_tokens=every)


# ------------------------------------------------------------------------------------------- gate


@pytest.mark.parametrize("style", ["eagle", "eagle3", "medusa", "draft_model"])
def test_the_gate_knows_right_wiring_from_wrong(style, home, tmp_path):
    model, data = tiny_model(home), tiny_data(home)
    target = runnable(model.target)
    sample = gate_sample(data.split(False), 80)
    draft_tokens = learner("medusa", model, data, FAST)[1]
    known = known_tokens(draft_tokens, target.vocab_size)
    if style == "draft_model":
        known = torch.ones_like(known)
    made = make(style, home)

    def at_run_time(tensors: dict[str, torch.Tensor]) -> float:
        if isinstance(made, DraftModelLearner):
            build = draft_model_builder(made.module.config, tensors, target, model.source)
        else:
            every = with_vocabulary(tensors, draft_tokens, target.vocab_size)
            head = Head(made.module.config, every)
            build = head_builder(target, head, source=model.source)
        return run_time_agreement(target, build, sample, known, longest=80)

    def gate(store) -> float:
        return overfit_gate(
            lambda: make(style, home),
            sample,
            store,
            FAST,
            folder=tmp_path / "gate",
            steps=120,
            at_run_time=at_run_time,
        )

    with pytest.raises(TrainingFailed, match="wired otherwise in training than in serving"):
        gate(ShiftedStore(data))
    assert not (tmp_path / "gate" / "passed.json").exists()
    assert gate(data.store) > 0.9
    assert gate(ShiftedStore(data)) > 0.9  # it was passed before, and is passed once


def test_the_gate_refuses_what_does_not_learn(home, tmp_path):
    data = tiny_data(home)
    config = replace(FAST, rate=1e-9)
    for _ in range(2):  # a gate that failed is not passed by trying again
        with pytest.raises(TrainingFailed, match="on the one sample of the gate after 3 steps"):
            overfit_gate(
                lambda: make("eagle3", home, config),
                data.split(False)[0],
                data.store,
                config,
                folder=tmp_path / "gate",
                steps=3,
            )


# ------------------------------------------------------------------------------------ the choices


def test_the_checkpoint_that_serves_best_is_kept(home, tmp_path):
    lengths = iter([1.5, 1.2, 1.4, 1.1])
    seen: list[Progress] = []
    config = replace(FAST, epochs=4.0, evaluate_every=1)
    run = loop(
        "medusa",
        home,
        tmp_path,
        config,
        evaluate=lambda tensors: {"acceptance_length": next(lengths, 1.0)},
        report=seen.append,
    )
    assert run.run()
    assert run.best == {"step": 1.0, "acceptance_length": 1.5}
    _, facts = checkpoint.load(tmp_path / BEST)
    assert facts["step"] == 1.0
    assert [p.step for p in seen] == list(range(1, run.steps + 1))
    assert seen[-1].eta_s == 0


def test_held_out_prompts_are_spread_over_families():
    samples = [Sample(str(i), "ab"[i > 3], (i, i, i), 2, 0.0, True) for i in range(6)]
    found = held_out_prompts(samples, 4)
    assert found == [(0, 0), (4, 4), (1, 1), (5, 5)]
    assert len(held_out_prompts(samples, 99)) == 6


def test_medusa_ranks_are_counted_along_the_path(home, tmp_path):
    model, data = tiny_model(home), tiny_data(home)
    made, _ = learner("medusa", model, data, FAST)
    samples = data.split(True)
    found = accuracy_by_rank(made, samples, data.store, longest=80)
    assert len(found) == 4 and all(len(row) == RANKS for row in found)
    assert all(0 <= sum(row) <= 1 for row in found)
    # head 0 by hand: every answer token that has a row two before it
    hits = count = second_hits = second_count = 0
    for sample in samples:
        batch = make_batch([sample], data.store, longest=80)
        [(rows, rank), (later, second), *_] = made.medusa_ranks(batch, RANKS)
        assert len(rank) == int(rows.sum()) == len(sample.answer)
        hits, count = hits + int((rank == 0).sum()), count + len(rank)
        places, seconds = rows[0].nonzero()[:, 0].tolist(), later[0].nonzero()[:, 0].tolist()
        for place, reached in zip(places, rank.tolist(), strict=True):
            if reached < RANKS and place in seconds:  # the path is in the tree
                second_count += 1
                second_hits += int(second[seconds.index(place)]) == 0
    assert found[0][0] == pytest.approx(hits / count, abs=1e-5)
    assert 0 < second_count < count
    assert found[1][0] == pytest.approx(second_hits / second_count, abs=1e-5)


def test_targets_that_no_draft_model_is_made_of(home):
    check_trainable(tiny_config("llama"), 2)
    for family, says in (
        ("mistral", "sliding windows"),
        ("qwen2", "biases"),
        ("qwen3", "norms of queries"),
        ("gemma3_text", "Gemma"),
        ("phi3", "fused"),
        ("smollm3", "mixed"),
    ):
        with pytest.raises(DrafterMismatch, match=says):
            check_trainable(tiny_config(family), 2)
    for layers in (0, 3):
        with pytest.raises(InvalidParameter, match="use 1 to 2"):
            check_trainable(tiny_config("llama"), layers)
