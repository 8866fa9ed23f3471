"""`outrider generate` on a fake model: what it prints, and every wrong request."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys

import pytest
import torch

from outrider.models.target import Forward
from outrider.testing.fakes import TableTarget

BASE = ("generate", "fake", "--prompt", "hello hello hello")


def test_text_on_stdout_and_numbers_on_stderr(cli):
    result = cli(*BASE, "--max-tokens", "40")
    assert result.code == 0
    assert "tokens/s" in result.err and "acceptance length" in result.err
    assert "tokens/s" not in result.out
    assert result.out.strip()


def test_json_has_the_same_text_and_tokens_for_every_drafter(cli):
    texts = {}
    for drafter in ("none", "ngram", "suffix"):
        result = cli(*BASE, "--drafter", drafter, "-n", "60", "--seed", "3", "-t", "0.8", "--json")
        assert result.code == 0, result.err
        answer = json.loads(result.out)
        assert answer["drafter"] == drafter and answer["seed"] == 3
        assert answer["summary"]["tokens"] == len(answer["tokens"]) == 60
        texts[drafter] = (answer["text"], answer["tokens"])
    assert texts["ngram"] == texts["none"] == texts["suffix"]


def test_plain_decoding_has_acceptance_length_one(cli):
    result = cli(*BASE, "--drafter", "none", "-n", "12", "--json")
    summary = json.loads(result.out)["summary"]
    assert summary["acceptance_length"] == 1.0
    assert summary["target_steps"] == 12 and summary["accepted_draft_tokens"] == 0


def test_streamed_text_equals_the_json_text(cli):
    streamed = cli(*BASE, "-n", "50", "--seed", "1").out
    whole = json.loads(cli(*BASE, "-n", "50", "--seed", "1", "--json").out)["text"]
    assert streamed.rstrip("\n") == whole.rstrip("\n")


def test_raw_skips_the_chat_template(cli):
    chat = json.loads(cli(*BASE, "-n", "1", "--json").out)["prompt_tokens"]
    raw = json.loads(cli(*BASE, "-n", "1", "--json", "--raw").out)["prompt_tokens"]
    assert raw == len("hello hello hello") < chat


def test_a_system_message_makes_the_prompt_longer(cli):
    short = json.loads(cli(*BASE, "-n", "1", "--json").out)["prompt_tokens"]
    long = json.loads(cli(*BASE, "-n", "1", "--json", "--system", "be kind").out)["prompt_tokens"]
    assert long > short


def test_the_prompt_can_come_from_a_file_or_from_stdin(cli, tmp_path, monkeypatch):
    path = tmp_path / "prompt.txt"
    path.write_text("hello hello hello", encoding="utf-8")
    expected = cli(*BASE, "-n", "8").out
    assert cli("generate", "fake", "-f", str(path), "-n", "8").out == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello hello hello")))
    assert cli("generate", "fake", "-f", "-", "-n", "8").out == expected


def test_records_are_one_json_line_per_step(cli, tmp_path):
    path = tmp_path / "steps.jsonl"
    result = cli(*BASE, "-n", "10", "--records", str(path), "--json")
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    assert sum(step["emitted"] for step in steps) == 10
    assert (
        len([s for s in steps if s["emitted"]]) == json.loads(result.out)["summary"]["target_steps"]
    )


WRONG = [
    (("--max-tokens", "0"), "max_tokens"),
    (("--max-tokens", "100000"), "max_tokens"),
    (("--max-tokens", "many"), "--max-tokens"),
    (("--temperature", "-1"), "temperature"),
    (("--temperature", "nan"), "temperature"),
    (("--temperature", "inf"), "temperature"),
    (("--top-p", "0"), "top_p"),
    (("--top-p", "1.5"), "top_p"),
    (("--top-k", "-1"), "top_k"),
    (("--min-p", "2"), "min_p"),
    (("--repetition-penalty", "0"), "repetition_penalty"),
    (("--seed", "-1"), "seed"),
    (("--seed", str(2**64)), "seed"),
    (("--stop", ""), "stop"),
    (("--drafter", "sufix"), "did you mean suffix"),
    (("--drafter", "zzz"), "use one of"),
    (("--drafter", "draft_model"), "PATH"),
    (("--rule", "guess"), "rule"),
    (("--threads", "0"), "--threads"),
    (("--context-length", "100000"), "context"),
    (("--no-such-flag",), "no-such-flag"),
]


@pytest.mark.parametrize(("flags", "word"), WRONG, ids=lambda v: " ".join(v) if v else "")
def test_a_wrong_flag_is_one_clear_line_and_code_2(cli, flags, word):
    result = cli(*BASE, *flags)
    assert result.code == 2, result.err
    [line] = result.error_lines
    assert word in line
    assert result.out == "" and "Traceback" not in result.err


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("generate", "fake"), "no prompt"),
        (("generate",), "target"),
        (("generate", "fake", "-p", ""), "empty"),
        (("generate", "fake", "-p", " \n "), "empty"),
        (("generate", "fake", "-p", "x", "-f", "y"), "both"),
        (("generate", "fake", "-f", "no/such/file"), "no/such/file"),
        (("generate", "fake", "-p", "x", "--raw", "--system", "y"), "--raw"),
        (("generate", "fake", "-p", "word " * 900), "context"),
        (("generat",), "generat"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_wrong_prompt_is_one_clear_line_and_code_2(cli, args, word):
    result = cli(*args)
    assert result.code == 2, result.err
    [line] = result.error_lines
    assert word in line.lower()


def test_a_prompt_file_that_is_not_utf8(cli, tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9")
    result = cli("generate", "fake", "-f", str(path))
    assert result.code == 2
    assert result.error_lines == [
        f"error: prompt file {path} is not UTF-8 (byte 3); convert it to UTF-8"
    ]


def test_a_records_file_that_cannot_be_written(cli, tmp_path):
    result = cli(*BASE, "-n", "2", "--records", str(tmp_path / "no" / "folder.jsonl"))
    assert result.code == 2 and "cannot be written" in result.error_lines[0]


def test_nan_logits_end_with_one_line_and_code_3(cli):
    class Broken(TableTarget):
        def forward(self, segments, cache, *, features=()):
            given = super().forward(segments, cache, features=features)
            return Forward([rows * torch.nan for rows in given.logits], given.features)

    broken = Broken(vocab_size=259)
    result = cli(*BASE, target=broken)
    assert result.code == 3
    [line] = result.error_lines
    assert "nan" in line and "Traceback" not in result.err


def test_debug_shows_the_traceback(cli):
    result = cli("--debug", *BASE, "--temperature", "-1")
    assert result.code == 2
    assert "Traceback" in result.err and "InvalidParameter" in result.err


def test_ctrl_c_finishes_the_step_and_ends_with_130(cli):
    result = cli(*BASE, "-n", "200", "--drafter", "none", target=pressing(1))
    assert result.code == 130
    assert "Traceback" not in result.err
    assert "tokens/s" in result.err  # what was said so far is accounted for


def test_a_second_ctrl_c_leaves_at_once(cli):
    result = cli(*BASE, "-n", "200", "--drafter", "none", target=pressing(2))
    assert result.code == 130
    assert "tokens/s" not in result.err and "Traceback" not in result.err


def test_ctrl_c_works_again_afterwards(cli):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever others left
    try:
        cli(*BASE, "-n", "200", "--drafter", "none", target=pressing(1))
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def pressing(times: int) -> TableTarget:
    """A target during whose third pass Ctrl-C is pressed this many times."""

    class Pressing(TableTarget):
        seen = 0

        def forward(self, segments, cache, *, features=()):
            given = super().forward(segments, cache, features=features)
            self.seen += 1
            if self.seen == 3:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            return given

    return Pressing(vocab_size=259)


def test_version(cli):
    result = cli("--version")
    assert (result.code, result.out) == (0, "outrider 0.1.0\n")
    module = [sys.executable, "-m", "outrider", "--version"]
    assert subprocess.check_output(module, text=True) == result.out


def test_help_lists_the_verbs(cli):
    result = cli("--help")
    assert result.code == 0
    for verb in ("demo", "generate", "chat", "bench", "models", "doctor"):
        assert verb in result.out


def test_a_fake_answer_repeats_itself_so_that_guessing_pays(cli):
    """Guards the tests above: with a target that never repeats they would prove little."""
    result = cli(*BASE, "-n", "120", "--drafter", "ngram", "--json")
    assert json.loads(result.out)["summary"]["accepted_draft_tokens"] > 0
