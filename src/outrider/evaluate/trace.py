"""Traces: what a target answered to some prompts, recorded once and replayed as often as wanted.

A trace is a line file (`records/files.py`): the manifest, a line of facts about the target and what
its steps cost, and a line per request with prompt, output, sampling parameters and seed. Under
`walk` the output is the same whoever guesses, so a trace holds all that drafters can be judged by.
It carries the prompts' tokens themselves; the recordings of the drafter `replay` are another file.
Hidden states, where they are wanted, lie in a folder beside it; this module knows only that
somebody takes and gives them.

Shapes: R rows (tokens of a request but its last), F features, D width.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from outrider.core.sampling import SamplingParams
from outrider.drafters.base import Drafter
from outrider.engine import Completion, CostTable, Engine, EngineConfig
from outrider.engine.budget import CostBudget
from outrider.errors import InvalidParameter, OutriderError
from outrider.evaluate.workloads import Prompt, load_workload
from outrider.models.target import Target
from outrider.models.tokenizer import Tokenizer
from outrider.records.files import JsonlWriter, read_jsonl
from outrider.records.manifest import RunManifest, TargetIdentity, run_manifest
from outrider.records.request import is_verify_step

FORMAT = 1
PLAIN = "none"
RECORDER = "recorder"
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class TraceFacts:
    """What a replay must know of the engine that recorded.

    Attributes:
        vocab_size, end_tokens: the target's.
        context: positions per sequence.
        prefill_chunk: as in `EngineConfig`.
        verify_ms: milliseconds of a pass by number of rows, on the machine that recorded.
        host_ms: the rest of a step there: the median of the recorded ones.
        features: hidden states that were kept; empty for none.
    """

    vocab_size: int
    end_tokens: frozenset[int]
    context: int
    prefill_chunk: int
    verify_ms: Mapping[int, float]
    host_ms: float
    features: tuple[int, ...] = ()

    def costs(self) -> CostTable:
        """The recorded costs, as a table of its own."""
        return CostTable(dict(self.verify_ms), host_ms=self.host_ms)


@dataclass(frozen=True)
class TracedRequest:
    """One request and its whole output.

    Attributes:
        id: unique in the trace: workload and prompt.
        workload: where its prompt comes from.
        tenant: whom it belongs to; drafters' stores are never shared between two.
        prompt, tokens: what went in, and what came out.
        params: how it was sampled; its seed is the one that was used.
    """

    id: str
    workload: str
    tenant: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    params: SamplingParams

    @property
    def rows(self) -> int:
        """Rows of features that it has: all tokens but the last."""
        return len(self.prompt) + len(self.tokens) - 1


@dataclass(frozen=True)
class Trace:
    """A recorded trace.

    Attributes:
        manifest: what was run, on what.
        facts: of target and engine.
        requests: in the order in which they ran.
    """

    manifest: RunManifest
    facts: TraceFacts
    requests: tuple[TracedRequest, ...]

    @property
    def target(self) -> TargetIdentity:
        """Who answered."""
        assert self.manifest.target is not None  # `read_trace` refuses a trace without one
        return self.manifest.target


@dataclass(frozen=True)
class TracePlan:
    """What to record.

    Attributes:
        workloads: specs, see `load_workload`.
        limit: prompts per workload.
        params: sampling parameters of every request; without a seed, seed 0.
        context: positions per request; `None` takes the model's.
    """

    workloads: tuple[str, ...]
    params: SamplingParams
    limit: int | None = None
    context: int | None = None


class FeatureDrafter(Drafter, Protocol):
    """A drafter that guesses nothing and keeps the features of finished sequences."""

    def take(self, tokens: tuple[int, ...]) -> torch.Tensor:
        """The features [R, F, D] of a finished sequence."""
        ...


class FeatureFolder(Protocol):
    """Where features are kept, by request id."""

    def add(self, sample: str, rows_RFD: torch.Tensor) -> None: ...


@dataclass(frozen=True)
class FeatureKeeping:
    """Who catches hidden states while a trace is recorded, and where they go."""

    drafter: FeatureDrafter
    folder: FeatureFolder


def record_trace(
    target: Target,
    tokenizer: Tokenizer,
    plan: TracePlan,
    path: Path,
    *,
    keeping: FeatureKeeping | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Trace:
    """Let the target answer prompts plainly, one at a time, and write the trace.

    Raises:
        InvalidParameter: an unknown workload, or a prompt that does not fit.
        RecordFileError: the file exists, or cannot be written.
        OutriderError: the target failed.
    """
    prompts = [(w, p) for w in plan.workloads for p in load_workload(w, limit=plan.limit)]
    params = replace(plan.params, seed=plan.params.seed or 0)
    drafters: dict[str, Drafter] = {} if keeping is None else {RECORDER: keeping.drafter}
    name = PLAIN if keeping is None else RECORDER
    config = EngineConfig(slots=1, context=plan.context, reuse_prefix=False)
    engine = Engine(target, drafters=drafters, tokenizer=tokenizer, config=config)
    verify_ms = _measured(engine)
    encoded = _encoded(tokenizer, prompts, params.max_tokens, engine.context)
    manifest = run_manifest(
        seed=params.seed,
        threads=torch.get_num_threads(),
        target=TargetIdentity(target.name, target.fingerprint, target.precision),
        options={**asdict(plan), "params": params_to_dict(params)},
        accelerator=None if target.device.type == "cpu" else str(target.device),
    )
    with JsonlWriter.create(path, manifest) as lines:
        engine.generate(encoded[:1], replace(params, max_tokens=WARM_UP_TOKENS, min_tokens=0))
        requests: list[TracedRequest] = []
        host_ms: list[float] = []
        for (workload, prompt), ids in zip(prompts, encoded, strict=True):
            progress(f"{workload} {prompt.id} ({len(requests) + 1} of {len(prompts)})")
            [done] = engine.generate([ids], params, drafter=name)
            request = _traced(f"{workload}/{prompt.id}", workload, done)
            if keeping is not None:
                keeping.folder.add(request.id, keeping.drafter.take(ids + request.tokens))
            requests.append(request)
            lines.write(request_to_dict(request))
            host_ms += [step.host_ms for step in done.steps if is_verify_step(step)]
        facts = TraceFacts(
            vocab_size=target.vocab_size,
            end_tokens=target.end_tokens,
            context=engine.context,
            prefill_chunk=config.prefill_chunk,
            verify_ms=verify_ms,
            host_ms=statistics.median(host_ms),
            features=() if keeping is None else keeping.drafter.needs.layers,
        )
        lines.write(facts_to_dict(facts))
        return Trace(lines.finish(), facts, tuple(requests))


def _encoded(
    tokenizer: Tokenizer, prompts: Sequence[tuple[str, Prompt]], max_tokens: int, context: int
) -> list[tuple[int, ...]]:
    """The prompts of some workloads as tokens.

    Raises:
        InvalidParameter: one does not fit.
    """
    encoded = [tuple(tokenizer.chat(prompt.chat())) for _, prompt in prompts]
    for (workload, prompt), ids in zip(prompts, encoded, strict=True):
        if len(ids) + max_tokens > context:
            raise InvalidParameter(
                f"prompt {prompt.id} of {workload} has {len(ids)} tokens; with max_tokens "
                f"{max_tokens} it exceeds the context of {context}: lower one of them"
            )
    return encoded


def _measured(engine: Engine) -> dict[int, float]:
    """The pass costs that the engine measured when it was put together."""
    assert isinstance(engine.budget, CostBudget)  # it was given no other
    return dict(engine.budget.costs.verify_ms)


def _traced(id: str, workload: str, done: Completion) -> TracedRequest:
    """The request as a trace has it; every one its own tenant, as in a benchmark.

    Raises:
        OutriderError: it ended by a fault.
    """
    if done.error is not None or not done.tokens:
        raise OutriderError(f"request {id} gave no trace: {done.error or 'no token came'}")
    params = replace(done.params, seed=done.seed)
    return TracedRequest(id, workload, id, done.prompt, done.tokens, params)


def read_trace(path: Path) -> Trace:
    """Read a trace.

    Raises:
        RecordFileError: there is no such file, or it is no record file.
        InvalidParameter: it is a record file of another kind, unfinished or damaged; says which.
    """
    file = read_jsonl(path)
    if file.manifest.target is None or not file.records:
        raise InvalidParameter(f"{path} is not a trace; record one with `outrider replay --record`")
    if file.bad_lines or file.torn or not file.finished:
        raise InvalidParameter(f"{path} is damaged or its recording was cut off; record it anew")
    requests: list[TracedRequest] = []
    facts: TraceFacts | None = None
    for number, record in enumerate(file.records, start=2):
        try:
            if record["kind"] == "trace":
                facts = facts_from_dict(record)
            else:
                requests.append(request_from_dict(record))
        except (KeyError, TypeError, ValueError) as fault:
            raise InvalidParameter(
                f"{path}, line {number}: {fault!r}; record it with `outrider replay --record`"
            ) from None
    if facts is None or not requests:
        raise InvalidParameter(f"{path} holds no request or no facts; record it anew")
    return Trace(file.manifest, facts, tuple(requests))


def request_to_dict(request: TracedRequest) -> dict[str, Any]:
    """JSON-ready."""
    own = {**vars(request), "prompt": list(request.prompt), "tokens": list(request.tokens)}
    return {"kind": "request", **own, "params": params_to_dict(request.params)}


def request_from_dict(record: Mapping[str, Any]) -> TracedRequest:
    """The request of `request_to_dict`'s form; raises KeyError, TypeError or ValueError."""
    if record["kind"] != "request":
        raise ValueError(f"kind is {record['kind']!r}")
    prompt, tokens = tuple(map(int, record["prompt"])), tuple(map(int, record["tokens"]))
    if not prompt or not tokens:
        raise ValueError("a request without prompt or output")
    return TracedRequest(
        id=str(record["id"]),
        workload=str(record["workload"]),
        tenant=str(record["tenant"]),
        prompt=prompt,
        tokens=tokens,
        params=params_from_dict(record["params"]),
    )


def params_to_dict(params: SamplingParams) -> dict[str, Any]:
    """JSON-ready; the biases' token ids become strings."""
    biases = {str(token): bias for token, bias in params.logit_bias.items()}
    return {**asdict(replace(params, logit_bias={})), "logit_bias": biases}


def params_from_dict(record: Mapping[str, Any]) -> SamplingParams:
    """The parameters of `params_to_dict`'s form; raises TypeError or ValueError."""
    values = dict(record)
    values["logit_bias"] = {int(token): bias for token, bias in values["logit_bias"].items()}
    values["bad_words"] = tuple(tuple(words) for words in values["bad_words"])
    for name in ("stop_token_ids", "stop"):
        values[name] = tuple(values[name])
    return SamplingParams(**values)


def facts_to_dict(facts: TraceFacts) -> dict[str, Any]:
    """JSON-ready."""
    return {
        "kind": "trace",
        "format": FORMAT,
        **vars(facts),
        "end_tokens": sorted(facts.end_tokens),
        "verify_ms": {str(rows): ms for rows, ms in facts.verify_ms.items()},
        "features": list(facts.features),
    }


def facts_from_dict(record: Mapping[str, Any]) -> TraceFacts:
    """The facts of `facts_to_dict`'s form; raises KeyError, TypeError or ValueError."""
    if record["format"] != FORMAT:
        raise ValueError(f"format is {record['format']!r}, this version reads {FORMAT}")
    verify_ms = {int(rows): float(ms) for rows, ms in record["verify_ms"].items()}
    if not verify_ms:
        raise ValueError("no costs")
    return TraceFacts(
        vocab_size=int(record["vocab_size"]),
        end_tokens=frozenset(map(int, record["end_tokens"])),
        context=int(record["context"]),
        prefill_chunk=int(record["prefill_chunk"]),
        verify_ms=verify_ms,
        host_ms=float(record["host_ms"]),
        features=tuple(map(int, record["features"])),
    )
