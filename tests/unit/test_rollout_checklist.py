"""The launch checklist: each row missing without evidence, passing with it, failing against it."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest

from outrider.cli import checklist as command
from outrider.cli.main import run
from outrider.cli.session import Session
from outrider.evaluate.certify import Section, certificate
from outrider.records.files import JsonlWriter
from outrider.records.manifest import run_manifest
from outrider.rollout.checklist import CHECKS, Evidence, Row, checklist, gather, launchable
from outrider.rollout.config import make_rollout

EAGLE = {
    "speculative": True,
    "method": "eagle3",
    "rollout": "5%",
    "limits": {"in_flight": 8},
}


def rollout(tmp_path, **keys):
    given = {
        "target": "tiny",
        "profiles": {"eagle": EAGLE},
        "state": str(tmp_path / "state"),
        "evidence": str(tmp_path / "evidence"),
        "feedback": {"folder": str(tmp_path / "feedback")},
    }
    return make_rollout({**given, **keys})


def sample(setting, **values):
    line = {
        "kind": "sample",
        "setting": setting,
        "error": None,
        "ttft_ms": 5.0,
        "tpot_ms": 5.0,
        "e2e_ms": 50.0,
        "prompt_tokens": 20,
        "concurrency": 1,
        "accepted": 3,
        "rejected_by_position": [1],
        "sampling": {"temperature": 0.0},
    }
    return ("run/samples.jsonl", {**line, **values})


def whole():
    """Evidence with which every row passes."""
    ours = [
        sample("k3", concurrency=8, prompt_tokens=900),
        sample("k5", sampling={"temperature": 0.8, "top_p": 0.9, "top_k": 40}),
    ]
    names = ("lock file", "vocabulary", "chat template", "stop tokens")
    drilled = ("contention", "cancel", "timeout", "retry", "switch", "memory")
    return Evidence(
        samples=tuple([sample("baseline")] * 100 + ours * 50),
        preflights=(("check.json", {"rows": [{"name": n, "status": "pass"} for n in names]}),),
        certificates=(
            (
                "cert.json",
                {
                    "verdict": "pass",
                    "sections": [{"name": "features", "verdict": "pass", "summary": "9 honoured"}],
                },
            ),
        ),
        drills=(("drill.json", {"rows": [{"name": n, "status": "pass"} for n in drilled]}),),
        fed_back=("feedback/eagle.jsonl",),
    )


def states(config, evidence):
    return {row.name: row.status for row in checklist(config, evidence)}


def test_without_evidence_nothing_is_claimed(tmp_path):
    rows = checklist(rollout(tmp_path), Evidence())
    assert len(rows) == len(CHECKS) == 17
    assert {row.name for row in rows if row.status == "pass"} == {"no unmarked approximate rule"}
    assert not launchable(rows)


def test_with_everything_it_can_be_launched(tmp_path):
    rows = checklist(rollout(tmp_path), whole())
    assert [row for row in rows if row.status != "pass"] == []
    assert all(row.link or "no profile" in row.detail for row in rows)


LOST = [
    ("samples", (), 8),
    ("preflights", (), 2),
    ("certificates", (), 2),
    ("drills", (), 4),
    ("fed_back", (), 1),
]


@pytest.mark.parametrize(("name", "value", "rows"), LOST, ids=[name for name, *_ in LOST])
def test_each_piece_is_needed(tmp_path, name, value, rows):
    found = states(rollout(tmp_path), replace(whole(), **{name: value}))
    lost = [row for row, state in found.items() if state == "missing"]
    assert len(lost) in (rows, rows - 1), lost


BAD = [
    (
        {"preflights": (("c", {"rows": [{"name": "vocabulary", "status": "fail"}]}),)},
        "tokenizer, template, special and stop tokens equal",
    ),
    ({"certificates": (("c", {"verdict": "fail"}),)}, "distribution or regression compared"),
    (
        {"drills": (("d", {"rows": [{"name": "retry", "status": "fail"}]}),)},
        "cancels, time-outs and retries exercised",
    ),
    (
        {"live": {"eagle": {"canary": {"": {"rates": {"out_of_memory": 0.1}}}}}},
        "memory peak, KV use and OOM",
    ),
    ({"samples": (sample("k3", lossless=False),)}, "no unmarked approximate rule"),
]


@pytest.mark.parametrize(("change", "row"), BAD, ids=[row for _, row in BAD])
def test_evidence_against_fails(tmp_path, change, row):
    assert states(rollout(tmp_path), replace(whole(), **change))[row] == "fail"


def test_a_profile_without_limits_fails(tmp_path):
    profile = {k: v for k, v in EAGLE.items() if k != "limits"}
    config = rollout(tmp_path, profiles={"eagle": profile})
    assert states(config, whole())["independent limits and the rollback switch tested"] == "fail"


def test_lookups_have_no_tokenizer_to_compare(tmp_path):
    config = rollout(tmp_path, profiles={"s": {"speculative": True, "drafter": "suffix"}})
    assert states(config, Evidence())["versions bound"] == "pass"


def test_evidence_is_found_on_disk(tmp_path):
    config = rollout(tmp_path)
    folder = tmp_path / "evidence" / "deep"
    with JsonlWriter.create(folder / "samples.jsonl", run_manifest(seed=None)) as writer:
        writer.write(sample("k3")[1])
        writer.write({"kind": "cell"})
    sealed = certificate({}, {}, [Section("greedy", "pass", "")], at="2026-11-29T10:00:00+00:00")
    (folder / "cert.json").write_text(json.dumps(sealed))
    (folder / "forged.json").write_text(json.dumps({**sealed, "verdict": "fail"}))
    (folder / "check.json").write_text('{"check": 1, "rows": []}')
    (folder / "drill.json").write_text('{"drill": 1, "rows": []}')
    (folder / "junk.json").write_text("{")
    (tmp_path / "feedback").mkdir()
    (tmp_path / "feedback" / "a.jsonl").touch()
    found = gather(config)
    assert [link for link, _ in found.samples] == ["deep/samples.jsonl"]
    assert [len(part) for part in (found.preflights, found.certificates, found.drills)] == [1] * 3
    assert found.certificates[0][0] == "deep/cert.json" and len(found.fed_back) == 1
    assert len(found.faults) == 2


class FakeGateway:
    """The operators' port, without a network."""

    def __init__(self, *, broken=False):
        self.killed, self.broken, self.calls = False, broken, []

    def get(self, path):
        return {"killed": self.killed, "profiles": {"eagle": {"report": None}}}

    def post(self, path, told):
        self.calls.append(told["on"])
        self.killed = told["on"] and not self.broken
        return {}


def test_the_drill_pulls_the_switch_and_puts_it_back():
    gateway = FakeGateway()
    assert command.pull(gateway).status == "pass"
    assert gateway.calls == [True, False] and not gateway.killed
    assert command.pull(FakeGateway(broken=True)).status == "fail"
    gateway.killed = True
    assert command.pull(gateway).status == "fail" and gateway.killed


def test_the_switch_is_put_back_when_looking_fails():
    class Dying(FakeGateway):
        def get(self, path):
            if self.calls == [True]:
                raise RuntimeError
            return super().get(path)

    gateway = Dying()
    with pytest.raises(RuntimeError):
        command.pull(gateway)
    assert gateway.calls == [True, False]


@contextmanager
def replaced(monkeypatch, gateway):
    with monkeypatch.context() as patch:
        patch.setattr(command, "Gateway", lambda url: gateway)
        yield


def test_the_command(tmp_path, capsys, monkeypatch):
    path = tmp_path / "rollout.yaml"
    path.write_text(
        "target: tiny\nprofiles: {eagle: {speculative: true, method: eagle3, rollout: 5%}}\n"
        f"evidence: {tmp_path / 'evidence'}\nstate: {tmp_path / 'state'}\n"
    )
    target = tmp_path / "rows.json"
    with replaced(monkeypatch, FakeGateway()):
        words = ["checklist", str(path), "--url", "http://x", "--drill", "--json", str(target)]
        assert run(words, session=Session()) == 1
    shown = capsys.readouterr().out
    assert "missing sweep done" in shown and "of 17 pass" in shown
    assert json.loads((tmp_path / "evidence/drill-switch.json").read_text())["rows"]
    assert len(json.loads(target.read_text())["rows"]) == 17
    assert run(["checklist", str(path), "--drill"], session=Session()) == 2


def test_a_row_is_plain():
    assert Row("a", "pass", "b").to_dict() == {
        "name": "a",
        "status": "pass",
        "detail": "b",
        "link": "",
    }
