"""Workloads: the built-in prompts keep their promises, and bad files are named by line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from outrider.errors import InvalidParameter
from outrider.evaluate.workloads import (
    FAMILIES,
    Message,
    Prompt,
    load_workload,
    parse_workload,
)

LONG_NEEDED = {"edit": 3, "extract": 3, "summarize": 3, "agent": 3, "chat": 2, "code": 2}


class TestBuiltin:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_each_family_keeps_its_promises(self, family: str) -> None:
        prompts = load_workload(f"builtin:{family}")
        assert len(prompts) >= 12
        long = 0
        for prompt in prompts:
            assert prompt.family == family
            assert prompt.id.startswith(f"{family}-")
            assert prompt.licence == "CC0-1.0"
            # The tag says what the text is: long is more than 600 words.
            assert ("long" in prompt.tags) == (prompt.words > 600)
            assert ("short" in prompt.tags) != ("long" in prompt.tags)
            # Far below a context of 8192 tokens, with room for an answer that copies it all.
            assert sum(len(m.content) for m in prompt.messages) < 12_000
            turns = [m.role for m in prompt.messages if m.role != "system"]
            assert turns == [("user", "assistant")[i % 2] for i in range(len(turns))]
            assert all(m.content == m.content.strip() for m in prompt.messages)
            long += "long" in prompt.tags
        assert long >= LONG_NEEDED.get(family, 1)
        assert len(prompts) - long >= 6

    def test_prompts_are_diverse(self) -> None:
        """No two prompts ask with the same words: last messages share few runs of eight words."""
        prompts = load_workload("builtin:all")
        seen: Counter[tuple[str, ...]] = Counter()
        for prompt in prompts:
            words = prompt.messages[-1].content.split()
            runs = {tuple(words[i : i + 8]) for i in range(len(words) - 7)}
            seen.update(runs)
        shared = sum(times > 1 for times in seen.values())
        assert shared < 0.005 * len(seen)

    def test_agents_are_conversations_that_repeat_their_context(self) -> None:
        for prompt in load_workload("builtin:agent"):
            assert len(prompt.messages) >= 4
            assert any("Tool result" in m.content for m in prompt.messages)

    def test_all_takes_the_families_in_turn(self) -> None:
        everything = load_workload("builtin:all")
        assert len(everything) == sum(len(load_workload(f"builtin:{f}")) for f in FAMILIES)
        assert len({prompt.id for prompt in everything}) == len(everything)
        assert [p.family for p in load_workload("builtin:all", limit=8)] == list(FAMILIES)

    def test_limit(self) -> None:
        assert load_workload("builtin:chat", limit=3) == load_workload("builtin:chat")[:3]
        assert load_workload("builtin:chat", limit=999) == load_workload("builtin:chat")
        for limit in (0, -1):
            with pytest.raises(InvalidParameter, match="limit"):
                load_workload("builtin:chat", limit=limit)

    @pytest.mark.parametrize("name", ["", "poetry", "../chat", "Chat"])
    def test_unknown_family_names_the_known_ones(self, name: str) -> None:
        with pytest.raises(InvalidParameter, match="summarize"):
            load_workload(f"builtin:{name}")

    def test_needs_no_torch(self) -> None:
        code = (
            "import sys; from outrider.evaluate.workloads import load_workload; "
            "load_workload('builtin:all'); sys.exit('torch' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestFiles:
    def test_the_shortest_line(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.jsonl"
        path.write_bytes(b'\xef\xbb\xbf{"prompt": "Hi"}\r\n\n{"prompt": "Bye", "other": 1}')
        assert load_workload(str(path)) == (
            Prompt("mine:1", "mine", (), "unknown", (Message("user", "Hi"),)),
            Prompt("mine:3", "mine", (), "unknown", (Message("user", "Bye"),)),
        )

    def test_the_whole_schema_round_trips(self) -> None:
        first = load_workload("builtin:agent")[0]
        line = {
            "id": first.id,
            "family": first.family,
            "tags": list(first.tags),
            "licence": first.licence,
            "messages": first.chat(),
        }
        data = json.dumps(line).encode()
        assert parse_workload(data, name="x", family="other") == (first,)

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (b"{", "not JSON"),
            (b"[" * 100_000, "not JSON"),
            (b'"text"', "an object"),
            (b"{}", 'either "prompt" or "messages"'),
            (b'{"prompt": "a", "messages": []}', 'either "prompt" or "messages"'),
            (b'{"prompt": ""}', "prompt must be a non-empty string"),
            (b'{"prompt": 3}', "prompt must be a non-empty string, got 3"),
            (b'{"prompt": "\\ud800"}', "surrogate"),
            (b'{"prompt": "a", "id": 3}', "id must be"),
            (b'{"prompt": "a", "tags": "short"}', "tags must be a list"),
            (b'{"prompt": "a", "id": "first"}', "'first' is taken by line 1"),
            (b'{"messages": []}', "at least one message"),
            (b'{"messages": ["a"]}', "message 0"),
            (b'{"messages": [{"role": "boss", "content": "a"}]}', "role 'boss'"),
            (b'{"messages": [{"role": "user"}]}', "content must be"),
            (b'{"messages": [{"role": "system", "content": "a"}]}', "the last message"),
            (b'{"prompt": "caf\xe9"}', "byte 16 is not UTF-8"),
        ],
    )
    def test_bad_lines_are_named(self, line: bytes, message: str) -> None:
        good = b'{"prompt": "a", "id": "first"}\n\n'
        with pytest.raises(InvalidParameter, match="mine, line 3") as caught:
            parse_workload(good + line + b"\n", name="mine", family="f")
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_files_that_are_not_there_or_empty(self, tmp_path: Path) -> None:
        for spec in (str(tmp_path / "no.jsonl"), str(tmp_path), "a\0b"):
            with pytest.raises(InvalidParameter, match="cannot be read"):
                load_workload(spec)
        (tmp_path / "empty.jsonl").write_text("\n \n")
        with pytest.raises(InvalidParameter, match="no prompt"):
            load_workload(str(tmp_path / "empty.jsonl"))
