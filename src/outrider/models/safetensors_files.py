"""Weights in safetensors files: one file, or shards with an index. Never a pickle.

A `TensorFolder` knows names, shapes and files; it reads a tensor when asked. It knows nothing of
models.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.errors import ModelError
from outrider.models.paths import file_hash

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a model.

    Raises:
        ModelError: missing, unreadable or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.name} is missing in {path.parent}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return content


class TensorFolder:
    """The safetensors files of a folder: those that its index names, or ``files``.

    Attributes:
        folder: where they are.
        files: their paths, in order.
        shapes: tensor name to shape, over all files.

    Raises:
        ModelError: no safetensors, a shard is missing, or a file is damaged.
    """

    def __init__(self, folder: Path, *, files: Sequence[Path] | None = None) -> None:
        self.folder = folder
        self.files = _weight_files(folder) if files is None else list(files)
        self._homes: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in self.files:
            self._survey(path)

    def _survey(self, path: Path) -> None:
        try:
            with _opened(path) as opened:
                for name in opened.keys():  # noqa: SIM118 - not a dict
                    if name in self._homes:
                        raise ModelError(f"{path}: tensor {name!r} is in another shard as well")
                    self._homes[name] = path
                    self.shapes[name] = tuple(opened.get_slice(name).get_shape())
        except FileNotFoundError:
            raise ModelError(f"{path.name} is missing in {path.parent}") from None
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is damaged or cut short ({error}); fetch it again") from None

    def read(self, name: str) -> Tensor:
        """A tensor in its stored dtype.

        The file is mapped for this read alone: pages of a mapping that stays open count as memory
        of the process, the whole file's in the end.
        """
        try:
            with _opened(self._homes[name]) as opened:
                tensor: Tensor = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self.folder}: tensor {name!r} is damaged ({error})") from None
        return tensor

    def fingerprint(self) -> str:
        """A hash over the content of all files."""
        digest = hashlib.sha256()
        for path in self.files:
            digest.update(file_hash(path).encode())
        return digest.hexdigest()


def _opened(path: Path) -> Any:
    return safe_open(path, framework="pt")


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        index = read_json(folder / INDEX)
        homes = index.get("weight_map")
        if not isinstance(homes, Mapping) or not homes:
            raise ModelError(f"{folder / INDEX} has no weight_map")
        names = sorted({str(name) for name in homes.values()})
        for name in names:
            if Path(name).name != name:
                raise ModelError(f"{folder / INDEX} names {name!r}, which is not a file beside it")
        return [folder / name for name in names]
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    pickles = [p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern)]
    if pickles:
        raise ModelError(
            f"{folder} holds only {sorted(pickles)[0]}, a pickle that could run code when read; "
            f"convert the model to safetensors"
        )
    raise ModelError(f"{SINGLE} is missing in {folder}")
