"""Muon, and numbers too small to count."""

from __future__ import annotations

import pytest
import torch

from outrider.train.muon import Muon, denormals_as_zero, orthogonal


@pytest.mark.parametrize("shape", [(48, 48), (32, 96), (96, 32)])
def test_an_orthogonal_update_keeps_directions_and_evens_sizes(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
    sizes = sizes.clamp(min=0.05 * float(sizes.max()))
    update = orthogonal(left * sizes @ right, torch.float32)
    inside = left.T @ update @ right.T
    assert (inside.diagonal() > 0.6).all() and (inside.diagonal() < 1.25).all()
    assert (inside - inside.diagonal().diag()).abs().max() < 1e-3


def test_steps_are_those_of_the_other_implementation():
    """PyTorch's own, which multiplies in bf16, moves the same way to what bf16 can tell."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(40, 64, generator=generator)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    settings = {"lr": 0.02, "weight_decay": 0.1}
    mine = Muon([ours], **settings)
    other = torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **settings)
    for _ in range(4):
        gradient = torch.randn(40, 64, generator=generator)
        ours.grad, theirs.grad = gradient, gradient.clone()
        mine.step()
        other.step()
    moved = (ours - start).norm()
    assert moved > 0.5
    assert (ours - theirs).norm() < 0.03 * moved


def test_what_has_no_gradient_stays():
    still = torch.nn.Parameter(torch.ones(3, 3))
    Muon([still], lr=1.0, weight_decay=0.5).step()
    assert torch.equal(still, torch.ones(3, 3))


def test_denormals_are_zero_meanwhile_and_as_before_afterwards():
    def lives() -> bool:
        return bool((torch.full((4,), 1e-30) * 1e-10 != 0).all())

    assert lives()
    with denormals_as_zero():
        assert not lives()
        with denormals_as_zero():
            pass
        assert not lives()
    assert lives()
    with pytest.raises(ZeroDivisionError), denormals_as_zero():
        raise ZeroDivisionError
    assert lives()
