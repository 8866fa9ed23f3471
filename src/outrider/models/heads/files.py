"""Draft heads on disk: read with every doubt refused, written whole or not at all.

`read_head` reads a folder of any known layout (`layouts.py`) from safetensors; `read_any_head` also
reads pickles, as data only, for conversion. `write_head` writes one. What comes out of a read has
every tensor that `HeadConfig.shapes` asks for and no other, with those shapes, finite, and a
draft vocabulary that lies in the target's. The module knows nothing of targets' files or of runs.

int8 storage, native layout only: a matrix NAME [N, K] lies as NAME.int8 (int8 [N, K]) and
NAME.scale (fp32 [N]), w = scale · q; everything else in bf16.

Shapes: V the target's vocabulary, W the head's, N and K rows and columns of a matrix.
"""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import DrafterMismatch, InvalidParameter, ModelError
from outrider.kernels.quantised import Int8Weight, dense, to_int8
from outrider.models.heads.config import HeadConfig, TargetFacts
from outrider.models.heads.keys import Keys
from outrider.models.heads.layouts import (
    EMBEDDING,
    LAYOUTS,
    OURS,
    LayerIds,
    Layout,
    Tensors,
    detect,
    parse,
)
from outrider.models.heads.writing import laid_out, losses, misfits
from outrider.models.paths import file_hash
from outrider.models.safetensors_files import INDEX, SINGLE, TensorFolder, read_json

Precision = Literal["bf16", "fp16", "fp32", "int8"]
PRECISIONS: dict[Precision, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "int8": torch.bfloat16,  # of what is not a matrix
}
PROVENANCE = "provenance.json"
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_PICKLES = ("*.bin", "*.pt", "*.pth")
# A copy of the target's embedding may be rounded otherwise than the target's own (4 bits: 0.08).
_EMBEDDING_ERROR = 0.2


@dataclass(frozen=True)
class Head:
    """A draft head and where it comes from.

    Attributes:
        config: what it is.
        tensors: by the names of `heads/config.py`; matrices that were stored as int8 are fp32,
            everything else is as it was stored.
        provenance: how it was made (data, seeds, commits, licences), a JSON object.
        layout: what it was read from.
        stored: the dtype of its matrices on disk ("bfloat16", ...), or "int8".
        notes: what a reader should know, one line each.
    """

    config: HeadConfig
    tensors: Tensors
    provenance: dict[str, Any] = field(default_factory=dict)
    layout: Layout = "native"
    stored: str = "float32"
    notes: tuple[str, ...] = ()


def read_head(
    path: str | Path, *, target: TargetFacts | None = None, layer_ids: LayerIds = "auto"
) -> Head:
    """Read a head from a folder with config.json and safetensors, of whatever layout.

    Args:
        path: the folder.
        target: the target's facts. A native head describes its own target and needs none; of any
            other, only the sizes are used. Whether the two fit is for `check_fit` to say.
        layer_ids: how the file numbers hidden states; see `layouts.LayerIds`.

    Raises:
        ModelError: anything is missing, unexpected, damaged or unknown; the line names the key.
    """
    folder = _folder(path)
    files = _safetensors(folder)
    if not files:
        pickles = _pickles(folder)
        if pickles:
            raise ModelError(
                f"{folder} holds only {pickles[0].name}, a pickle; run `outrider convert` on it"
            )
        raise ModelError(f"{SINGLE} is missing in {folder}")
    return _read(folder, _from_safetensors(folder, files), files, target, layer_ids)


def read_any_head(
    path: str | Path,
    *,
    target: TargetFacts,
    layer_ids: LayerIds = "auto",
    embedding: Tensor | None = None,
) -> Head:
    """Read a head for conversion: as `read_head`, and from ``.bin`` and ``.pt`` files as well.

    Pickles are read as tensors alone; one that holds anything else is refused, not run.

    Args:
        embedding: the target's token embedding [V, D]; a head with a copy of it must have the same.

    Raises:
        ModelError: as `read_head`.
        DrafterMismatch: the head has another token embedding than the target.
    """
    folder = _folder(path)
    files = _safetensors(folder)
    tensors = _from_safetensors(folder, files) if files else {}
    if not files:
        files = _pickles(folder)
        if not files:
            raise ModelError(f"{SINGLE} is missing in {folder}, and there is no .bin or .pt file")
        for file in files:
            tensors |= _unpickled(file)
    return _read(folder, tensors, files, target, layer_ids, embedding)


def _read(
    folder: Path,
    tensors: Tensors,
    files: Sequence[Path],
    target: TargetFacts | None,
    layer_ids: LayerIds,
    embedding: Tensor | None = None,
) -> Head:
    source = str(folder)
    raw = read_json(folder / "config.json")
    layout = detect(raw, tensors, source)
    stored = str(next((t.dtype for t in tensors.values() if t.ndim == 2), "none"))
    if layout == "native":
        storage = Keys(raw, source).section(OURS).text("storage", "plain")
        if storage == "int8":
            tensors, stored = _dense(tensors, source), "int8"
        elif storage != "plain":
            raise ModelError(f"{source}: {OURS}.storage is {storage!r}; it must be plain or int8")
    parsed = parse(layout, raw, tensors, source=source, target=target, layer_ids=layer_ids)
    notes = list(parsed.notes)
    if parsed.embedding is not None:
        notes.append(f"{EMBEDDING} is left out: the target's own is used")
        _same_embedding(parsed.embedding, embedding, parsed.config.target, source)
    checked = _checked(parsed.config, parsed.tensors, source)
    provenance = _provenance(folder, layout, files)
    return Head(
        parsed.config, checked, provenance, layout, stored.removeprefix("torch."), tuple(notes)
    )


def _folder(path: str | Path) -> Path:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder; a head is a folder with config.json and weights")
    return folder


def _provenance(folder: Path, layout: Layout, files: Sequence[Path]) -> dict[str, Any]:
    """What lies beside a head; for one of another tool at least which files it was."""
    if (folder / PROVENANCE).exists():
        return read_json(folder / PROVENANCE)
    if layout == "native":
        return {}
    hashes = {file.name: file_hash(file) for file in files}
    return {"read_from": {"folder": folder.name, "layout": layout, "sha256": hashes}}


# -------------------------------------------------------------------------------- tensors of files


def _safetensors(folder: Path) -> list[Path]:
    """The files that hold the weights: by their usual names, else the only one there is."""
    if (folder / INDEX).exists() or (folder / SINGLE).exists():
        return list(TensorFolder(folder).files)
    found = sorted(folder.glob("*.safetensors"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:3])
        raise ModelError(f"{folder} holds {names} and no {INDEX}; keep one of them")
    return found


def _from_safetensors(folder: Path, files: Sequence[Path]) -> Tensors:
    opened = TensorFolder(folder, files=files)
    return {name: opened.read(name) for name in opened.shapes}


def _pickles(folder: Path) -> list[Path]:
    return sorted({path for pattern in _PICKLES for path in folder.glob(pattern)})


def _unpickled(path: Path) -> Tensors:
    """The tensors of a pickle, read without running anything that it holds."""
    try:
        with warnings.catch_warnings():  # of pickles that another program wrote
            warnings.simplefilter("ignore")
            content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the library raises many kinds, some of them pickle's own
        reason = (str(error) or type(error).__name__).splitlines()[0][:120]
        raise ModelError(
            f"{path} cannot be read as tensors alone ({reason}); it is damaged, or holds code"
        ) from None
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items()
    ):
        raise ModelError(f"{path} does not hold named tensors alone; export its state dict")
    return {name: tensor.detach() for name, tensor in content.items()}


def _dense(tensors: Tensors, source: str) -> Tensors:
    """Matrices from their int8 storage, in fp32."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(".int8"):
            plain = name.removesuffix(".int8")
            beside = f"{plain}.scale"
            scale = tensors.get(beside)
            if scale is None:
                raise ModelError(f"{source}: tensor {beside!r} is missing beside {name!r}")
            if tensor.dtype != torch.int8 or tensor.ndim != 2:
                raise ModelError(f"{source}: tensor {name!r} is no int8 matrix")
            if scale.dtype != torch.float32 or scale.shape != tensor.shape[:1]:
                raise ModelError(
                    f"{source}: tensor {beside!r} must be fp32 [{len(tensor)}], "
                    f"it is {scale.dtype} {list(scale.shape)}"
                )
            found[plain] = dense(Int8Weight(tensor, scale))
        elif tensor.ndim == 2:
            raise ModelError(f"{source}: tensor {name!r} is plain, the others' storage is int8")
        elif not (name.endswith(".scale") and name.removesuffix("scale") + "int8" in tensors):
            found[name] = tensor
    return found


# ------------------------------------------------------------------------------------------- checks


def _checked(config: HeadConfig, tensors: Tensors, source: str) -> Tensors:
    """The tensors, if they are exactly those that the head must have; t2d is made where absent.

    Raises:
        ModelError: the first that is missing, unexpected, misshapen, not finite, or wrong.
    """
    if config.kind != "eagle3" and config.width != config.target.width:
        raise ModelError(
            f"{source}: hidden_size is {config.width}; a head of kind {config.kind} is as wide as "
            f"its target, {config.target.width}"
        )
    tensors = dict(tensors)
    maps: Tensors = {name: tensors.pop(name) for name in ("d2t", "t2d") if name in tensors}
    shapes = config.shapes()
    for name in sorted(shapes.keys() | tensors.keys()):
        if name not in tensors:
            raise ModelError(f"{source}: tensor {name!r} is missing")
        if name not in shapes:
            raise ModelError(f"{source}: tensor {name!r} is unexpected (kind {config.kind})")
        _check_weight(name, tensors[name], shapes[name], source)
    return {name: tensors[name] for name in shapes} | _vocabulary(config, maps, source)


def _check_weight(name: str, tensor: Tensor, shape: tuple[int, ...], source: str) -> None:
    if tuple(tensor.shape) != shape:
        raise ModelError(
            f"{source}: tensor {name!r} has shape {list(tensor.shape)}, config.json asks for "
            f"{list(shape)}"
        )
    if tensor.dtype not in _FLOATS:
        raise ModelError(f"{source}: tensor {name!r} is {tensor.dtype}; use bf16, fp16 or fp32")
    if not bool(torch.isfinite(tensor).all()):
        raise ModelError(f"{source}: tensor {name!r} holds NaN or infinity; the head is spoilt")


def _vocabulary(config: HeadConfig, maps: Tensors, source: str) -> Tensors:
    """d2t and t2d of a reduced vocabulary, checked; nothing for a full one."""
    size, whole = config.draft_vocab_size, config.target.vocab_size
    offsets = maps.get("d2t")
    if offsets is None:
        if config.reduced:
            raise ModelError(
                f"{source}: tensor 'd2t' is missing; the head guesses {size} of {whole} tokens"
            )
        return {}
    if offsets.dtype not in (torch.int32, torch.int64) or tuple(offsets.shape) != (size,):
        raise ModelError(
            f"{source}: tensor 'd2t' is {offsets.dtype} {list(offsets.shape)}; "
            f"it must be int64 [{size}]"
        )
    ids = offsets.long() + torch.arange(size)
    outside = ids[(ids < 0) | (ids >= whole)]
    if len(outside):
        raise ModelError(
            f"{source}: d2t leads to token {int(outside[0])}; the target has {whole} tokens"
        )
    if len(set(ids.tolist())) != size:
        raise ModelError(f"{source}: d2t leads to one token from two places")
    if not config.reduced:
        if offsets.any():
            raise ModelError(f"{source}: d2t reorders a full vocabulary; it must be zeros")
        return {}
    mask = torch.zeros(whole, dtype=torch.bool)
    mask[ids] = True
    given = maps.get("t2d", mask)
    if given.dtype != torch.bool or tuple(given.shape) != (whole,):
        raise ModelError(
            f"{source}: tensor 't2d' is {given.dtype} {list(given.shape)}; "
            f"it must be bool [{whole}]"
        )
    wrong = (given != mask).nonzero()
    if len(wrong):
        raise ModelError(f"{source}: d2t and t2d disagree about token {int(wrong[0])}")
    return {"d2t": offsets.long(), "t2d": mask}


def _same_embedding(
    copy: Tensor, embedding: Tensor | None, target: TargetFacts, source: str
) -> None:
    """A head's copy of the token embedding must be the target's, for that is what will be used."""
    shape = (target.vocab_size, target.width)
    if tuple(copy.shape) != shape or copy.dtype not in _FLOATS:
        raise ModelError(
            f"{source}: tensor {EMBEDDING!r} is {copy.dtype} {list(copy.shape)}; the target's is "
            f"{list(shape)}"
        )
    if embedding is None:
        return
    if tuple(embedding.shape) != shape:
        raise DrafterMismatch(
            f"{source}: {EMBEDDING} has shape {list(shape)}, the target's {list(embedding.shape)}; "
            f"name the target that the head was made for"
        )
    distance = (copy.float() - embedding.float()).norm() / embedding.float().norm()
    if not float(distance) <= _EMBEDDING_ERROR:
        raise DrafterMismatch(
            f"{source}: {EMBEDDING} differs from the target's by {float(distance):.0%}; the head "
            f"has an embedding of its own, or was made for another target"
        )


# ------------------------------------------------------------------------------------------ writing


def write_head(
    head: Head,
    folder: str | Path,
    *,
    layout: Layout = "native",
    precision: Precision = "bf16",
    embedding: Tensor | None = None,
    force: bool = False,
) -> None:
    """Write a head into a new or empty folder; on any error nothing is left there.

    Args:
        head: it is checked as on reading.
        folder: where; its parent folders are made.
        layout: see `layouts.py`. What it cannot carry is refused.
        precision: of the weights. "int8" is our own storage, native layout only; "native" readers
            of other tools cannot read that.
        embedding: the target's token embedding [V, D], for tools that want it in the head's files.
        force: write also where a known reader of the layout would silently do something else.

    Raises:
        InvalidParameter: a wrong name, the folder holds something, or the layout cannot hold the
            head or would lose a part of it.
        ModelError: a tensor is wrong, or the files cannot be written.
    """
    final = Path(folder).expanduser()
    check_new(final)
    check_choice(head.config, layout, precision, force=force)
    tensors = _checked(head.config, head.tensors, "the head to write")
    dtype = str(PRECISIONS[precision]).removeprefix("torch.")
    raw, named = laid_out(layout, head.config, tensors, dtype=dtype)
    if layout == "native":
        raw[OURS] |= {"storage": "int8" if precision == "int8" else "plain"}
        if head.provenance:
            raw[OURS] |= {"provenance": PROVENANCE}
    if embedding is not None:
        if head.config.kind == "medusa":
            raise InvalidParameter("a medusa head has no place for the token embedding")
        _same_embedding(embedding, None, head.config.target, "the embedding to add")
        named[EMBEDDING] = embedding
    _publish(final, raw, _stored(named, precision), head.provenance)


def check_new(folder: Path) -> None:
    """Refuse a place for a head that holds something already.

    Raises:
        InvalidParameter: it does, or it is a file.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise InvalidParameter(f"{folder} exists and is not empty; choose another folder")


def check_choice(config: HeadConfig, layout: Layout, precision: Precision, *, force: bool) -> None:
    """Refuse a layout and a precision that a head cannot be written in.

    Raises:
        InvalidParameter: an unknown name, or what would be lost and how to keep it.
    """
    if layout not in LAYOUTS:
        raise InvalidParameter(f"layout {layout!r}: use one of {', '.join(LAYOUTS)}")
    if precision not in PRECISIONS:
        raise InvalidParameter(f"precision {precision!r}: use one of {', '.join(PRECISIONS)}")
    if precision == "int8" and layout != "native":
        raise InvalidParameter(f"int8 is Outrider's own; write layout {layout} in bf16 or fp32")
    wrong = misfits(layout, config)
    if wrong:
        raise InvalidParameter(f"layout {layout}: {'; '.join(wrong)}; use layout native")
    lost = losses(layout, config)
    if lost and not force:
        raise InvalidParameter(
            f"layout {layout} would silently lose acceptance ({'; '.join(lost)}); use layout "
            f"native, or force it for an engine that does know them"
        )


def _stored(named: Mapping[str, Tensor], precision: Precision) -> Tensors:
    """Tensors as they will lie in the file, none sharing memory with another."""
    stored: Tensors = {}
    for name, tensor in named.items():
        tensor = tensor.detach().cpu()
        if not tensor.is_floating_point():
            stored[name] = tensor.clone()
        elif precision == "int8" and tensor.ndim == 2:
            weight = to_int8(tensor)
            stored[f"{name}.int8"], stored[f"{name}.scale"] = weight.q, weight.scale
        else:
            stored[name] = tensor.to(PRECISIONS[precision], copy=True).contiguous()
            if not bool(torch.isfinite(stored[name]).all()):
                raise ModelError(f"tensor {name!r} does not fit {precision}; use bf16 or fp32")
    return stored


def _publish(
    final: Path, raw: Mapping[str, Any], tensors: Tensors, provenance: Mapping[str, Any]
) -> None:
    """Write the files beside their place, then rename: readers see all of them or none."""
    temporary: Path | None = None
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=final.parent))
        _write_json(temporary / "config.json", raw)
        if provenance:
            _write_json(temporary / PROVENANCE, provenance)
        # other tools read no file without this mark
        save_file(tensors, temporary / SINGLE, metadata={"format": "pt"})
        (temporary / SINGLE).chmod(0o644)  # what is made as temporary is its maker's alone
        temporary.chmod(0o755)
        temporary.rename(final)
    except (OSError, SafetensorError) as error:
        # safetensors gives the reason as text alone
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or "No space left" in str(error):
            raise ModelError(f"no space left for {final}; free some") from None
        raise ModelError(f"{final} cannot be written: {error}; choose another folder") from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
