"""A GGUF file again in another precision: what the other engines read. Knows numpy, no torch.

Every variant is made from the values of the same file, so that all engines run the same model:
matrices in the precision asked for, everything else in fp32, metadata and tokenizer as they are.
"""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

TYPES = {
    "Q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "BF16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}
_FILE_TYPE = "general.file_type"
_WRITTEN_ANYWAY = ("general.architecture", _FILE_TYPE)


def precision(path: Path) -> str:
    """What a file calls itself, such as "Q4_1"."""
    field = gguf.GGUFReader(path).fields[_FILE_TYPE]
    return gguf.LlamaFileType(field.contents()).name.removeprefix("MOSTLY_")


def variant(source: Path, kind: str, folder: Path) -> Path:
    """The file in precision ``kind``: itself if it has it, else one in ``folder``, made once."""
    if precision(source) == kind:
        return source
    final = folder / f"{source.stem}-as-{kind}.gguf"
    if not final.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = final.with_suffix(".unfinished")
        _write(gguf.GGUFReader(source), kind, unfinished)
        os.replace(unfinished, final)
    return final


def _write(reader: gguf.GGUFReader, kind: str, path: Path) -> None:
    matrix_type, file_type = TYPES[kind]
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in _WRITTEN_ANYWAY:
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if values.ndim < 2:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quantize(values, matrix_type), raw_dtype=matrix_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
