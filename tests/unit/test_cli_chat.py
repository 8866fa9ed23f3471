"""`outrider chat` on a fake model, driven through standard input."""

from __future__ import annotations

import io
import signal
import sys

import pytest

from outrider.cli.chat import Conversation
from outrider.testing.fakes import TableTarget

CHAT = ("chat", "fake", "--max-tokens", "12", "--seed", "1", "--temperature", "0")


@pytest.fixture
def says(monkeypatch):
    """Put lines on standard input."""

    def say(*lines: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))

    return say


def test_each_line_gets_an_answer_with_its_numbers(cli, says):
    says("hello", "and more", "/exit", "not read")
    result = cli(*CHAT)
    assert result.code == 0
    assert result.err.count("acceptance length") == 2


def test_the_end_of_input_leaves(cli, says):
    says("hello")
    assert cli(*CHAT).code == 0


def test_empty_lines_and_unknown_commands_are_not_sent(cli, says):
    says("", "   ", "/what")
    result = cli(*CHAT)
    assert "acceptance length" not in result.err
    assert result.err.count("/reset starts again") == 2  # the greeting and the unknown command


def test_the_conversation_grows_and_reset_starts_again(cli, says, monkeypatch):
    seen = []
    answer = Conversation.answer

    def spy(self, text):
        answer(self, text)
        seen.append([message["role"] for message in self.messages])

    monkeypatch.setattr(Conversation, "answer", spy)
    says("one", "two", "/reset", "three")
    cli(*CHAT, "--system", "be kind")
    turn = ["user", "assistant"]
    assert seen == [["system", *turn], ["system", *turn, *turn], ["system", *turn]]


def test_a_failed_turn_is_taken_back(cli, says):
    says("hello", "again")
    result = cli("chat", "fake", "--context-length", "20")
    assert result.code == 0
    assert len(result.error_lines) == 2 and "context" in result.error_lines[0]


def test_an_answer_gets_what_room_is_left(cli, says):
    says("hello")
    result = cli("chat", "fake", "--context-length", "30", "--max-tokens", "500")
    assert result.code == 0
    assert result.error_lines == []


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(cli, says):
    class Pressing(TableTarget):
        seen = 0

        def forward(self, segments, cache, *, features=()):
            given = super().forward(segments, cache, features=features)
            self.seen += 1
            if self.seen == 3:
                signal.raise_signal(signal.SIGINT)
            return given

    says("hello", "again")
    result = cli(*CHAT, "--drafter", "none", target=Pressing(vocab_size=259))
    assert result.code == 0
    assert result.err.count("| stopped") == 1
    assert result.err.count("acceptance length") == 2


def test_ctrl_c_at_the_prompt_leaves_with_130(cli, monkeypatch):
    def interrupted(prompt: str = "") -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    result = cli(*CHAT)
    assert result.code == 130 and "Traceback" not in result.err


def test_a_wrong_flag_is_refused_before_the_conversation(cli, says):
    says("hello")
    result = cli(*CHAT, "--top-p", "0")
    assert result.code == 2 and "top_p" in result.error_lines[0]
