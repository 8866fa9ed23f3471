"""What a drafter's spec stands for: the files behind it, and a hash that changes with them.

A path says nothing of what lies there. Certificates and servers' fingerprints are bound to the
content: the hashes of the files, whatever they are called and whenever they were written.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from outrider import __version__
from outrider.drafters.heads import CHAIN, HeadSpec, read_spec
from outrider.errors import OutriderError
from outrider.models.heads.fit import folder_facts
from outrider.models.load import find_source
from outrider.models.paths import file_hash

_DECIDING = ("*.safetensors", "config.json", "generation_config.json", "tokenizer.json")


def folder_hash(folder: Path) -> str:
    """A hash over the files that decide what a model or head computes."""
    files = sorted({path for pattern in _DECIDING for path in folder.glob(pattern)})
    return _hash("".join(f"{path.name} {file_hash(path)}\n" for path in files))


def head_folder(spec: str, *, source: Path, name: str) -> Path | None:
    """The folder of a head's spec; `None` if the spec is no head.

    Args:
        spec: of a drafter.
        source: the target's folder.
        name: the target's name.

    Raises:
        InvalidParameter: it is malformed, or no such head ships.
    """
    head = read_spec(spec)
    return None if head is None else _place(head, source=source, name=name)


def _place(head: HeadSpec, *, source: Path, name: str) -> Path:
    return head.place(lambda: folder_facts(source, name=name))


def draft_model_folder(spec: str) -> Path | None:
    """The folder of a draft model's spec; `None` if it is none.

    Raises:
        ModelError: it is not there.
    """
    kind, _, argument = spec.partition(":")
    if kind != "draft_model" or not argument:
        return None
    return find_source(argument).folder


def member_specs(argument: str) -> list[str]:
    """The specs of a hybrid's members, from what stands behind its colon."""
    return [part.replace("=", ":", 1) for part in (argument or "suffix+ngram").split("+")]


def drafter_identity(spec: str, *, source: Path, name: str) -> str:
    """What a drafter is: a hash of its files, or of its spec and our version where it has none.

    Args:
        spec: as on the command line.
        source: the target's folder.
        name: the target's name.
    """
    kind, _, argument = spec.partition(":")
    if kind == "hybrid":
        members = [drafter_identity(m, source=source, name=name) for m in member_specs(argument)]
        return _hash("\n".join((__version__, *members)))
    chain = False
    try:
        folder = draft_model_folder(spec)
        if folder is None and (head := read_spec(spec)) is not None:
            folder, chain = _place(head, source=source, name=name), head.chain
    except OutriderError:
        folder = None
    if folder is not None and folder.is_dir():
        content = folder_hash(folder)
        return _hash(f"{content} {CHAIN}") if chain else content
    if kind == "replay" and Path(argument).is_file():
        return file_hash(Path(argument))
    return _hash(f"{spec} of outrider {__version__}")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
