"""`outrider train` on a tiny model, from data to a drafter that serves, and what it refuses."""

from __future__ import annotations

import html.parser
import json
import logging
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest
from models_files import write_folder
from train_fakes import LAYERS, prompts

from outrider.cli.train import Display
from outrider.drafters.heads import runnable, target_head_rows
from outrider.drafters.table import Setting, build_drafter
from outrider.errors import DrafterMismatch
from outrider.models.heads.files import Head, read_head
from outrider.models.load import load_model
from outrider.rollout.feedback import Case, FeedbackFolder
from outrider.train.acceptance import Probe, head_builder, serve
from outrider.train.feedback import read_feedback
from outrider.train.prepare import TrainingData
from outrider.train.prompts import make_prompt
from outrider.train.report import report_html
from outrider.train.run import held_out_prompts, read_log
from outrider.train.setup import (
    draft_vocabulary,
    frozen_parts,
    initial_tensors,
    stored_features,
    with_vocabulary,
)

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--max-tokens", "40", "--vocab", "200", "--rows", "768", "--weights", "fp32")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("models") / "mine", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "mine.jsonl"
    lines = [json.dumps({"messages": list(p.messages)}) for p in prompts(40)]
    lines.append(json.dumps({"prompt": "far too long " * 100}))
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def train(real_cli, target, file, tmp_path):
    def call(style: str, *words: str, out: str = "out"):
        named = ("--target", str(target), "--prompts", str(file), "--work", str(tmp_path / "work"))
        return real_cli("train", style, "--out", str(tmp_path / out), *named, *SMALL, *words)

    return call


def test_a_trained_head_is_accepted_more_than_an_untrained_one(train, target, tmp_path):
    result = train("eagle3", "--epochs", "16", "--rate", "0.02")
    assert result.code == 0, result.err
    assert "at most 0.00 GB of hidden states" in result.err
    assert "warning: 1 prompts have more than 448 tokens and are left out" in result.err
    assert "one-sample gate: 0.9" in result.err or "one-sample gate: 1.0" in result.err
    assert re.search(r"chain +\d\.\d\d   0\.\d\d", result.out)
    assert f"--drafter {tmp_path / 'out'}" in result.out
    model = load_model(target, weights="fp32")
    data = TrainingData.open(tmp_path / "work" / "data", features=stored_features(LAYERS), width=64)
    head = read_head(tmp_path / "out")
    assert head.config.features == (1, 2, 3)
    assert head.provenance["data"]["source"] == "prompts of mine.jsonl"
    assert str(tmp_path) not in json.dumps(head.provenance)
    asked = held_out_prompts(data.split(True), 4)
    build = head_builder(model.target, head, source=target)
    after = serve(model.target, build, asked, Probe(max_tokens=40))
    tokens = draft_vocabulary(
        data.split(False), size=200, vocab_size=270, always=model.target.end_tokens
    )
    decoder = runnable(model.target)
    frozen = frozen_parts(decoder, target_head_rows(decoder, target, tokens))
    start = with_vocabulary(initial_tensors(head.config, frozen, seed=0), tokens, 270)
    untrained = head_builder(model.target, Head(head.config, start), source=target)
    before = serve(model.target, untrained, asked, Probe(max_tokens=40))
    assert after.acceptance_length > before.acceptance_length + 0.3
    assert after.drafted > after.accepted > 0  # some guesses are right, some are not
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<polyline") > 6 and "http" not in page


def test_ctrl_c_stops_with_a_checkpoint_and_the_same_command_goes_on(train, tmp_path, monkeypatch):
    words = ("--epochs", "6", "--no-gate")

    def press(display: Display, progress: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as pressed:
        pressed.setattr(Display, "data", press)
        result = train("medusa", *words)
    assert result.code == 130
    assert re.search("stopped at the data; .* run the same command to go on", result.err)
    with monkeypatch.context() as pressed:
        pressed.setattr(Display, "train", press)
        result = train("medusa", *words)
    assert result.code == 130
    assert re.search(r"stopped at step \d+ of \d+; .* run the same command to go on", result.err)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "work" / "medusa" / "report.html").exists()
    steps = [e["step"] for e in read_log(tmp_path / "work" / "medusa")]
    result = train("medusa", *words)
    assert result.code == 0, result.err
    again = [e["step"] for e in read_log(tmp_path / "work" / "medusa") if e["kind"] == "train"]
    assert again[: len(steps)] == steps and len(again) > len(steps)
    provenance = read_head(tmp_path / "out").provenance
    measured = provenance.get("accuracy_by_rank") or provenance["measured_accuracy_by_rank"]
    assert len(measured) == 4
    better = provenance["trees"]["calibrated"] >= provenance["trees"]["own_probabilities"]
    assert better == ("accuracy_by_rank" in provenance)


def test_hours_that_are_over(train, tmp_path):
    result = train("medusa", "--hours", "1e-9")
    assert result.code == 0
    assert "run the same command to go on" in result.err
    assert not (tmp_path / "out").exists()


def test_a_draft_model_is_a_model(train, target, tmp_path):
    result = train("draft_model", "--epochs", "6", "--layers", "2", "--online")
    assert result.code == 0, result.err
    assert f"--drafter draft_model:{tmp_path / 'out'}" in result.out
    assert not (tmp_path / "work" / "data" / "features").exists()
    model, small = load_model(target), load_model(tmp_path / "out")
    assert len(small.target.config.layers) == 2
    assert small.tokenizer.pieces() == model.tokenizer.pieces()
    assert small.tokenizer.template == model.tokenizer.template
    setting = Setting(model.target, model.tokenizer, context=128, source=model.source)
    build_drafter(f"draft_model:{tmp_path / 'out'}", setting)


def test_a_head_of_another_target_or_template(train, target, tmp_path, caplog):
    assert train("medusa", "--epochs", "1", "--no-gate").code == 0
    model = load_model(target, weights="fp32")

    def build(folder: Path) -> None:
        setting = Setting(model.target, model.tokenizer, context=128, source=folder)
        build_drafter(str(tmp_path / "out"), setting)

    build(target)
    assert not caplog.records
    other = write_folder(tmp_path / "other", num_hidden_layers=LAYERS, rms_norm_eps=1e-6)
    with pytest.raises(DrafterMismatch, match=r"target\.config_hash"):
        build(other)
    chatty = shutil.copytree(target, tmp_path / "chatty")
    settings = json.loads((chatty / "tokenizer_config.json").read_text())
    settings["chat_template"] = "Hello! " + settings["chat_template"]
    (chatty / "tokenizer_config.json").write_text(json.dumps(settings))
    with caplog.at_level(logging.WARNING):
        build(chatty)
    assert "another chat template (template_hash" in caplog.text


def test_what_a_rollout_kept_trains_the_next_drafter(real_cli, target, tmp_path):
    folder = FeedbackFolder(tmp_path / "feedback")
    for i in range(24):
        said = [{"role": "user", "content": f"say {i}"}]
        folder.add(Case(f"r{i}", "drift", "eagle", "chat", {}, f"h{i}", said))
    judged = [{"role": "user", "content": "say 3"}]
    folder.add(Case("r90", "slow", "eagle", "chat", {}, "h3", judged))
    folder.add(Case("r91", "failed", "eagle", "chat", {}, "h91"))  # before the opt-in
    words = ("--target", str(target), "--from-feedback", str(folder.folder), *SMALL)
    out = tmp_path / "out"
    result = real_cli("train", "medusa", "--out", str(out), *words, "--epochs", "1", "--no-gate")
    assert result.code == 0, result.err
    assert "feedback: 23 prompts" in result.err
    assert "1 cases hold no prompt text" in result.err and "judged by" in result.err
    assert read_head(out).provenance["data"]["source"] == "feedback of feedback"
    features = stored_features(LAYERS)
    work = tmp_path / "out.work" / "data"
    asked = TrainingData.open(work, features=features, width=64).samples
    assert {s.family for s in asked} == {"chat"} and len({s.id for s in asked}) == 23
    assert make_prompt("", judged).id not in {s.id for s in asked}


def test_feedback_without_prompts_is_refused_in_words(real_cli, target, tmp_path):
    def refused(path: Path) -> str:
        words = ("--target", str(target), "--from-feedback", str(path))
        result = real_cli("train", "eagle3", "--out", str(tmp_path / "o"), *words)
        assert result.code == 2 and "Traceback" not in result.err
        return " ".join(result.err.split())

    folder = FeedbackFolder(tmp_path / "none")
    assert "cannot be read" in refused(folder.folder)
    folder.folder.mkdir()
    assert "holds no feedback" in refused(folder.folder)
    for i in range(3):
        folder.add(Case(f"r{i}", "drift", "eagle", "chat", {}, f"h{i}"))
    assert "no prompt text in any of its 3 cases; set feedback.text: true" in refused(folder.folder)
    assert "holds figures and hashes" in refused(folder.folder / "cases.jsonl")
    said = [{"role": "user", "content": "x"}]
    folder.add(Case("r9", "slow", "eagle", "chat", {}, "h9", said))
    assert "name " in (told := refused(folder.folder)) and "business.jsonl" in told
    assert [p.id for p in read_feedback(folder.folder / "business.jsonl").prompts] == [
        make_prompt("", said).id
    ]
    withheld = [{"role": "user", "content": ""}]  # a redaction that keeps nothing
    other = FeedbackFolder(tmp_path / "withheld")
    other.add(Case("r1", "drift", "eagle", "chat", {}, "h1", withheld))
    assert "no prompt text in any of its 1 cases" in refused(other.folder)
    with (other.folder / "training.jsonl").open("a") as file:
        file.write("{broken")
    assert "training.jsonl, line 3: no JSON object" in refused(other.folder)
    assert not (tmp_path / "o").exists()


def test_refusals_come_before_the_work(real_cli, target, file, tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    (full / "x").touch()
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    shallow = write_folder(tmp_path / "shallow")
    out = ("--out", str(tmp_path / "o"))
    named = ("--target", str(target))
    for words, code, says in (
        (("eagle9", *out, *named), 2, "eagle9"),
        (("eagle3", "--out", str(full), *named), 2, "is not empty"),
        (("eagle3", *out, *named, "--prompts", str(empty)), 2, "holds no prompts"),
        (("eagle3", *out, *named, "--prompts", str(tmp_path / "no")), 2, "cannot be read"),
        (("eagle3", *out, *named, "--epochs", "0"), 2, "epochs is 0"),
        (("eagle3", *out, *named, "--tokens", "0"), 2, "tokens is 0"),
        (("eagle3", *out, *named, "--hours", "0"), 2, "--hours is 0"),
        (("eagle3", *out, *named, "--vocab", "1"), 2, "use 2 or more"),
        (("eagle3", *out, *named, "--tokens", "1" + "0" * 17), 3, "GB are free"),
        (("eagle3", *out, "--target", str(tmp_path / "no")), 3, "no model"),
        (("eagle3", *out, "--target", str(shallow)), 2, "the target has 3 layers"),
        (("draft_model", *out, *named, "--prompts", str(file), "--layers", "4"), 2, "1 to 3"),
    ):
        result = real_cli("train", *words)
        assert result.code == code, (words, result.err)
        assert says in result.err, (words, result.err)
        assert "Traceback" not in result.err
    assert not (tmp_path / "o").exists()


# ------------------------------------------------------------------------------------------ report


class Checker(html.parser.HTMLParser):
    """Counts tags and sees that each is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        pass

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag


def test_the_report_is_a_whole_page_of_its_own():
    log = [
        {"kind": "train", "step": 20 * i, "steps": 100, "loss": 3 / i, "by_step": [3 / i, 4 / i]}
        | {"agreement": [0.1 * i, float("nan")]}
        for i in range(1, 6)
    ]
    log += [
        {"kind": "evaluate", "step": 50, "acceptance_length": 1.5, "chain_acceptance_length": 1.5}
        | {"chain_position_1": 0.4, "chain_position_2": 0.1},
        {"kind": "evaluate", "step": 100, "acceptance_length": 1.4, "chain_acceptance_length": 1.4},
    ]
    page = report_html(log, title="a < b")
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert "a &lt; b" in page and "<script" not in page and "nan" not in page
    assert "Best checkpoint: step 50, acceptance length 1.50" in page
    assert page.count("<polyline") == 2 + 1 + 1 + 2
    assert "No step has been reported yet" in report_html([], title="x")


# ---------------------------------------------------------------------------------------- tutorial


def test_the_tutorial_runs(real_cli, tmp_path, monkeypatch):
    page = (ROOT / "docs" / "tutorials" / "train-a-drafter.md").read_text("utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines()]
    assert len(commands) == 6
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "my-model", num_hidden_layers=LAYERS)
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "outrider"
        if words[1] in ("medusa", "draft_model"):
            words.append("--no-gate")  # the gates of all styles have a test of their own
        result = real_cli(*words)
        assert result.code == 0, (command, result.out, result.err)
