"""`outrider chat`: a conversation in the terminal."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from outrider.cli import options
from outrider.cli.follow import Interrupt, follow
from outrider.cli.remote import KEY_VARIABLE, Server
from outrider.cli.render import Summary, view_for
from outrider.cli.session import Loaded, Session, check_drafter, is_interactive
from outrider.errors import OutriderError

if TYPE_CHECKING:
    from outrider.core.sampling import SamplingParams
    from outrider.engine import Engine

DEFAULT = options.DEFAULT_TARGET
HELP = "/exit leaves, /reset starts again, Ctrl-C stops an answer and leaves at the prompt"
REPLY_ROLE = "assistant"  # the chat templates' name for the model's own turn

Url = Annotated[
    str | None,
    typer.Option(
        help="Talk with a server at this address instead, such as http://127.0.0.1:8000/v1; its "
        f"key is read from {KEY_VARIABLE}. TARGET is then the name of a model there."
    ),
]


def chat(
    context: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(
            help=f"A model: an alias, a GGUF file or a directory. Default: {DEFAULT}, or with "
            "--url the server's first model.",
        ),
    ] = None,
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
    url: Url = None,
) -> None:
    """Talk with a model; numbers follow each answer."""
    session: Session = context.obj
    params = options.sampling(
        temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed
    )
    speaker: Speaker
    if url is not None:
        speaker = Remote.at(url, target, params)
    else:
        check_drafter(drafter)
        model = target or DEFAULT
        loaded = session.model(model, weights=weights, device=device, exact=exact, threads=threads)
        engine = session.engine(loaded, [drafter], context=context_length)
        speaker = Local(loaded, engine, params, drafter)
    session.err.print(HELP, style="dim", markup=False)
    Conversation(session, speaker, system=system).run()


@dataclass(frozen=True)
class Said:
    """An answer and the line of numbers about it."""

    text: str
    numbers: str


class Speaker(Protocol):
    """Whoever answers."""

    def answer(self, session: Session, messages: list[dict[str, str]]) -> Said:
        """Answer a conversation and show the text while it grows.

        Raises:
            OutriderError: there is no answer.
        """
        ...


@dataclass(frozen=True)
class Local:
    """A model in this process."""

    loaded: Loaded
    engine: Engine
    params: SamplingParams
    drafter: str

    def answer(self, session: Session, messages: list[dict[str, str]]) -> Said:
        prompt = self.loaded.tokenizer.chat(messages)
        room = max(self.engine.context - len(prompt), 1)  # a long talk leaves less than was asked
        params = replace(self.params, max_tokens=min(self.params.max_tokens, room))
        view = view_for(session.out)
        completion = follow(self.engine, prompt, params, drafter=self.drafter, view=view)
        if completion.finish_reason == "error":
            raise OutriderError(completion.error or "the target failed")
        stopped = " | stopped" if completion.finish_reason == "cancelled" else ""
        return Said(completion.text, Summary.of(completion).line() + stopped)


@dataclass(frozen=True)
class Remote:
    """A model behind a server."""

    server: Server
    model: str
    params: SamplingParams

    @classmethod
    def at(cls, url: str, model: str | None, params: SamplingParams) -> Remote:
        """The server at an address, and its first model where none is named."""
        server = Server(url, os.environ.get(KEY_VARIABLE))
        return cls(server, model or server.models()[0], params)

    def answer(self, session: Session, messages: list[dict[str, str]]) -> Said:
        body = {
            "model": self.model,
            "messages": messages,
            "temperature": self.params.temperature,
            "top_p": self.params.top_p,
            "max_tokens": self.params.max_tokens,
            **({} if self.params.seed is None else {"seed": self.params.seed}),
        }
        view, text = view_for(session.out), ""
        with Interrupt() as interrupt:
            try:
                for part in self.server.stream(body):
                    view.show(part.text, part.tokens)
                    text += part.text
                    if interrupt.requested:
                        break
            finally:
                view.close()
        return Said(text, self.server.numbers + (" | stopped" if interrupt.requested else ""))


class Conversation:
    """The turns so far and the loop that adds to them."""

    def __init__(self, session: Session, speaker: Speaker, *, system: str | None) -> None:
        self._session = session
        self._speaker = speaker
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
        try:
            said = self._speaker.answer(self._session, asked)
        except OutriderError as refusal:
            self._session.err.print(f"error: {refusal}; /reset starts again", markup=False)
            return
        self.messages = [*asked, {"role": REPLY_ROLE, "content": said.text}]
        self._session.err.print(f"[dim]{said.numbers}[/dim]")

    def _read(self) -> str | None:
        """The next line; `None` at the end of input."""
        try:
            return input("> " if is_interactive() else "").strip()
        except EOFError:
            return None
