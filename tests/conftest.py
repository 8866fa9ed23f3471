"""What all tests share: determinism, a cache of their own, and the command line on a fake model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from outrider.cli.main import run
from outrider.cli.session import ProgressCallback, Session
from outrider.engine.budget import CostTable
from outrider.models.target import Target
from outrider.testing.fakes import ByteTokenizer, TableTarget

# Tiny tensors gain nothing from threads, and a pool that waits for a busy core costs seconds.
torch.set_num_threads(1)

# The same examples in every run, and no verdict that depends on how busy the machine is.
settings.register_profile("outrider", derandomize=True, deadline=None)
settings.load_profile("outrider")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements made by tests do not end up in the user's cache."""
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("OUTRIDER_CACHE", str(folder))


@dataclass(frozen=True)
class FakeModel:
    """A target with known answers and its tokenizer, as a loader gives them."""

    target: Target
    tokenizer: ByteTokenizer
    source: Path = Path("fake")


@dataclass(frozen=True)
class Outcome:
    """How a command line ended."""

    code: int
    out: str
    err: str

    @property
    def error_lines(self) -> list[str]:
        """The lines on stderr that say what is wrong."""
        return [line for line in self.err.splitlines() if line.lower().startswith("error")]


Cli = Callable[..., Outcome]


def byte_target(*, kind: type[TableTarget] = TableTarget) -> TableTarget:
    """A target over the byte tokenizer's vocabulary that soon repeats itself, so guessing pays."""
    return kind(
        vocab_size=ByteTokenizer.vocab_size,
        order=1,
        sharpness=8.0,
        ripple=0.0,
        context_length=4096,
    )


@pytest.fixture
def fake_target() -> Callable[..., TableTarget]:
    """Makes targets like the fake model's; ``kind`` takes a subclass of `TableTarget`."""
    return byte_target


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run a command line on a fake model named "fake", or on the target that is given.

    Costs are those of a model for which guessing pays; the fake's own say nothing about a model.
    """
    costs = CostTable({1: 100.0, 16: 110.0})
    monkeypatch.setattr("outrider.engine.engine.cached_costs", lambda *args, **options: costs)

    def call(*args: str, target: Target | None = None) -> Outcome:
        def load(
            spec: str, *, weights: str, device: str, exact: bool, progress: ProgressCallback
        ) -> FakeModel:
            assert spec == "fake", f"the test wanted the fake model, not {spec}"
            progress("weights", 1.0)
            return FakeModel(target or byte_target(), ByteTokenizer())

        code = run(args, session=Session(load=load))  # type: ignore[arg-type]
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


@pytest.fixture
def real_cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command line with the library's own loader."""

    def call(*args: str) -> Outcome:
        code = run(args, session=Session())
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call
