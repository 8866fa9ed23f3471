"""`outrider bench`: the flags of a benchmark; what it measures is up to `outrider.evaluate`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import options
from outrider.cli.session import Session, check_drafter
from outrider.errors import InvalidParameter

DRAFTERS = "none,ngram,suffix"
WORKLOADS = "builtin:edit,builtin:chat"


def bench(
    context: typer.Context,
    target: Annotated[str, typer.Option(help="The model to measure.")] = options.DEFAULT_TARGET,
    drafters: Annotated[
        list[str] | None,
        typer.Option(help=f"Drafters to compare, by comma or repeated. Default: {DRAFTERS}."),
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help=f"builtin:NAME or a JSONL file, by comma or repeated. Default: {WORKLOADS}."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="At most this many prompts of each.")] = None,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = 0,
    rule: options.Rule = "walk",
    repeats: Annotated[int, typer.Option(help="Measured runs of each prompt.")] = 3,
    weights: options.Weights = "auto",
    device: options.Device = "auto",
    exact: options.Exact = False,
    threads: options.Threads = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write everything measured to this file.")
    ] = None,
    records: options.Records = None,
) -> None:
    """Compare drafters on workloads: speed, acceptance, and whether the tokens are the same."""
    from outrider.evaluate.bench import BenchPlan, run_bench
    from outrider.evaluate.workloads import load_workload

    session: Session = context.obj
    names = split(drafters or [DRAFTERS])
    workloads = split(workload or [WORKLOADS])
    params = options.sampling(
        temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed
    )
    for name, given in (("--drafters", names), ("--workload", workloads)):
        if not given:
            raise InvalidParameter(f"{name} is empty; name at least one")
    for name, value in (("--repeats", repeats), ("--limit", 1 if limit is None else limit)):
        if value < 1:
            raise InvalidParameter(f"{name} is {value}; use 1 or more")
    for drafter in names:
        check_drafter(drafter)
    for spec in workloads:
        load_workload(spec, limit=limit)  # refuse a wrong one before a model is loaded
    check_results(json_file, records)
    loaded = session.model(target, weights=weights, device=device, exact=exact, threads=threads)
    plan = BenchPlan(
        drafters=tuple(names),
        workloads=tuple(workloads),
        params=params,
        limit=limit,
        repeats=repeats,
        rule=rule,
    )
    report = run_bench(
        loaded.target,
        loaded.tokenizer,
        plan,
        source=loaded.source,
        records=records,
        progress=lambda line: session.err.print(line, style="dim", markup=False),
    )
    session.out.print(report.to_text(), markup=False)
    if json_file is not None:
        options.write_file(json_file, json.dumps(report.to_dict(), indent=2) + "\n")
    if not report.ok:
        raise typer.Exit(1)


def check_results(json_file: Path | None, records: Path | None) -> None:
    """Refuse places for the results that cannot take them, before minutes of work.

    Raises:
        InvalidParameter: one cannot be written, or the records exist: a run never mixes with them.
    """
    for path in (json_file, records):
        if path is not None:
            options.check_writable(path)
    if records is not None and records.exists():
        raise InvalidParameter(f"--records {records} exists already; choose another name")


def split(values: Sequence[str]) -> list[str]:
    """``["a,b", "c"]`` as ``["a", "b", "c"]``, each once."""
    parts = [part.strip() for value in values for part in value.split(",")]
    return list(dict.fromkeys(part for part in parts if part))
