"""`outrider chat`: a conversation in the terminal."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from outrider.cli import options
from outrider.cli.follow import follow
from outrider.cli.render import Summary, view_for
from outrider.cli.session import Loaded, Session, check_drafter, is_interactive
from outrider.errors import OutriderError

if TYPE_CHECKING:
    from outrider.core.sampling import SamplingParams
    from outrider.engine import Engine

HELP = "/exit leaves, /reset starts again, Ctrl-C stops an answer and leaves at the prompt"
REPLY_ROLE = "assistant"  # the chat templates' name for the model's own turn


def chat(
    context: typer.Context,
    target: options.Target = options.DEFAULT_TARGET,
    system: options.System = None,
    drafter: options.Drafter = options.DEFAULT_DRAFTER,
    temperature: options.Temperature = 0.7,
    top_p: options.TopP = 0.95,
    max_tokens: options.MaxTokens = 512,
    seed: options.Seed = None,
    context_length: options.Context = None,
    weights: options.Weights = "auto",
    device: options.Device = "auto",
    exact: options.Exact = False,
    threads: options.Threads = None,
) -> None:
    """Talk with a model; numbers follow each answer."""
    session: Session = context.obj
    params = options.sampling(
        temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed
    )
    check_drafter(drafter)
    loaded = session.model(target, weights=weights, device=device, exact=exact, threads=threads)
    engine = session.engine(loaded, [drafter], context=context_length)
    session.err.print(HELP, style="dim", markup=False)
    Conversation(session, loaded, engine, params, drafter=drafter, system=system).run()


class Conversation:
    """The turns so far and the loop that adds to them."""

    def __init__(
        self,
        session: Session,
        loaded: Loaded,
        engine: Engine,
        params: SamplingParams,
        *,
        drafter: str,
        system: str | None,
    ) -> None:
        self._session = session
        self._loaded = loaded
        self._engine = engine
        self._params = params
        self._drafter = drafter
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = list(self._start)

    def run(self) -> None:
        """Read lines until /exit or the end of input."""
        while True:
            line = self._read()
            if line is None or line in ("/exit", "/quit"):
                return
            if line == "/reset":
                self.messages = list(self._start)
            elif line.startswith("/"):
                self._session.err.print(HELP, style="dim", markup=False)
            elif line:
                self.answer(line)

    def answer(self, text: str) -> None:
        """One turn. A turn that fails is taken back, so the conversation can go on."""
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt = self._loaded.tokenizer.chat(asked)
        room = max(self._engine.context - len(prompt), 1)  # a long talk leaves less than was asked
        params = replace(self._params, max_tokens=min(self._params.max_tokens, room))
        view = view_for(self._session.out)
        try:
            completion = follow(self._engine, prompt, params, drafter=self._drafter, view=view)
        except OutriderError as refusal:
            self._session.err.print(f"error: {refusal}; /reset starts again", markup=False)
            return
        if completion.finish_reason == "error":
            self._session.err.print(f"error: {completion.error}", markup=False)
            return
        self.messages = [*asked, {"role": REPLY_ROLE, "content": completion.text}]
        stopped = " | stopped" if completion.finish_reason == "cancelled" else ""
        self._session.err.print(f"[dim]{Summary.of(completion).line()}{stopped}[/dim]")

    def _read(self) -> str | None:
        """The next line; `None` at the end of input."""
        try:
            return input("> " if is_interactive() else "").strip()
        except EOFError:
            return None
