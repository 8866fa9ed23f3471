"""The native CPU kernels: a shared library with a C interface, called through ctypes.

Tensors go in as raw pointers, so the library depends on no version of PyTorch. It is optional:
`unavailable` says in one line why it cannot be used, and then nothing else here may be called. The
slow twins are in `quantised.py`. The structures below mirror ``native/abi.h``.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import (
    POINTER,
    Array,
    Structure,
    byref,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from outrider.errors import InvalidParameter, OutOfMemory
from outrider.kernels.quantised import (
    FloatWeight,
    Int4Weight,
    Int8GroupsWeight,
    Int8Weight,
    Weight,
)

ABI = 4
ISAS = ("avx512", "avx512_vnni", "avx2")  # best first; the first has bf16 products as well
BLOCK = 32  # output columns that are packed together


class Kind(IntEnum):
    """How a packed matrix is stored; the numbers are the library's."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3
    INT8_GROUPS = 4


class MatrixStruct(Structure):
    _fields_ = (
        ("kind", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("reserved", c_int32),
        ("data", c_void_p),
        ("scale", c_void_p),
    )


class LayerStruct(Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("token_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("qkv_bias", c_void_p),
        ("qkv", MatrixStruct),
        ("output", MatrixStruct),
        ("gate_up", MatrixStruct),
        ("down", MatrixStruct),
        ("rotate", c_int32),
        ("reserved", c_int32),
    )


class ModelStruct(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("layers", "width", "heads", "kv_heads", "head_dim")),
        *((name, c_int32) for name in ("mlp", "vocab", "rotary_dim", "embedding_float32")),
        ("epsilon", c_float),
        ("attention_scale", c_float),
        ("layer", POINTER(LayerStruct)),
        ("final_norm", c_void_p),
        ("embedding", c_void_p),
        ("head", MatrixStruct),
    )


class SegmentStruct(Structure):
    _fields_ = tuple(
        (name, c_int32) for name in ("slot", "cached", "first_row", "rows", "prefix", "chain")
    )


class PassStruct(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("rows", "segments", "logit_rows", "feature_layers")),
        ("threads", c_int32),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("tokens", POINTER(c_int32)),
        ("parents", POINTER(c_int32)),
        ("segment", POINTER(SegmentStruct)),
        ("logit_row", POINTER(c_int32)),
        ("feature", POINTER(c_int32)),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("layer_stride", c_int64),
        ("slot_stride", c_int64),
        ("head_stride", c_int64),
        ("inputs", c_void_p),
        ("logits", c_void_p),
        ("features", c_void_p),
    )


class DraftStruct(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("slot", "cached", "prefix", "beam", "branching", "nodes")),
        *((name, c_int32) for name in ("depth", "threads", "norm_output", "ends", "capacity")),
        ("hopeless", c_double),
        ("temperature", c_double),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("tokens", POINTER(c_int32)),
        ("states", c_void_p),
        ("fc", POINTER(MatrixStruct)),
        ("fc_bias", c_void_p),
        ("ids", c_void_p),
        ("end", POINTER(c_int32)),
        ("noise", POINTER(c_uint64)),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("layer_stride", c_int64),
        ("slot_stride", c_int64),
        ("head_stride", c_int64),
        ("token", POINTER(c_int32)),
        ("parent", POINTER(c_int32)),
        ("confidence", POINTER(c_double)),
        ("count", c_int32),
    )


_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "outrider_abi_version": (c_int, ()),
    "outrider_isa": (c_char_p, ()),
    "outrider_use_isa": (c_int, (c_char_p,)),
    "outrider_pin_workers": (None, (c_int,)),
    "outrider_packed_bytes": (c_int64, (c_int32, c_int64, c_int64)),
    "outrider_pack_float32": (None, (c_void_p, c_int64, c_int64, c_void_p)),
    "outrider_pack_bfloat16": (None, (c_void_p, c_int64, c_int64, c_void_p)),
    "outrider_pack_int8": (None, (c_void_p, c_int64, c_int64, c_void_p)),
    "outrider_pack_int4_groups": (
        None,
        (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p),
    ),
    "outrider_pack_int8_groups": (None, (c_void_p, c_void_p, c_int64, c_int64, c_void_p)),
    "outrider_linear": (
        c_int,
        (POINTER(MatrixStruct), c_void_p, c_int64, c_int32, c_void_p, c_int64, c_int32),
    ),
    "outrider_plan_new": (c_void_p, (POINTER(ModelStruct),)),
    "outrider_plan_free": (None, (c_void_p,)),
    "outrider_plan_draft": (c_int, (c_void_p, POINTER(DraftStruct), c_int32)),
    "outrider_plan_run": (c_int, (c_void_p, POINTER(PassStruct))),
}


@cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library, or why there is none."""
    found = sorted(Path(__file__).parent.glob("_native*.so"))
    if not found:
        return None, "the native kernels were not built (pip install . needs gcc 11 or clang)"
    try:
        library = ctypes.CDLL(str(found[0]))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)  # unlike library[name], this one is kept
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        return None, f"the native kernels cannot be loaded ({error}); install Outrider again"
    if library.outrider_abi_version() != ABI:
        return None, f"{found[0].name} belongs to another version; install Outrider again"
    if not library.outrider_isa():
        return None, "the native kernels need a processor with AVX2 and FMA"
    return library, ""


def unavailable() -> str:
    """Why the native kernels cannot be used here; empty where they can."""
    return _load()[1]


def _library() -> ctypes.CDLL:
    library, reason = _load()
    if library is None:
        raise InvalidParameter(reason)
    return library


def isa() -> str:
    """The instruction set in use, one of `ISAS`."""
    name: bytes = _library().outrider_isa()
    return name.decode()


def use_isa(name: str) -> bool:
    """Use another instruction set of this processor ("" for the best); for tests.

    Changes the process. Returns False where the processor lacks it.
    """
    return bool(_library().outrider_use_isa(name.encode()))


def pin_workers(on: bool) -> None:
    """Bind worker threads that are started from now on to one processor each."""
    _library().outrider_pin_workers(int(on))


_outer_threads: int | None = None  # PyTorch's number while `owning_the_cores` holds it at 1


def crew(threads: int | None) -> int:
    """How many threads compute: the number asked for, else as many as PyTorch has been given."""
    return threads or _outer_threads or torch.get_num_threads()


@contextmanager
def owning_the_cores() -> Iterator[None]:
    """Keep PyTorch to one thread for a while.

    Its threads go on spinning for some milliseconds after every small operation that they shared,
    on the cores that ours need for the next pass: a step with a trained head took twice as long.
    """
    global _outer_threads
    before, outer = torch.get_num_threads(), _outer_threads
    if before == 1:
        yield
        return
    _outer_threads = before
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _outer_threads = outer


class Arena:
    """Memory for packed weights: one mapping, in huge pages where the system gives them.

    Weights are streamed once per pass; with 4 KB pages a good part of that is page-table walks.
    """

    def __init__(self, nbytes: int) -> None:
        # private: shared anonymous memory gets no huge pages
        self._map = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._used = 0

    def take(self, nbytes: int) -> Tensor:
        """The next ``nbytes`` bytes, aligned to 64."""
        start = self._used
        if start + nbytes > len(self._bytes):
            raise OutOfMemory(f"{nbytes} bytes do not fit the {len(self._bytes)} of this arena")
        self._used += -(-nbytes // 64) * 64
        return self._bytes[start : start + nbytes]


@dataclass(frozen=True)
class PackedMatrix:
    """A weight [N, K] in the kernels' layout.

    Attributes:
        struct: what the library is given; it points into the tensors here.
    """

    struct: MatrixStruct
    data: Tensor
    scale: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (self.scale.nbytes if self.scale is not None else 0)


def kind_of(weight: Weight) -> Kind:
    """How a weight is packed.

    Raises:
        InvalidParameter: a float weight of another dtype than fp32 and bf16.
    """
    match weight:
        case Int8Weight():
            return Kind.INT8
        case Int4Weight():
            return Kind.INT4
        case Int8GroupsWeight():
            return Kind.INT8_GROUPS
        case FloatWeight(values=values):
            kinds = {torch.float32: Kind.FLOAT32, torch.bfloat16: Kind.BFLOAT16}
            if values.dtype not in kinds:
                raise InvalidParameter(f"weights of {values.dtype} cannot be packed; use bf16")
            return kinds[values.dtype]


def packed_bytes(kind: Kind, outputs: int, inputs: int) -> int:
    """Bytes that `pack` needs for a weight's data."""
    size: int = _library().outrider_packed_bytes(kind, outputs, inputs)
    return size


def pack(weight: Weight, arena: Arena | None = None) -> PackedMatrix:
    """Pack a weight, into ``arena`` or memory of its own."""
    library, kind = _library(), kind_of(weight)
    n, k = weight.shape
    size = packed_bytes(kind, n, k)
    data = torch.empty(size, dtype=torch.uint8) if arena is None else arena.take(size)
    scale = None
    match weight:
        case FloatWeight(values=values):
            values = values.contiguous()
            single = kind is Kind.FLOAT32
            fill = library.outrider_pack_float32 if single else library.outrider_pack_bfloat16
            fill(values.data_ptr(), n, k, data.data_ptr())
        case Int8Weight():
            q = weight.q.contiguous()
            padded = -(-n // BLOCK) * BLOCK
            scale = torch.zeros(padded)
            scale[:n] = weight.scale
            library.outrider_pack_int8(q.data_ptr(), n, k, data.data_ptr())
        case Int8GroupsWeight():
            q, scales = weight.q.contiguous(), weight.scale.half().contiguous()
            library.outrider_pack_int8_groups(
                q.data_ptr(), scales.data_ptr(), n, k, data.data_ptr()
            )
        case Int4Weight():
            q, scales = weight.q.contiguous(), weight.scale.half().contiguous()
            minimum = weight.minimum.half().contiguous()
            library.outrider_pack_int4_groups(
                q.data_ptr(), scales.data_ptr(), minimum.data_ptr(), n, k, data.data_ptr()
            )
    struct = MatrixStruct(
        kind,
        n,
        k,
        0,
        data.data_ptr(),
        None if scale is None else scale.data_ptr(),
    )
    return PackedMatrix(struct, data, scale)


def linear(x_MK: Tensor, matrix: PackedMatrix, *, threads: int) -> Tensor:
    """x Wᵀ [M, N] for fp32 activations; rows may lie apart, values of a row may not.

    Raises:
        InvalidParameter: a shape or dtype that does not fit.
    """
    if x_MK.dtype != torch.float32 or x_MK.ndim != 2 or x_MK.shape[1] != matrix.struct.k:
        raise InvalidParameter(
            f"x is {list(x_MK.shape)} {x_MK.dtype}; an fp32 [M, {matrix.struct.k}] is needed"
        )
    if x_MK.shape[1] > 1 and x_MK.stride(1) != 1:
        x_MK = x_MK.contiguous()
    rows = x_MK.shape[0]
    y_MN = torch.empty(rows, matrix.struct.n)
    if rows == 0:
        return y_MN
    failed = _library().outrider_linear(
        byref(matrix.struct),
        x_MK.data_ptr(),
        x_MK.stride(0),
        rows,
        y_MN.data_ptr(),
        matrix.struct.n,
        threads,
    )
    if failed:
        raise OutOfMemory(f"no memory for the activations of {rows} rows")
    return y_MN


class Plan:
    """A model as the library holds it. Everything that ``model`` points to must be in ``keep``."""

    def __init__(self, model: ModelStruct, keep: object) -> None:
        self._keep = keep
        self._handle = _library().outrider_plan_new(byref(model))
        if not self._handle:
            raise OutOfMemory("no memory for the plan of a model")

    def run(self, step: PassStruct) -> None:
        """One pass. The caller vouches for every pointer and index in ``step``.

        Raises:
            OutOfMemory: no room for the activations; nothing but the staged rows has changed.
        """
        if _library().outrider_plan_run(self._handle, byref(step)):
            raise OutOfMemory(f"no memory for the activations of {step.rows} rows")

    def draft(self, drafts: Array[DraftStruct]) -> None:
        """Whole drafts of a head, a level of each tree per pass. The caller vouches for every
        pointer and index.

        Raises:
            OutOfMemory: no room for the activations.
        """
        if _library().outrider_plan_draft(self._handle, drafts, len(drafts)):
            raise OutOfMemory(f"no memory for the activations of {len(drafts)} drafts")

    def __del__(self) -> None:
        if self._handle:
            _library().outrider_plan_free(self._handle)
            self._handle = None
