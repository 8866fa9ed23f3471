"""Everything that stands behind the endpoints, put together once: engine, profiles, tokenizer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from outrider.drafters.identity import drafter_identity
from outrider.drafters.table import Setting, build_drafter
from outrider.engine import Budget, Engine, EngineConfig
from outrider.engine.grammar import Follower, GrammarCompiler, GrammarSource
from outrider.engine.memory import allocating, available_memory
from outrider.errors import InvalidParameter, OutOfMemory
from outrider.models.target import Target
from outrider.models.tokenizer import TextModel
from outrider.serve.answers import TokenTable
from outrider.serve.config import ServerConfig
from outrider.serve.errors import ApiError, bad_request
from outrider.serve.keys import KeyRing
from outrider.serve.metrics import Metrics
from outrider.serve.plan import Room
from outrider.serve.profiles import Choice, Profiles
from outrider.serve.schema import Sampled
from outrider.serve.text import call_decoder
from outrider.serve.tools import find_format, knows_tools
from outrider.serve.worker import Worker

if TYPE_CHECKING:
    from outrider.serve.traces import Traces

log = logging.getLogger(__name__)

LEAST_CONTEXT = 256
THREADS = 2  # for templates and tokens, and as many for grammars

_Result = TypeVar("_Result")


class Loaded(Protocol):
    """A model that is ready to run, and its tokenizer."""

    @property
    def target(self) -> Target: ...

    @property
    def tokenizer(self) -> TextModel: ...

    @property
    def source(self) -> Path: ...


class Service:
    """One target, its profiles and the thread that decodes.

    Attributes:
        created: Unix time of the start.
        draining: no new request is taken.
    """

    def __init__(
        self, config: ServerConfig, loaded: Loaded, *, budget: Budget | None = None
    ) -> None:
        """Put it together.

        Raises:
            InvalidParameter, DrafterMismatch, ModelError: a drafter cannot be built, or a
                profile's rule cannot judge what its drafter offers.
            OutOfMemory: the memory plan does not fit.
        """
        target, self.text = loaded.target, loaded.tokenizer
        self.config = config
        self.metrics = Metrics()
        self.traces = None if config.traces is None else _traces(config.traces)
        self.keys = KeyRing(config)
        self.profiles = Profiles(
            config,
            target_fingerprint=target.fingerprint,
            drafters={
                spec: drafter_identity(spec, source=loaded.source, name=target.name)
                for spec in _specs(config)
            },
        )
        engine = _engine(config, loaded, budget)
        for name in self.profiles.names:
            _check_rule(engine, self.profiles.choice(name, model=config.served_name))
        self.worker = Worker(engine, observer=self.metrics)
        self.room = Room(target.vocab_size, engine.context, config.limits)
        special = self.text.special_tokens
        self.table = TokenTable(self.text.token_bytes(), silent=frozenset(special.values()))
        self.template = self.text.template
        self.tool_format = find_format(config.tool_format, self.template)
        self.told_by_template = knows_tools(self.template)
        self.call_decoder = call_decoder(self.text, self.tool_format.markers)
        self.created = int(time.time())
        self.draining = False
        self._compiler: GrammarCompiler | None = None
        self._texts = ThreadPoolExecutor(THREADS, thread_name_prefix="outrider-text")
        self._grammars = ThreadPoolExecutor(THREADS, thread_name_prefix="outrider-grammar")
        self._ends = target.end_tokens
        self._started = False

    def start(self) -> None:
        """Begin to decode, for the running event loop."""
        if not self._started:
            self._started = True
            self.worker.start(asyncio.get_running_loop())

    def stop(self) -> None:
        """End the engine's thread; what still runs is given up."""
        self.draining = True
        self.worker.stop()
        self._texts.shutdown(wait=False, cancel_futures=True)
        self._grammars.shutdown(wait=False, cancel_futures=True)
        if self.traces is not None:
            self.traces.close()

    @property
    def ready(self) -> bool:
        return self._started and self.worker.healthy and not self.draining

    def token_table(self, request: Sampled) -> TokenTable:
        """How the tokens of a request's log-probabilities are called."""
        return self.table.by_id() if request.return_tokens_as_token_ids else self.table

    async def read(self, function: Callable[[], _Result], *, what: str) -> _Result:
        """Run something with templates or tokens off the event loop.

        Raises:
            ApiError: it took too long, or the text cannot be used.
        """
        seconds = self.config.limits.template_s
        try:
            return await _within(self._texts, function, seconds)
        except TimeoutError:
            raise bad_request(f"{what} took more than {seconds:g} s; send less") from None
        except InvalidParameter as error:
            raise bad_request(str(error)[:300], param=what) from None
        except (UnicodeError, TypeError, ValueError) as error:
            log.info("%s cannot be read: %r", what, error)
            raise bad_request(f"{what} cannot be read as text", param=what) from None

    async def grammars(self, source: GrammarSource, count: int) -> list[Follower]:
        """Followers of a grammar for as many sequences, compiled off the event loop.

        Raises:
            ApiError: it is no grammar, or too complex.
        """
        seconds = self.config.limits.grammar_s
        try:
            return await _within(self._grammars, lambda: self._follow(source, count), seconds)
        except TimeoutError:
            message = f"the {source.kind} took more than {seconds:g} s to compile; simplify it"
        except InvalidParameter as error:
            message = str(error)
        raise bad_request(message, param="response_format", code="invalid_grammar")

    def _follow(self, source: GrammarSource, count: int) -> list[Follower]:
        if self._compiler is None:
            self._compiler = GrammarCompiler(
                self.text, vocab_size=self.room.vocab_size, ends=self._ends
            )
        return [self._compiler.start(source) for _ in range(count)]

    def refuse_if_away(self) -> None:
        """Raises:
        ApiError: 503 while the server cannot take a request."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="draining", retry_after=5)
        if not self._started or not self.worker.alive:
            raise ApiError(503, "the engine is not running", code="unavailable", retry_after=5)


def _traces(endpoint: str) -> Traces:
    try:
        from outrider.serve.traces import Traces
    except ImportError:
        raise InvalidParameter(
            "traces needs OpenTelemetry, which is not installed; pip install 'outrider[otel]'"
        ) from None
    return Traces(endpoint)


async def _within(
    pool: ThreadPoolExecutor, function: Callable[[], _Result], seconds: float
) -> _Result:
    future = asyncio.get_running_loop().run_in_executor(pool, function)
    async with asyncio.timeout(seconds):
        return await future


def _check_rule(engine: Engine, choice: Choice) -> None:
    profile = choice.profile
    assert profile.rule is not None
    try:
        engine.check_rule(profile.rule, drafter=profile.drafter, most=choice.most)
    except InvalidParameter as fault:
        raise InvalidParameter(f"profile {choice.name}: {fault}") from None


def _specs(config: ServerConfig) -> list[str]:
    """The drafters of the profiles, each once."""
    return list(dict.fromkeys(p.drafter for p in config.profiles.values() if p.drafter != "none"))


def _engine(config: ServerConfig, loaded: Loaded, budget: Budget | None) -> Engine:
    settings, target, text = config.engine, loaded.target, loaded.tokenizer
    nodes = max((p.max_nodes or 31 for p in config.profiles.values()), default=31)
    depth = max((p.max_depth or 31 for p in config.profiles.values()), default=31)
    context = settings.context or fitting_context(
        target, slots=settings.slots, spare=nodes + 1, share=settings.memory_share
    )
    # The tokenizer of a real model is what drafters of other models are compared with.
    setting = Setting(
        target,
        text,  # type: ignore[arg-type]
        sequences=settings.slots,
        context=context,
        source=loaded.source,
    )
    with allocating("the drafters' caches", slots=settings.slots, context=context):
        drafters = {spec: build_drafter(spec, setting) for spec in _specs(config)}
    return Engine(
        target,
        drafters=drafters,
        tokenizer=text,
        config=EngineConfig(
            slots=settings.slots,
            context=context,
            prefill_chunk=settings.prefill_chunk,
            busy_chunk=settings.busy_chunk,
            queue=settings.queue,
            patience_s=settings.patience_s,
            max_nodes=nodes,
            max_depth=depth,
        ),
        budget=budget,
    )


def fitting_context(target: Target, *, slots: int, spare: int, share: float) -> int:
    """The longest context that this many slots can have within a share of the free memory.

    Raises:
        OutOfMemory: not even a short one fits.
    """
    available = available_memory(target.device)
    if not available:
        return target.context_length
    rows = int(available * share) // target.cache_shape.nbytes(slots, 1)
    most = min(target.context_length, rows - spare)
    if most < min(LEAST_CONTEXT, target.context_length):
        raise OutOfMemory(
            f"{slots} slots leave room for {max(most, 0)} positions each; lower engine.slots"
        )
    return most
