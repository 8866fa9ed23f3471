"""The simulations under benchmarks/ still run; figures of record are in benchmarks/results."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_verdicts():
    module = script("rollout_verdicts")
    found = module.measure(module.CASES[2], runs=3, seed=1)
    assert found["runs"] == 3 and 0 <= found["taken_back"] <= 1
    assert module.taken_back(module.Case("x", 60, 2, 5.0, 0.95), 0) == "tpot"


def test_planner(tmp_path):
    words = ["--requests", "500", "--replicas", "2", "--json", str(tmp_path / "out.json")]
    assert script("capacity_planner").main(words) == 0
    assert set(json.loads((tmp_path / "out.json").read_text())["results"]) == {
        "plain",
        "speculative",
    }
