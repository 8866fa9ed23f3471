"""Facts for the preflight, read from files: models, heads, hashes, lock files. Runs no model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider import __version__
from outrider.drafters.heads import draft_ids
from outrider.drafters.identity import (
    draft_model_folder,
    drafter_identity,
    folder_hash,
    head_folder,
)
from outrider.errors import InvalidParameter, ModelError
from outrider.evaluate.preflight import ModelFacts, Row, compare_head, compare_models, rollback
from outrider.models.config import ModelConfig
from outrider.models.heads.files import read_head
from outrider.models.heads.fit import folder_facts
from outrider.models.safetensors_files import read_json
from outrider.models.target import Target
from outrider.models.tokenizer import Tokenizer
from outrider.records.files import write_json

LOCK = "outrider-lock"
SAMPLE_TEXTS = (
    "Hello, world!",
    "  two spaces and a tab\t, then a line\nand numbers 1234567890",
    "naïve café — 東京 🚀",
    "def f(x):\n    return x ** 2  # comment",
    '{"key": [1, 2.5, null]}',
)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "The time.",
        "parameters": {"type": "object", "properties": {}},
    },
}
CONVERSATIONS: Mapping[str, tuple[list[dict[str, str]], bool]] = {
    "one turn": ([{"role": "user", "content": "Hi"}], False),
    "with a system prompt": (
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        False,
    ),
    "with tools": ([{"role": "user", "content": "What time is it?"}], True),
}
# What a config.json says of layers whose state cannot be cut back to an earlier token.
_RECURRENT_KEYS = ("ssm_cfg", "mamba_d_state", "linear_num_value_heads", "rwkv_version")
_RECURRENT_WORDS = ("mamba", "rwkv", "linear_attention", "recurrent", "hyena")


def model_facts(folder: Path, *, name: str, tokenizer: Tokenizer | None = None) -> ModelFacts:
    """The facts of a model folder.

    Raises:
        ModelError: a file is missing or damaged.
    """
    raw = read_json(folder / "config.json")
    own = tokenizer if tokenizer is not None else Tokenizer.load(folder)
    inner = _tokenizer_json(folder)
    files = sorted(folder.glob("*.safetensors"))
    return ModelFacts(
        name=name,
        pieces=tuple(own.pieces()),
        rows=int(raw.get("vocab_size") or own.vocab_size),
        special=dict(own.special_tokens),
        added={str(t["content"]): int(t["id"]) for t in inner.get("added_tokens") or ()},
        normaliser=_canonical(inner.get("normalizer")),
        pre_tokeniser=_canonical(inner.get("pre_tokenizer")),
        template_hash=_hash(own.template) if _has_template(own) else "",
        renderings=_renderings(own),
        samples={text: tuple(own.encode(text)) for text in SAMPLE_TEXTS},
        ends=own.end_tokens,
        context=int(raw.get("max_position_embeddings") or 0),
        dtype=str(raw.get("torch_dtype") or raw.get("dtype") or "unknown"),
        nbytes=sum(file.stat().st_size for file in files),
        licence=licence_of(folder, raw),
        hash=folder_hash(folder),
        recurrent=recurrent(raw),
    )


def recurrent(raw: Mapping[str, Any]) -> str:
    """Why a model's state cannot be rolled back, by its config.json; empty where it can."""
    words = [str(raw.get("model_type", "")), *map(str, raw.get("layer_types") or ())]
    words += [str(word) for word in raw.get("architectures") or ()]
    found = next((w for w in words for r in _RECURRENT_WORDS if r in w.lower()), None)
    found = found or next((key for key in _RECURRENT_KEYS if raw.get(key)), None)
    return f"{found} keeps a state that has no rows to drop" if found else ""


def licence_of(folder: Path, raw: Mapping[str, Any]) -> str:
    """The licence that a folder names: config.json, a model card's head, or a LICENSE file."""
    for key in ("license", "licence"):
        if isinstance(raw.get(key), str) and raw[key]:
            return str(raw[key])
    card = folder / "README.md"
    if card.is_file():
        for line in card.read_text(encoding="utf-8", errors="replace").splitlines()[:60]:
            if line.startswith("license:"):
                return line.partition(":")[2].strip().strip("'\"")
    for name in ("LICENSE", "LICENSE.txt", "LICENCE"):
        if (folder / name).is_file():
            return f"see {name}"
    return ""


def file_rows(
    target: ModelFacts, spec: str, *, source: Path, tokenizer: Tokenizer | None = None
) -> list[Row]:
    """The rows that files alone decide, for whatever kind of drafter.

    Raises:
        ModelError: the drafter's files cannot be read.
    """
    folder = draft_model_folder(spec)
    if folder is not None:
        return compare_models(target, model_facts(folder, name=folder.name))
    folder = head_folder(spec, source=source, name=target.name)
    if folder is None:
        told = "none needed: it copies from the context and has no weights of its own"
        return [Row("drafter's files", "pass", told), rollback(target.name, target.recurrent)]
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} holds no head; give a folder with config.json and weights")
    facts = folder_facts(source, name=target.name, tokenizer=tokenizer)
    head = read_head(folder, target=facts)
    ids = draft_ids(head)
    rows = compare_head(
        target,
        facts,
        head.config,
        draft_ids=None if ids is None else [int(i) for i in ids],
        stored=head.stored,
        provenance=head.provenance,
    )
    return [*rows, rollback(target.name, target.recurrent)]


def bound(spec: str, *, target: Target, facts: ModelFacts, source: Path) -> dict[str, str]:
    """The hashes that a lock file binds."""
    return {
        "target": facts.hash,
        "target_tokenizer": _hash(json.dumps(list(facts.pieces))),
        "target_template": facts.template_hash,
        "drafter_spec": spec,
        "drafter": drafter_identity(spec, source=source, name=target.name),
    }


def read_lock(path: Path) -> dict[str, str] | None:
    """The hashes of a lock file; `None` if there is none.

    Raises:
        InvalidParameter: it is something else.
    """
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    entries = found.get(LOCK) if isinstance(found, dict) else None
    if not isinstance(entries, dict):
        raise InvalidParameter(f"{path} is no lock file; choose another name for --lock")
    return {str(key): str(value) for key, value in entries.items()}


def write_lock(path: Path, hashes: Mapping[str, str]) -> None:
    """Write a lock file whole."""
    write_json(path, {LOCK: dict(hashes), "outrider": __version__})


def config_of(folder: Path) -> ModelConfig:
    """A folder's configuration."""
    return ModelConfig.from_hf(read_json(folder / "config.json"))


def _tokenizer_json(folder: Path) -> Mapping[str, Any]:
    path = folder / "tokenizer.json"
    return read_json(path) if path.exists() else {}


def _canonical(value: object) -> str:
    return "" if value is None else json.dumps(value, sort_keys=True)


def _has_template(tokenizer: Tokenizer) -> bool:
    return tokenizer.template not in ("", '""')


def _renderings(tokenizer: Tokenizer) -> dict[str, tuple[int, ...] | None]:
    found: dict[str, tuple[int, ...] | None] = {}
    if not _has_template(tokenizer):
        return found
    for name, (messages, tools) in CONVERSATIONS.items():
        try:
            found[name] = tuple(tokenizer.chat(messages, tools=[TOOL] if tools else None))
        except InvalidParameter:
            found[name] = None
    return found


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def server_rows(
    samples: Mapping[str, Sequence[int] | None], expected: Mapping[str, Sequence[int]]
) -> list[Row]:
    """A running server's tokenizer against the target's files: texts and conversations.

    Args:
        samples: what the server made of each; `None` where it cannot tell.
        expected: what the target's tokenizer here makes of it.
    """
    known = {name: tokens for name, tokens in samples.items() if tokens is not None}
    if not known:
        return [
            Row(
                "server's tokenizer",
                "warn",
                "the server has no endpoint that turns text into tokens",
                "compare the tokenizer files by hand, or check the files it was started with",
            )
        ]
    wrong = [name for name, tokens in known.items() if tuple(tokens) != tuple(expected[name])]
    if wrong:
        first = wrong[0]
        told = (
            f"{len(wrong)} of {len(known)} differ; {first[:24]!r} is {list(known[first])[:6]} "
            f"there and {list(expected[first])[:6]} here"
        )
        return [Row("server's tokenizer", "fail", told, "the server runs another model: check it")]
    return [Row("server's tokenizer", "pass", f"{len(known)} samples give equal tokens")]
