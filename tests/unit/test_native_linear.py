"""The native linear layers against their twins: shapes, tails, threads and instruction sets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import InvalidParameter
from outrider.kernels import native, quantised
from outrider.kernels.quantised import FloatWeight, Int8GroupsWeight, Weight

pytestmark = pytest.mark.skipif(bool(native.unavailable()), reason=native.unavailable())

KINDS = ("fp32", "bf16", "int8", "int4", "int8_groups")


@pytest.fixture(autouse=True)
def _best_isa() -> Iterator[None]:
    yield
    native.use_isa("")


def make_weight(kind: str, outputs: int, inputs: int, seed: int = 0) -> Weight:
    values = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))
    match kind:
        case "fp32":
            return FloatWeight(values)
        case "bf16":
            return FloatWeight(values.bfloat16())
        case "int8":
            return quantised.to_int8(values)
        case "int4":
            return quantised.to_int4(values)
        case _:
            padded = torch.nn.functional.pad(values, (0, -inputs % 32)).unflatten(1, (-1, 32))
            scale = (padded.abs().amax(2) / 127).half()
            inverse = torch.where(scale > 0, 1 / scale.float(), 0.0)
            q = (padded * inverse[..., None]).round().clamp(-127, 127)
            return Int8GroupsWeight(q.flatten(1)[:, :inputs].to(torch.int8).contiguous(), scale)


def rows(count: int, inputs: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("isa", native.ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("count", "outputs", "inputs"),
    [(1, 1, 1), (1, 32, 32), (3, 33, 31), (8, 64, 96), (9, 100, 577), (17, 47, 130), (64, 40, 64)],
)
def test_native_equals_twin(isa: str, kind: str, count: int, outputs: int, inputs: int) -> None:
    if not native.use_isa(isa):
        pytest.skip(f"no {isa} here")
    weight, x = make_weight(kind, outputs, inputs), rows(count, inputs)
    got = native.linear(x, native.pack(weight), threads=2)
    want = quantised.linear(x, weight)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5 * inputs**0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_every_company(kind: str) -> None:
    matrix, x = native.pack(make_weight(kind, 70, 200)), rows(65, 200)
    alone = torch.cat([native.linear(x[i : i + 1], matrix, threads=1) for i in range(65)])
    for count in (*range(1, 20), 31, 40, 64, 65):
        for threads in (1, 2, 3):
            got = native.linear(x[:count], matrix, threads=threads)
            assert torch.equal(got, alone[:count]), (count, threads)
            got = native.linear(x[65 - count :], matrix, threads=threads)
            assert torch.equal(got, alone[65 - count :]), (count, threads)


@pytest.mark.parametrize("kind", ["fp32", "int8", "int4", "int8_groups"])
def test_instruction_sets_agree_bit_for_bit(kind: str) -> None:
    matrix, x = native.pack(make_weight(kind, 70, 200)), rows(9, 200)
    best = native.linear(x, matrix, threads=1)
    others = [isa for isa in native.ISAS if native.use_isa(isa)]
    if len(others) < 2:
        pytest.skip("one instruction set here")
    for isa in others:
        assert native.use_isa(isa)
        assert torch.equal(native.linear(x, matrix, threads=1), best)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    count=st.integers(0, 20),
    outputs=st.integers(1, 80),
    inputs=st.integers(1, 140),
    offset=st.integers(0, 5),
    spread=st.integers(0, 7),
)
def test_shapes_tails_and_misaligned_rows(
    kind: str, count: int, outputs: int, inputs: int, offset: int, spread: int
) -> None:
    stride = inputs + spread
    flat = torch.randn(offset + count * stride + 1, generator=torch.Generator().manual_seed(2))
    x = flat.as_strided((count, inputs), (stride, 1), offset)
    weight = make_weight(kind, outputs, inputs)
    got = native.linear(x, native.pack(weight), threads=2)
    torch.testing.assert_close(got, quantised.linear(x, weight), rtol=1e-5, atol=5e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
def test_a_fault_in_a_row_stays_in_the_row_and_shows(kind: str, fault: float) -> None:
    matrix, x = native.pack(make_weight(kind, 40, 70)), rows(3, 70)
    good = native.linear(x, matrix, threads=1)
    x[1, 69] = fault
    got = native.linear(x, matrix, threads=1)
    assert torch.equal(got[[0, 2]], good[[0, 2]])
    assert not got[1].isfinite().any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_zeros_gives_zeros(kind: str) -> None:
    matrix = native.pack(make_weight(kind, 40, 70))
    assert torch.equal(native.linear(torch.zeros(2, 70), matrix, threads=1), torch.zeros(2, 40))


def test_extreme_weights_are_exact() -> None:
    q = torch.tensor([[127, -127] * 64, [-127] * 128], dtype=torch.int8)
    weight = quantised.Int8Weight(q, torch.ones(2))
    x = torch.tensor([[1.0, -1.0] * 64, [-1.0] * 128])
    for isa in native.ISAS:
        if native.use_isa(isa):
            got = native.linear(x, native.pack(weight), threads=1)
            assert torch.equal(got, torch.tensor([[127.0 * 128, 0.0], [0.0, 127.0 * 128]]))


def test_shapes_that_do_not_fit_are_refused() -> None:
    matrix = native.pack(make_weight("int8", 8, 16))
    with pytest.raises(InvalidParameter, match="16"):
        native.linear(torch.zeros(2, 17), matrix, threads=1)
    with pytest.raises(InvalidParameter, match="fp32"):
        native.linear(torch.zeros(2, 16, dtype=torch.bfloat16), matrix, threads=1)
    with pytest.raises(InvalidParameter, match="bf16"):
        native.pack(FloatWeight(torch.zeros(2, 2, dtype=torch.float16)))


def test_int4_keeps_what_fits_four_bits() -> None:
    weight = make_weight("int4", 16, 64)
    again = quantised.to_int4(quantised.dense(weight))
    assert torch.equal(quantised.dense(again), quantised.dense(weight))
