"""`outrider generate`: one prompt, one answer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from outrider.cli import options
from outrider.cli.follow import follow
from outrider.cli.render import SilentView, Summary, View, view_for, why_plain
from outrider.cli.session import Session, check_drafter
from outrider.errors import InvalidParameter, NonFiniteLogits

if TYPE_CHECKING:
    from outrider.engine import Completion

INTERRUPTED = 130


def generate(
    context: typer.Context,
    target: options.Target,
    prompt: options.Prompt = None,
    prompt_file: options.PromptFile = None,
    system: options.System = None,
    raw: options.Raw = False,
    drafter: options.Drafter = options.DEFAULT_DRAFTER,
    rule: options.Rule = "walk",
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    max_tokens: options.MaxTokens = 256,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    seed: options.Seed = None,
    context_length: options.Context = None,
    weights: options.Weights = "auto",
    device: options.Device = "auto",
    exact: options.Exact = False,
    threads: options.Threads = None,
    records: options.Records = None,
    as_json: options.Json = False,
) -> None:
    """Answer one prompt; text on stdout, numbers on stderr."""
    session: Session = context.obj
    params = options.sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop=stop,
        ignore_eos=ignore_eos,
        max_tokens=max_tokens,
        seed=seed,
    )
    text = options.one_prompt(prompt, prompt_file)
    if raw and system is not None:
        raise InvalidParameter("--system with --raw; a raw prompt has no system message")
    check_drafter(drafter)
    if records is not None:
        options.check_writable(records)
    loaded = session.model(target, weights=weights, device=device, exact=exact, threads=threads)
    engine = session.engine(loaded, [drafter], rule=rule, context=context_length)
    if raw:
        tokens = loaded.tokenizer.encode(text)
    else:
        tokens = loaded.tokenizer.chat(options.messages(text, system=system))
    view: View = SilentView() if as_json else view_for(session.out)
    completion = follow(engine, tokens, params, drafter=drafter, view=view)
    report(session, completion, as_json=as_json)
    if records is not None:
        lines = [json.dumps(step.to_dict()) + "\n" for step in completion.steps]
        options.write_file(records, "".join(lines))
    finish(completion)


def report(session: Session, completion: Completion, *, as_json: bool) -> None:
    """The numbers of a finished request: a line on stderr, or everything as JSON on stdout."""
    summary = Summary.of(completion)
    if as_json:
        session.out.out(json.dumps(as_object(completion, summary), ensure_ascii=False))
        return
    session.err.print(f"[dim]{summary.line()} | seed {completion.seed}[/dim]")
    reason = why_plain(completion.steps)
    if reason and not summary.proposed:
        session.err.print(f"nothing was guessed: {reason}", style="dim", markup=False)


def as_object(completion: Completion, summary: Summary) -> dict[str, Any]:
    """A finished request as plain data."""
    return {
        "text": completion.text,
        "tokens": list(completion.tokens),
        "prompt_tokens": len(completion.prompt),
        "finish_reason": completion.finish_reason,
        "error": completion.error,
        "seed": completion.seed,
        "drafter": completion.drafter,
        "summary": summary.to_dict(),
    }


def finish(completion: Completion) -> None:
    """Turn how a request ended into how the command ends.

    Raises:
        NonFiniteLogits: the target failed in the middle of the request.
        typer.Exit: it was interrupted.
    """
    if completion.finish_reason == "error":
        raise NonFiniteLogits(completion.error or "the target failed; run again with --debug")
    if completion.finish_reason == "cancelled":
        raise typer.Exit(INTERRUPTED)
