"""Trained heads keep every law of drafters, with the true features of a tiny target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from heads_fakes import tiny_data, tiny_target, trained_head
from outrider.drafters import conformance as kit
from outrider.drafters.base import Drafter
from outrider.drafters.growth import TreeShape
from outrider.drafters.heads import make_drafter
from outrider.kernels import native
from outrider.train.features import compute_features

pytestmark = pytest.mark.skipif(bool(native.unavailable()), reason="no native kernels here")

MAKERS = ("medusa", "eagle", "eagle3", "eagle3-chain", "eagle3.1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


def features(tokens: Sequence[int], layers: tuple[int, ...]) -> torch.Tensor:
    """[T, F, D], also of the last token."""
    [rows] = compute_features(tiny_target("native"), [[*tokens, 0]], layers)
    return rows


def bench(name: str, folder: Path) -> kit.Bench:
    head = trained_head(name.removesuffix("-chain"), folder)

    def make() -> Drafter:
        return make_drafter(
            head,
            tiny_target("native"),
            source=None,
            shape=TreeShape(1, 1) if name.endswith("-chain") else TreeShape(3, 2),
            sequences=16,
            length=128,
        )

    samples = tiny_data(folder / "data").samples[:4]
    texts = tuple(kit.Text(s.tokens[: s.prompt_length], s.answer) for s in samples)
    return kit.Bench(make, 97, features, texts=texts)


@pytest.mark.parametrize("law", kit.LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("name", MAKERS)
def test_law(name: str, law: kit.Law, folder: Path) -> None:
    law(bench(name, folder))


@pytest.mark.parametrize("name", MAKERS)
def test_the_laws_are_not_kept_by_silence(name: str, folder: Path) -> None:
    setup = bench(name, folder)
    drive, guessed = setup.run(), 0
    for i, text in enumerate(setup.texts or ()):
        for length in range(len(text.prompt), len(text.tokens)):
            drive.advance(i, text, length)
            guessed += len(drive.propose(i, setting=1)) - 1
    assert guessed > 40
