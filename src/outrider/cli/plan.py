"""`outrider plan`: the flags of a capacity plan; the simulation is `outrider.rollout.planner`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options
from outrider.cli.session import Session
from outrider.errors import InvalidParameter

if TYPE_CHECKING:
    from outrider.rollout.planner import Acceptance, Costs, Outcome, Plan


def plan(
    context: typer.Context,
    costs: Annotated[
        Path,
        typer.Option(help="Measured costs: a cost table, or what `outrider replay --json` wrote."),
    ],
    rate: Annotated[float, typer.Option(help="Requests per second, of the whole fleet.")],
    drafter: Annotated[
        str | None, typer.Option(help="Take this drafter's acceptance and cost from a replay.")
    ] = None,
    acceptance: Annotated[
        str | None,
        typer.Option(help="Share of steps that accept 1, 2, ... guesses or more: 0.7,0.5,0.35."),
    ] = None,
    draft_ms: Annotated[
        str | None, typer.Option(help="Milliseconds of drafting: once a step, or 0.1+0.9 a depth.")
    ] = None,
    fixed: Annotated[
        bool, typer.Option("--fixed", help="Always guess as deep, whatever the batch.")
    ] = False,
    replicas: Annotated[int, typer.Option(help="Engines that share the traffic.")] = 1,
    prompt_tokens: Annotated[float, typer.Option(help="Mean length of prompts.")] = 300,
    output_tokens: Annotated[float, typer.Option(help="Mean length of answers.")] = 150,
    spread: Annotated[
        float, typer.Option(help="Of both lengths: deviation of the logarithm; 0 for one length.")
    ] = 0.7,
    burstiness: Annotated[float, typer.Option(help="1 for Poisson; more comes in bursts.")] = 1.0,
    requests: Annotated[int, typer.Option(help="How many to simulate.")] = 20_000,
    slots: Annotated[int, typer.Option(help="Sequences at once, per replica.")] = 16,
    chunk: Annotated[int, typer.Option(help="Prompt tokens per step.")] = 256,
    busy_chunk: Annotated[int, typer.Option(help="The same while others decode.")] = 64,
    step_tokens: Annotated[
        int | None,
        typer.Option(help="In their place: tokens per step, all together (vLLM's batched tokens)."),
    ] = None,
    ttft_ms: Annotated[
        float | None, typer.Option(help="Aim for P95 of the time to the first token.")
    ] = None,
    tpot_ms: Annotated[
        float | None, typer.Option(help="Aim for P95 of the time per output token.")
    ] = None,
    seed: options.Seed = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the plan to this file.")
    ] = None,
) -> None:
    """Simulate a fleet with and without speculation: times, throughput, replicas saved."""
    from outrider.rollout import planner

    session: Session = context.obj
    if json_file is not None:
        options.check_writable(json_file)
    document = _document(costs)
    engine = planner.Engine(
        _costs(document, drafter, draft_ms, costs),
        *_acceptance(document, drafter, acceptance, costs),
        adaptive=not fixed,
        slots=slots,
        chunk=chunk,
        busy_chunk=busy_chunk,
        step_tokens=step_tokens,
    )
    traffic = planner.Traffic(
        rate,
        planner.Lengths(prompt_tokens, spread),
        planner.Lengths(output_tokens, spread),
        requests=requests,
        burstiness=burstiness,
        seed=seed or 0,
    )
    answer = planner.plan(traffic, engine, replicas=replicas, ttft_ms=ttft_ms, tpot_ms=tpot_ms)
    session.out.print(to_text(answer), markup=False)
    if json_file is not None:
        whole = {"traffic": asdict(traffic), "engine": asdict(engine), "plan": answer.to_dict()}
        options.write_file(json_file, json.dumps(whole, indent=2) + "\n")


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise InvalidParameter(f"--costs {path} cannot be read: {fault}") from None
    table = document.get("costs", document) if isinstance(document, dict) else None
    if not isinstance(table, dict) or not isinstance(table.get("verify_ms"), dict):
        raise InvalidParameter(
            f"--costs {path} holds no verify_ms; see docs/how-to/plan-capacity.md"
        )
    return {**document, "costs": table}


def _prediction(document: Mapping[str, Any], drafter: str, path: Path) -> Mapping[str, Any]:
    found = [p for p in document.get("predictions", ()) if p.get("drafter") == drafter]
    if not found:
        known = sorted({p.get("drafter", "?") for p in document.get("predictions", ())})
        raise InvalidParameter(f"--drafter {drafter} is not in {path}; it has {known or 'none'}")
    return max(found, key=lambda p: p.get("speedup") or 0.0)


def _acceptance(
    document: Mapping[str, Any], drafter: str | None, given: str | None, path: Path
) -> Acceptance:
    """As the flags give it, or as a replay measured it."""
    from outrider.rollout.planner import Acceptance, acceptance

    if given is not None:
        try:
            return Acceptance(tuple(float(part) for part in given.split(",")))
        except ValueError:
            raise InvalidParameter(
                f"--acceptance {given!r} is no list of shares, such as 0.7,0.5,0.35"
            ) from None
    if drafter is None:
        raise InvalidParameter("give --acceptance, or --drafter of a replay's file")
    prediction = _prediction(document, drafter, path)
    requests = prediction.get("requests", ())
    if not requests:
        return Acceptance(tuple(share for share in prediction.get("by_position", ()) if share > 0))
    try:
        accepted = [request["accepted_by_position"] for request in requests]
        steps = [request["target_steps"] for request in requests]
        return acceptance(accepted, steps, rows_per_step=prediction["rows_per_step"])
    except KeyError as fault:
        raise InvalidParameter(
            f"--costs {path}: {drafter} has no {fault}; let `outrider replay --json` write it"
        ) from None


def _costs(
    document: Mapping[str, Any], drafter: str | None, given: str | None, path: Path
) -> Costs:
    from outrider.rollout.planner import Costs

    base = depth = 0.0
    if given is not None:
        try:
            base, depth = (float(part) for part in [*given.split("+"), "0"][:2])
        except ValueError:
            raise InvalidParameter(f"--draft-ms {given!r} is not like 0.3 or 0.1+0.9") from None
    elif drafter is not None:
        base = float(_prediction(document, drafter, path).get("draft_ms") or 0.0)
    table = document["costs"]
    try:
        verify = {int(rows): float(ms) for rows, ms in table["verify_ms"].items()}
        host, each = (float(table.get(name) or 0.0) for name in ("host_ms", "sequence_ms"))
        return Costs(verify, host, base, depth, sequence_ms=each)
    except (TypeError, ValueError) as fault:
        raise InvalidParameter(f"--costs {path}: {fault}") from None


def to_text(answer: Plan) -> str:
    """The plan for people."""
    head = f"{'':12}{'TTFT ms P50':>12}{'P95':>9}{'P99':>9}{'TPOT ms P50':>13}{'P95':>8}{'P99':>8}"
    lines = [head + f"{'tokens/s':>10}{'batch':>7}{'busy':>6}"]
    for name, outcome in (("plain", answer.plain), ("speculative", answer.speculative)):
        lines.append(f"{name:12}{_row(outcome)}")
    if answer.crossover is None:
        lines.append(
            "speculation has the better median TPOT up to the load that plain decoding bears"
        )
    elif not answer.crossover:
        lines.append("speculation does not help at any load")
    else:
        lines.append(f"speculation helps the median TPOT up to {answer.crossover:.2f} requests/s")
    counts = (answer.plain_replicas, answer.speculative_replicas)
    if any(count is not None for count in counts):
        plain, ours = ("none" if count is None else str(count) for count in counts)
        saved = "" if answer.saved is None else f"; saved {answer.saved}"
        lines.append(f"replicas that meet the aims: plain {plain}, speculative {ours}{saved}")
    return "\n".join(lines)


def _row(outcome: Outcome) -> str:
    ttft, tpot = outcome.ttft, outcome.tpot
    warning = "" if outcome.stable else "  OVERLOADED: the wait grows"
    return (
        f"{ttft['p50']:>12.0f}{ttft['p95']:>9.0f}{ttft['p99']:>9.0f}{tpot['p50']:>13.2f}"
        f"{tpot['p95']:>8.2f}{tpot['p99']:>8.2f}{outcome.tokens_per_s:>10.0f}"
        f"{outcome.batch:>7.1f}{outcome.busy:>6.0%}{warning}"
    )
