"""Records, manifests and record files: the arithmetic, the invariants, and survival of crashes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import OutriderError
from outrider.records import files, manifest
from outrider.records.files import (
    JsonlWriter,
    RecordFileError,
    read_json,
    read_jsonl,
    write_json,
)
from outrider.records.manifest import RunManifest, TargetIdentity, run_manifest
from outrider.records.request import (
    AcceptanceRecord,
    InvalidRecord,
    RequestRecord,
    RequestTimings,
    acceptance_record,
    by_position,
    request_record,
    tpot_ms,
)
from outrider.records.step import StepRecord


def step(
    proposed: int,
    accepted: int,
    emitted: int | None = None,
    *,
    depth: int | None = None,
    drafter: str = "ngram",
    rule: str = "walk",
    lossless: bool = True,
) -> StepRecord:
    return StepRecord(
        request=1,
        step=0,
        drafter=drafter,
        rule=rule,
        precision="int8",
        lossless=lossless,
        proposed=proposed,
        proposed_depth=proposed if depth is None else depth,
        offered=proposed,
        accepted=accepted,
        emitted=accepted + 1 if emitted is None else emitted,
        rows=proposed + 1,
        sequences=1,
        draft_ms=1.0,
        verify_ms=10.0,
        host_ms=0.5,
    )


PREFILL = step(0, 0, 0)
STEPS = [PREFILL, step(0, 0), step(4, 4), step(4, 1), step(4, 0), step(2, 2, 1), step(3, 3, 3)]


def record_of(steps: list[StepRecord], **changes: object) -> RequestRecord:
    made = request_record(
        steps,
        RequestTimings(queue_s=0.25, ttft_ms=100.0, e2e_ms=400.0),
        id="code-01",
        family="code",
        sampling={"temperature": 0.0, "max_tokens": 64},
        prompt_tokens=12,
        finish_reason="stop",
        seed=7,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


class TestAcceptance:
    def test_counts_by_hand(self) -> None:
        record = acceptance_record(STEPS)
        assert record.num_spec_steps == 6
        assert record.per_step_accepted == (0, 4, 1, 0, 1, 3)
        assert record.per_step_drafted == (0, 4, 4, 4, 2, 3)
        assert record.num_accepted_draft_tokens == 9
        assert record.num_draft_tokens == 17
        assert record.acceptance_histogram == {0: 2, 1: 2, 3: 1, 4: 1}
        assert record.mean_acceptance_length == pytest.approx(1 + 9 / 6)
        assert record.draft_acceptance_rate == pytest.approx(9 / 17)
        assert record.completion_tokens == 1 + 5 + 2 + 1 + 1 + 3

    def test_plain_decoding_has_length_one_and_no_reduction(self) -> None:
        record = record_of([PREFILL, PREFILL, *[step(0, 0, drafter="none")] * 5])
        assert record.acceptance is not None
        assert record.acceptance.mean_acceptance_length == 1.0
        assert record.acceptance.draft_acceptance_rate is None
        assert record.target_steps == 5
        assert record.prefill_steps == 2
        assert record.target_forward_reduction == 0.0
        assert record.drafter == "none"

    def test_no_step_at_all(self) -> None:
        record = record_of([])
        assert record.acceptance is not None
        assert record.acceptance.mean_acceptance_length is None
        assert record.target_forward_reduction is None
        assert record.tpot_ms is None

    def test_positions_by_hand(self) -> None:
        accepted, rejected = by_position(STEPS)
        # The truncated step (2 guesses, both accepted, one emitted) rejects nothing, nor does the
        # one that ended on its last accepted token.
        assert accepted == (4, 2, 2, 1)
        assert rejected == (1, 1, 0, 0)

    def test_positions_of_a_tree_count_depth_not_nodes(self) -> None:
        accepted, rejected = by_position([step(7, 1, depth=3), step(7, 3, depth=3)])
        assert accepted == (2, 1, 1)
        assert rejected == (0, 1, 0)

    @pytest.mark.parametrize(
        "bad",
        [step(2, 3, depth=2), step(4, 3, depth=2), step(1, 0, depth=2), step(3, 1, emitted=3)],
    )
    def test_a_step_that_contradicts_itself_is_refused(self, bad: StepRecord) -> None:
        with pytest.raises(InvalidRecord, match="step 0"):
            acceptance_record([bad])

    @given(
        st.lists(
            st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 7), st.integers(0, 3))
        )
    )
    @settings(max_examples=200, deadline=None)
    def test_invariants_hold_for_every_run_of_steps(
        self, shapes: list[tuple[int, int, int, int]]
    ) -> None:
        steps = [
            step(depth + extra, min(a, depth), min(e, min(a, depth) + 1), depth=depth)
            if depth
            else step(0, 0, min(e, 1))
            for depth, a, e, extra in shapes
        ]
        record = record_of(steps)
        acceptance = record.acceptance
        assert acceptance is not None
        acceptance.check()
        assert sum(record.accepted_by_position) == acceptance.num_accepted_draft_tokens
        assert sum(record.rejected_by_position) <= record.target_steps
        assert list(record.accepted_by_position) == sorted(
            record.accepted_by_position, reverse=True
        )
        assert record.completion_tokens == sum(s.emitted for s in steps)
        for depth, (a, r) in enumerate(
            zip(record.accepted_by_position, record.rejected_by_position, strict=True), start=1
        ):
            offered = [s for s in steps if s.emitted and s.proposed_depth >= depth]
            assert a + r <= len(offered)
            brute = sum(s.accepted == depth - 1 and s.emitted == s.accepted + 1 for s in offered)
            assert r == brute
        assert RequestRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record


class TestCheck:
    GOOD = AcceptanceRecord(
        engine="x",
        mean_acceptance_length=2.0,
        draft_acceptance_rate=0.5,
        acceptance_histogram={0: 1, 2: 1},
        num_accepted_draft_tokens=2,
        num_draft_tokens=4,
        num_spec_steps=2,
        per_step_accepted=(0, 2),
        per_step_drafted=(2, 2),
    )

    def test_good(self) -> None:
        assert self.GOOD.check() is self.GOOD

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"num_spec_steps": 3}, "num_spec_steps"),
            ({"acceptance_histogram": {0: 1, 1: 1}}, "num_accepted_draft_tokens"),
            ({"acceptance_histogram": {0: 1, 2: -1}}, "at least 0"),
            ({"num_draft_tokens": 1, "per_step_drafted": None}, "exceeds"),
            ({"per_step_accepted": (2,)}, "length of per_step_accepted"),
            ({"per_step_accepted": (0, 1)}, "sum of per_step_accepted"),
            ({"per_step_drafted": (4, 0)}, "step 1 accepted 2 of 0"),
            ({"num_draft_tokens": 4.0}, "integer"),
            ({"num_spec_tokens": True}, "integer"),
            ({"completion_tokens": -1}, "completion_tokens"),
        ],
    )
    def test_each_invariant_is_held(self, changes: dict[str, object], message: str) -> None:
        with pytest.raises(InvalidRecord, match=message):
            replace(self.GOOD, **changes).check()  # type: ignore[arg-type]

    def test_floats_are_not_derived_again(self) -> None:
        replace(self.GOOD, mean_acceptance_length=2.0000001).check()

    @pytest.mark.parametrize(
        "data",
        [
            {},
            {"engine": "x"},
            {**GOOD.to_dict(), "acceptance_histogram": None},
            {**GOOD.to_dict(), "acceptance_histogram": {"a": 1}},
            {**GOOD.to_dict(), "per_step_accepted": 3},
            {**GOOD.to_dict(), "per_step_accepted": ["0", "2"]},
        ],
    )
    def test_malformed_input_is_one_kind_of_error(self, data: dict[str, object]) -> None:
        with pytest.raises(InvalidRecord):
            AcceptanceRecord.from_dict(data)

    def test_unknown_keys_are_left_alone(self) -> None:
        assert AcceptanceRecord.from_dict({**self.GOOD.to_dict(), "new": 1}) == self.GOOD


class TestRequest:
    def test_fields_and_names(self) -> None:
        record = record_of(STEPS)
        data = record.to_dict()
        assert {f.name for f in fields(AcceptanceRecord)} <= set(data)
        assert data["tpot_ms"] == pytest.approx((400 - 100) / (13 - 1))
        assert data["draft_ms"] == 6.0
        assert data["prefill_ms"] == 11.5
        assert data["acceptance_histogram"] == {"0": 2, "1": 2, "3": 1, "4": 1}

    def test_tpot_needs_two_tokens(self) -> None:
        assert tpot_ms(e2e_ms=10, ttft_ms=5, tokens=1) is None
        assert tpot_ms(e2e_ms=10, ttft_ms=None, tokens=9) is None
        assert tpot_ms(e2e_ms=10, ttft_ms=5, tokens=2) == 5

    def test_drafters_rules_and_the_lossy_mark(self) -> None:
        record = record_of(
            [
                step(0, 0, drafter="none"),
                step(2, 1, drafter="suffix"),
                step(2, 1, drafter="ngram", rule="typical", lossless=False),
                step(2, 1, drafter="suffix"),
            ]
        )
        assert record.drafter == "suffix+ngram"
        assert record.rule == "walk+typical"
        assert record.lossless is False

    def test_incomplete_record_is_refused(self) -> None:
        data = record_of(STEPS).to_dict()
        del data["e2e_ms"]
        with pytest.raises(InvalidRecord, match="e2e_ms"):
            RequestRecord.from_dict(data)


DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "records.md"


@pytest.mark.parametrize("record", [RequestRecord, AcceptanceRecord, StepRecord, RunManifest])
def test_every_field_is_documented(record: type[RequestRecord]) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    names = {f.name for f in fields(record)} - {"acceptance"}  # lies flat in the file
    assert {name for name in names if f"`{name}`" not in text} == set()


class TestManifest:
    def test_round_trip_and_finish(self) -> None:
        made = run_manifest(
            seed=3,
            threads=2,
            target=TargetIdentity("toy", "abc", "float32"),
            options={"draft": {"max": 4}},
            command=["outrider", "eval"],
        )
        ended = made.finish()
        assert ended.finished is not None
        assert made.finished is None
        assert RunManifest.from_dict(json.loads(json.dumps(ended.to_dict()))) == ended
        assert made.versions["python"].startswith("3.")
        assert made.machine.usable_cores >= 1

    def test_secrets_are_masked(self) -> None:
        made = run_manifest(
            seed=None,
            command=[
                *("outrider", "--api-key", "-s1", "--hf-token=s2", "--max-tokens", "256"),
                *("--header", "Authorization: Bearer s3", "http://user:s4@host/v1", "--seed", "5"),
            ],
            options={"api_key": "s5", "backend": {"token": "s6", "urls": ["http://u:s7@h"]}},
        )
        text = json.dumps(made.to_dict())
        assert not any(f"s{i}" in text for i in range(1, 8))
        assert '"--max-tokens", "256"' in text
        assert '"--seed", "5"' in text
        assert "//user:***@host/v1" in text

    @pytest.mark.parametrize("schema", [manifest.SCHEMA_VERSION + 1, None, "1"])
    def test_newer_schema_is_refused(self, schema: object) -> None:
        data = {**run_manifest(seed=1).to_dict(), "schema": schema}
        with pytest.raises(InvalidRecord, match="schema"):
            RunManifest.from_dict(data)

    def test_a_foreign_checkout_is_not_ours(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
        module = tmp_path / "manifest.py"
        module.write_text("")
        monkeypatch.setattr(manifest, "__file__", str(module))
        assert manifest.checkout() == (None, None)
        git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@e"]
        subprocess.run([*git, "add", "manifest.py"], check=True)
        subprocess.run([*git, "commit", "-q", "-m", "m", "--no-verify"], check=True)
        commit, dirty = manifest.checkout()
        assert commit is not None
        assert dirty is False
        module.write_text("changed")
        assert manifest.checkout() == (commit, True)

    def test_without_git(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        assert manifest.checkout() == (None, None)

    def test_records_need_no_torch(self) -> None:
        code = (
            "import sys, outrider.records.files, outrider.records.request; "
            "from outrider.records.manifest import run_manifest; run_manifest(seed=1); "
            "sys.exit('torch' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def made() -> RunManifest:
    return run_manifest(seed=1, command=["test"])


class TestFiles:
    def test_write_read_finish(self, tmp_path: Path, made: RunManifest) -> None:
        path = tmp_path / "new" / "run.jsonl"
        with JsonlWriter.create(path, made) as writer:
            writer.write({"a": 1})
            writer.write({"text": "zwei\nZeilen ü"})
            assert not read_jsonl(path).finished  # readable while it grows
            writer.finish()
        found = read_jsonl(path)
        assert found.records == ({"a": 1}, {"text": "zwei\nZeilen ü"})
        assert found.finished
        assert not found.torn
        assert found.bad_lines == ()
        assert json.loads(path.read_text().splitlines()[0])["manifest"]["seed"] == 1

    def test_an_existing_file_is_not_overwritten(self, tmp_path: Path, made: RunManifest) -> None:
        path = tmp_path / "run.jsonl"
        path.write_text("precious")
        with pytest.raises(RecordFileError, match="exists already"):
            JsonlWriter.create(path, made)
        assert path.read_text() == "precious"

    def test_a_file_cut_anywhere_keeps_its_whole_lines(
        self, tmp_path: Path, made: RunManifest
    ) -> None:
        path = tmp_path / "run.jsonl"
        with JsonlWriter.create(path, made) as writer:
            for i in range(3):
                writer.write({"i": i, "ü": "é"})
        data = path.read_bytes()
        first = data.index(b"\n") + 1
        for size in range(first, len(data) + 1):
            path.write_bytes(data[:size])
            whole = data[first:size].count(b"\n")
            found = read_jsonl(path)
            assert [r["i"] for r in found.records] == list(range(whole))
            assert found.torn == (not data[:size].endswith(b"\n"))
            with JsonlWriter.resume(path) as writer:
                writer.write({"i": 99})
            again = read_jsonl(path)
            assert [r["i"] for r in again.records] == [*range(whole), 99]
            assert not again.torn
            assert not again.bad_lines

    @pytest.mark.parametrize("text", ["", "{", '{"a": 1}\n', "[]\n", '{"manifest": 3}\n'])
    def test_a_file_without_manifest_is_refused(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "run.jsonl"
        path.write_text(text)
        with pytest.raises(RecordFileError, match="line 1"):
            read_jsonl(path)
        with pytest.raises(RecordFileError):
            JsonlWriter.resume(path)

    def test_bad_lines_are_named_and_the_rest_is_kept(
        self, tmp_path: Path, made: RunManifest
    ) -> None:
        path = tmp_path / "run.jsonl"
        with JsonlWriter.create(path, made) as writer:
            writer.write({"i": 0})
        with path.open("ab") as file:
            file.write(b'{"i": \n\xff\xfe\n[1]\n\n' + b"[" * 100_000 + b'\n{"i": 1}\n')
        found = read_jsonl(path)
        assert [r["i"] for r in found.records] == [0, 1]
        assert [bad.number for bad in found.bad_lines] == [3, 4, 5, 6, 7]
        assert "UTF-8" in found.bad_lines[1].reason
        assert not found.torn

    def test_resuming_a_finished_run_reopens_it(self, tmp_path: Path, made: RunManifest) -> None:
        path = tmp_path / "run.jsonl"
        with JsonlWriter.create(path, made) as writer:
            writer.finish()
        with JsonlWriter.resume(path) as writer:
            writer.write({"i": 1})
        assert not read_jsonl(path).finished
        with JsonlWriter.resume(path) as writer:
            writer.finish()
        assert read_jsonl(path).finished

    def test_what_is_not_json_is_refused_and_not_written(
        self, tmp_path: Path, made: RunManifest
    ) -> None:
        path = tmp_path / "run.jsonl"
        with JsonlWriter.create(path, made) as writer:
            size = path.stat().st_size
            for bad in ({"x": float("nan")}, {"x": object()}):
                with pytest.raises(RecordFileError, match="not JSON"):
                    writer.write(bad)
            assert path.stat().st_size == size
        with pytest.raises(RecordFileError, match="closed"):
            writer.write({})

    def test_a_full_disk_is_one_clear_error_and_leaves_whole_lines(
        self, tmp_path: Path, made: RunManifest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "run.jsonl"
        writer = JsonlWriter.create(path, made)
        writer.write({"i": 0})
        real = os.write
        calls: list[int] = []

        def full(descriptor: int, data: memoryview) -> int:
            calls.append(len(data))
            if len(calls) > 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(descriptor, data[:5])

        monkeypatch.setattr(files.os, "write", full)
        with pytest.raises(OutriderError, match="disk is full") as caught:
            writer.write({"i": 1})
        assert caught.value.exit_code == 3
        monkeypatch.undo()
        writer.write({"i": 2})
        writer.close()
        found = read_jsonl(path)
        assert [r["i"] for r in found.records] == [0, 2]
        assert not found.bad_lines

    def test_a_full_disk_at_creation_leaves_no_file(
        self, tmp_path: Path, made: RunManifest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(descriptor: int, data: memoryview) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(files.os, "write", full)
        with pytest.raises(RecordFileError, match="disk is full"):
            JsonlWriter.create(tmp_path / "run.jsonl", made)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
    def test_the_real_thing(self, made: RunManifest) -> None:
        writer = JsonlWriter(Path("/dev/full"), made, os.open("/dev/full", os.O_WRONLY))
        with pytest.raises(RecordFileError, match="disk is full"):
            writer.write({"i": 1})

    def test_json_is_replaced_whole(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "deep" / "report.json"
        write_json(path, {"v": 1})
        assert read_json(path) == {"v": 1}

        def fails(source: str, target: Path) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(files.os, "replace", fails)
        with pytest.raises(RecordFileError, match="disk is full"):
            write_json(path, {"v": 2})
        with pytest.raises(RecordFileError, match="not JSON"):
            write_json(path, {"v": float("inf")})
        assert read_json(path) == {"v": 1}
        assert [p.name for p in path.parent.iterdir()] == ["report.json"]

    @pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"{"])
    def test_reading_what_is_no_document(self, tmp_path: Path, data: bytes) -> None:
        path = tmp_path / "x.json"
        path.write_bytes(data)
        with pytest.raises(RecordFileError, match=r"x\.json"):
            read_json(path)
        with pytest.raises(RecordFileError, match="cannot be read"):
            read_json(tmp_path / "missing.json")
