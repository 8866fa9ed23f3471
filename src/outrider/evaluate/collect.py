"""From a log of real requests to an evaluation set: read, redact, sample. Knows files, no engine.

Forms are told by their content, line by line: OpenAI chat requests or request-response pairs,
ShareGPT conversations, LiteLLM's logging payload, the lines that vLLM writes with request logging
on, and CSV. Nothing is passed over in silence: every line that gives no prompt is named.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from outrider.errors import InvalidParameter
from outrider.evaluate.redact import Redactor
from outrider.evaluate.sets import SAMPLING, EvaluationSet, Item
from outrider.evaluate.workloads import ROLES, Message, Prompt
from outrider.records.files import BadLine

USER_ROLE, REPLY_ROLE = "user", "assistant"
SPEAKERS = {
    "human": USER_ROLE,
    "user": USER_ROLE,
    "gpt": REPLY_ROLE,
    "chatgpt": REPLY_ROLE,
    "model": REPLY_ROLE,
    REPLY_ROLE: REPLY_ROLE,
    "system": "system",
    "tool": "tool",
}
WORDS_TO_TOKENS = 1.35
STRATA = 3
_VLLM = re.compile(r"Received request (\S+?):? prompt: (.*?), (?:params: )?SamplingParams\((.*)\)")


@dataclass(frozen=True)
class Logged:
    """One request of a log.

    Attributes:
        line: where it stood.
        messages: up to the model's turn.
        output_tokens: of the logged answer; estimated from its words where it is not counted.
        sampling, tools, response_format: as logged.
    """

    line: int
    messages: tuple[Message, ...]
    output_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    response_format: Mapping[str, Any] | None = None

    @property
    def input_words(self) -> int:
        return sum(len(m.content.split()) for m in self.messages)


@dataclass(frozen=True)
class Collected:
    """A set and how it came about.

    Attributes:
        requests: prompts in the log; distinct: after equal ones were put together.
        bad_lines: lines without a prompt.
        replaced: what was redacted, by kind.
        strata: (input, output) length class to (requests, taken).
    """

    set: EvaluationSet
    requests: int
    distinct: int
    bad_lines: tuple[BadLine, ...]
    replaced: Mapping[str, int]
    strata: Mapping[str, tuple[int, int]]

    def to_text(self) -> str:
        """The report for people."""
        kinds = ", ".join(f"{n} x {kind}" for kind, n in sorted(self.replaced.items())) or "nothing"
        lines = [
            f"{self.requests} requests, {self.distinct} distinct, {len(self.set.items)} taken",
            f"replaced: {kinds}",
            "input/output length: requests -> taken",
            *(f"  {name:<16}{a:>7} -> {b}" for name, (a, b) in sorted(self.strata.items())),
            *(f"line {bad.number} gives no prompt: {bad.reason}" for bad in self.bad_lines),
        ]
        return "\n".join(lines)


def collect(
    path: Path,
    *,
    name: str,
    family: str = "business",
    take: int | None = None,
    seed: int = 0,
    patterns: Mapping[str, str] | None = None,
    skip_bad_lines: bool = False,
    columns: Mapping[str, str] | None = None,
) -> Collected:
    """Make a business set from a log.

    Args:
        name: of the set.
        take: so many prompts, stratified by input and output length; `None` takes all.
        patterns: the user's own, see `Redactor`.
        skip_bad_lines: go on past lines without a prompt; they are named either way.
        columns: for CSV, from ``prompt``, ``system``, ``answer`` and ``output_tokens`` to the
            file's own column names.

    Raises:
        InvalidParameter: the file cannot be read, holds no prompt, or has a line without one.
    """
    redactor = Redactor(patterns or {})
    requests: list[Logged] = []
    bad: list[BadLine] = []
    for found in _read(path, columns or {}):
        if isinstance(found, BadLine):
            if not skip_bad_lines:
                raise InvalidParameter(
                    f"{path}, line {found.number}: {found.reason}; remove it, or skip bad lines"
                )
            bad.append(found)
        else:
            requests.append(found)
    if not requests:
        raise InvalidParameter(f"{path} holds no request; see docs/how-to/evaluate.md for forms")
    clean = [_redacted(request, redactor) for request in requests]
    weights = Counter(request.messages for request in clean)
    distinct = list({request.messages: request for request in clean}.values())
    strata = _strata(distinct)
    chosen = _sample(distinct, strata, take=take, seed=seed)
    items = tuple(
        _item(r, number, family=family, weight=weights[r.messages])
        for number, r in enumerate(chosen, start=1)
    )
    counts = Counter(strata[r.line] for r in distinct)
    taken = Counter(strata[r.line] for r in chosen)
    return Collected(
        set=EvaluationSet(name, "business", items, licence="private"),
        requests=len(requests),
        distinct=len(distinct),
        bad_lines=tuple(bad),
        replaced=dict(redactor.counts),
        strata={key: (counts[key], taken[key]) for key in sorted(counts)},
    )


def _redacted(request: Logged, redactor: Redactor) -> Logged:
    texts = redactor.conversation([m.content for m in request.messages])
    messages = [Message(m.role, t) for m, t in zip(request.messages, texts, strict=True)]
    return replace(request, messages=tuple(messages))


def _item(request: Logged, number: int, *, family: str, weight: int) -> Item:
    return Item(
        Prompt(f"{family}-{number}", family, ("imported",), "private", request.messages),
        sampling=request.sampling,
        tools=request.tools,
        response_format=request.response_format,
        output_tokens=request.output_tokens,
        weight=float(weight),
    )


def _strata(requests: Sequence[Logged]) -> dict[int, str]:
    """Line to a class of input and output length, thirds of each."""

    def cuts(values: Sequence[int]) -> list[int]:
        ranked = sorted(values)
        return [ranked[len(ranked) * k // STRATA] for k in range(1, STRATA)] if ranked else []

    names = ("short", "medium", "long")
    inputs = cuts([r.input_words for r in requests])
    outputs = cuts([r.output_tokens for r in requests if r.output_tokens is not None])

    def grade(value: int | None, edges: Sequence[int]) -> str:
        return "unknown" if value is None else names[sum(value >= edge for edge in edges)]

    return {
        r.line: f"{grade(r.input_words, inputs)}/{grade(r.output_tokens, outputs)}"
        for r in requests
    }


def _sample(
    requests: Sequence[Logged], strata: Mapping[int, str], *, take: int | None, seed: int
) -> list[Logged]:
    """So many requests, every class by its share and with one at least; in the log's order."""
    if take is None or take >= len(requests):
        return list(requests)
    if take < 1:
        raise InvalidParameter(f"take is {take}; use 1 or more")
    groups: dict[str, list[Logged]] = {}
    for request in requests:
        groups.setdefault(strata[request.line], []).append(request)
    rng = random.Random(seed)
    for name in sorted(groups):
        rng.shuffle(groups[name])
    ideal = {name: len(group) * take / len(requests) for name, group in groups.items()}
    size = {name: max(1, int(share)) for name, share in ideal.items()}
    while sum(size.values()) > take:
        size[max(size, key=lambda n: (size[n] - ideal[n], size[n], n))] -= 1
    while sum(size.values()) < take:
        open_ = [n for n in size if size[n] < len(groups[n])]
        size[max(open_, key=lambda n: (ideal[n] - size[n], n))] += 1
    chosen = [r for name in sorted(groups) for r in groups[name][: size[name]]]
    return sorted(chosen, key=lambda r: r.line)


# -- forms of logs ------------------------------------------------------------------------------


def _read(path: Path, columns: Mapping[str, str]) -> Iterator[Logged | BadLine]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as fault:
        raise InvalidParameter(f"{path} is not UTF-8 (byte {fault.start}); convert it") from None
    except OSError as fault:
        raise InvalidParameter(f"{path} cannot be read: {fault.strerror}") from None
    if path.suffix.lower() in (".csv", ".tsv"):
        yield from _csv(text, columns, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        return
    if text.lstrip().startswith("["):
        yield from _json_list(text)
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield from _line(line, number)


def _json_list(text: str) -> Iterator[Logged | BadLine]:
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as fault:
        yield BadLine(1, f"not JSON: {fault}")
        return
    for number, entry in enumerate(entries, start=1):
        yield _entry(entry, number)


def _line(line: str, number: int) -> Iterator[Logged | BadLine]:
    if not line.lstrip().startswith("{"):
        found = _VLLM.search(line)
        if found is not None:
            yield _vllm(found, number)
        elif "Received request" in line or not _is_log_line(line):
            yield BadLine(number, "neither JSON nor a line of vLLM's request log")
        return
    try:
        yield _entry(json.loads(line), number)
    except (ValueError, RecursionError) as fault:
        yield BadLine(number, f"not JSON: {fault}")


def _is_log_line(line: str) -> bool:
    """Other lines of a server's log, which hold no request by their nature."""
    return re.match(r"\s*(?:\([^)]*\)\s*)?(?:DEBUG|INFO|WARNING|ERROR)\b", line) is not None


def _entry(entry: Any, number: int) -> Logged | BadLine:
    """A request in any of the JSON forms."""
    if not isinstance(entry, Mapping):
        return BadLine(number, "no JSON object")
    if isinstance(entry.get("conversations"), list):
        turns = [
            {"role": SPEAKERS.get(str(t.get("from", t.get("role"))).lower(), "?"), "content": t.get(
                "value", t.get("content"))}
            for t in entry["conversations"]
            if isinstance(t, Mapping)
        ]  # fmt: skip
        return _conversation(turns, {}, number)
    request = entry
    for key in ("request", "body", "kwargs", "proxy_server_request"):
        inner = entry.get(key)
        if isinstance(inner, Mapping) and ("messages" in inner or "prompt" in inner):
            request = inner
    if isinstance(request.get("messages"), list):
        return _conversation(request["messages"], {**entry, **request}, number)
    if isinstance(request.get("prompt"), str):
        turn = {"role": USER_ROLE, "content": request["prompt"]}
        return _conversation([turn], {**entry, **request}, number)
    return BadLine(number, "has neither messages, conversations nor a prompt")


def _conversation(turns: Sequence[Any], entry: Mapping[str, Any], number: int) -> Logged | BadLine:
    messages: list[Message] = []
    for turn in turns:
        role = turn.get("role") if isinstance(turn, Mapping) else None
        text = _text(turn.get("content")) if isinstance(turn, Mapping) else ""
        if role == "developer":
            role = "system"
        if role not in ROLES:
            return BadLine(number, f"a message has the role {role!r}")
        if text.strip():
            messages.append(Message(str(role), text))
    answer = ""
    while messages and messages[-1].role not in (USER_ROLE, "tool"):
        answer = messages.pop().content
    if not messages:
        return BadLine(number, "no message of the user")
    parameters = entry.get("model_parameters")
    given = {**entry, **(parameters if isinstance(parameters, Mapping) else {})}
    tools = given.get("tools")
    output = _output_tokens(entry, answer)
    return Logged(
        number,
        tuple(messages),
        output_tokens=output,
        sampling={n: given[n] for n in SAMPLING if isinstance(given.get(n), int | float)},
        tools=tuple(tools) if isinstance(tools, list) else (),
        response_format=given.get("response_format")
        if isinstance(given.get("response_format"), Mapping)
        else None,
    )


def _text(content: Any) -> str:
    """A message's text: a string, or parts of which the text ones count."""
    if isinstance(content, list):
        return "".join(str(p.get("text", "")) for p in content if isinstance(p, Mapping))
    return content if isinstance(content, str) else ""


def _output_tokens(entry: Mapping[str, Any], answer: str) -> int | None:
    response = entry.get("response")
    for place in (entry, entry.get("usage"), response, _inner(response, "usage")):
        told = place.get("completion_tokens") if isinstance(place, Mapping) else None
        if isinstance(told, int):
            return told
    choices = response.get("choices") if isinstance(response, Mapping) else None
    if not answer and isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
        answer = _text((choices[0].get("message") or {}).get("content"))
    if not answer and isinstance(response, str):
        answer = response
    return round(len(answer.split()) * WORDS_TO_TOKENS) if answer else None


def _inner(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None


def _vllm(found: re.Match[str], number: int) -> Logged | BadLine:
    try:
        prompt = ast.literal_eval(found[2])
    except (ValueError, SyntaxError):
        return BadLine(number, "the prompt in vLLM's log line cannot be read")
    if not isinstance(prompt, str) or not prompt.strip():
        return BadLine(number, "vLLM logged no prompt text; it was started without it")
    sampling: dict[str, Any] = {}
    for name in SAMPLING:
        value = re.search(rf"\b{name}=(-?[0-9.]+(?:e-?\d+)?)", found[3])
        if value is not None:
            sampling[name] = float(value[1]) if "." in value[1] else int(value[1])
    if sampling.get("top_k", 1) <= 0:
        sampling.pop("top_k", None)
    return Logged(number, (Message(USER_ROLE, prompt),), sampling=sampling)


def _csv(text: str, columns: Mapping[str, str], *, delimiter: str) -> Iterator[Logged | BadLine]:
    reader = csv.DictReader(io.StringIO(text), delimiter=delimiter)
    names = {n: columns.get(n, n) for n in ("prompt", "system", "answer", "output_tokens")}
    if names["prompt"] not in (reader.fieldnames or []):
        have = ", ".join(reader.fieldnames or [])
        raise InvalidParameter(f"the CSV has no column {names['prompt']!r}; it has {have}")
    for row in reader:
        number = reader.line_num
        system, prompt = row.get(names["system"]), row.get(names["prompt"])
        if not prompt or not prompt.strip():
            yield BadLine(number, "the prompt is empty")
            continue
        messages = [Message("system", system)] if system and system.strip() else []
        told, answer = row.get(names["output_tokens"]) or "", row.get(names["answer"]) or ""
        tokens = int(told) if told.isdigit() else _output_tokens({}, answer)
        yield Logged(number, (*messages, Message(USER_ROLE, prompt)), output_tokens=tokens)
