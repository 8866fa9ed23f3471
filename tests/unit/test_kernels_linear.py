"""The packed linear layer against its plain twin."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.linear import (
    Linear,
    PackedLinear,
    PlainLinear,
    can_pack,
    cpu_multiplies_bf16,
    make_linear,
)

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
needs_packing = pytest.mark.skipif(
    not all(can_pack(CPU, dtype) for dtype in DTYPES), reason="this CPU or build cannot pack"
)


def layer(outputs: int, inputs: int, dtype: torch.dtype, *, bias: bool) -> tuple[Linear, Linear]:
    generator = torch.Generator().manual_seed(outputs * inputs)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    offset = torch.randn(outputs, generator=generator) if bias else None
    parts = weight.to(dtype), None if offset is None else offset.to(dtype)
    return PackedLinear(*parts), PlainLinear(*parts)


def rows(count: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)


@needs_packing
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (33, 17), (576, 1536), (1, 8)])
def test_packed_equals_plain(outputs: int, inputs: int, dtype: torch.dtype, bias: bool) -> None:
    packed, plain = layer(outputs, inputs, dtype, bias=bias)
    assert (packed.outputs, packed.inputs) == (plain.outputs, plain.inputs) == (outputs, inputs)
    assert torch.equal(packed.dense(), plain.dense())
    for count in (1, 2, 7, 64):
        x = rows(count, inputs, dtype)
        got, expected = packed(x), plain(x)
        assert got.shape == (count, outputs)
        assert got.dtype == dtype
        assert torch.allclose(got.float(), expected.float(), atol=3e-2)
        if dtype == torch.float32:
            assert torch.allclose(got, expected, atol=1e-5)


@needs_packing
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(960, 576), (576, 1536), (64, 1024), (64, 1025)])
def test_a_row_has_the_same_bits_in_any_company(
    outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    if dtype == torch.bfloat16 and not cpu_multiplies_bf16():
        pytest.skip("bf16 is made of fp32 products here")
    packed, _ = layer(outputs, inputs, dtype, bias=False)
    x = rows(64, inputs, dtype)
    alone = torch.cat([packed(x[i : i + 1]) for i in range(64)])
    for count in (2, 3, 5, 8, 16, 33, 64):
        assert torch.equal(packed(x[:count]), alone[:count]), f"{count} rows"


@needs_packing
def test_rows_of_a_wider_tensor() -> None:
    packed, plain = layer(48, 32, torch.float32, bias=False)
    wide = rows(4, 64, torch.float32)
    assert torch.allclose(packed(wide[:, 32:]), plain(wide[:, 32:]), atol=1e-5)


def test_the_plain_twin_stands_in_where_packing_is_impossible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert isinstance(make_linear(torch.ones(4, 4, dtype=torch.float64)), PlainLinear)
    assert isinstance(make_linear(torch.ones(4, 4, dtype=torch.float16)), PlainLinear)
    assert not can_pack(torch.device("cuda"), torch.bfloat16)
    monkeypatch.setattr("torch._C._has_mkldnn", False)
    assert isinstance(make_linear(torch.ones(4, 4)), PlainLinear)
