"""The check of vLLM by certificate: its command lines, its verdict, a server that never comes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "interop" / "vllm_certify.py"


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllm_certify", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module


@pytest.fixture
def launcher(check: ModuleType) -> ModuleType:
    """What the check starts servers with."""
    return sys.modules[check.server.__module__]


def test_the_servers_command_lines(launcher):
    plain = launcher.arguments(Path("m"), 1, speculate=False)
    assert "--speculative-config" not in plain and "--enforce-eager" in plain
    words = launcher.arguments(Path("m"), 1, speculate=True)
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config == {"method": "draft_model", "model": "m", "num_speculative_tokens": 3}


def test_a_wrong_engine_that_passes_is_unexpected(check):
    found = {
        "sections": [
            {"name": "greedy", "verdict": "pass"},
            {"name": "distribution", "verdict": "pass"},
        ]
    }
    [_, (_, wanted)] = check.EXPECTED
    assert check.unexpected(found, wanted) == ["distribution: pass, not fail"]
    assert check.unexpected(found, check.EXPECTED[0][1]) == []


def test_a_server_that_ends_is_reported(check, tmp_path):
    log = tmp_path / "log"
    with (
        pytest.raises(SystemExit, match="ended"),
        check.server(Path(sys.executable), tmp_path, log, speculate=False),
    ):
        raise AssertionError("it cannot have started")
