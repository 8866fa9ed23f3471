"""What the server tells Prometheus. Label values are bounded: nothing a client writes becomes one.

Names follow OpenTelemetry's GenAI conventions where these have one; figures of speculation, for
which they have none, carry our own prefix. A *token* is a token and a *chunk* is a chunk: the time
between chunks says nothing of speed when a step brings several tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from outrider import __version__
from outrider.engine import Completion
from outrider.engine.drafting import (
    AT_THE_END,
    NO_DRAFTER,
    NO_GUESS,
    NOT_WORTH_IT,
    UNGRAMMATICAL,
)
from outrider.engine.engine import Load
from outrider.records.request import accepted_in_output, by_position, is_verify_step
from outrider.records.step import StepRecord

PROMPT_TYPES = ("agent", "chat", "code", "creative", "edit", "extract", "math", "summarize")
OUTCOMES = ("stop", "length", "tool_calls", "cancelled", "rejected", "expired", "error")
MAX_POSITION = 32
LUMP = 64  # values

SHORT = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
FIRST = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 30)
WHOLE = tuple(0.01 * 2**power for power in range(17))
BATCH = (1, 2, 4, 8, 16, 32, 64, 128)

REASONS = {
    NO_DRAFTER: "no_drafter",
    NO_GUESS: "no_guess",
    NOT_WORTH_IT: "not_worth_it",
    AT_THE_END: "at_the_end",
    UNGRAMMATICAL: "grammar",
    "prefill": "prefill",
}


def reason_label(reason: str) -> str:
    """A bounded name for why a step guessed nothing."""
    if reason.startswith("drafter fault"):
        return "drafter_fault"
    return REASONS.get(reason, "other")


def prompt_type(header: str | None) -> str:
    """The kind of prompt that a client names; anything unknown is one kind."""
    if header is None:
        return "unknown"
    return header if header in PROMPT_TYPES else "other"


class Tally:
    """Values on their way to a histogram, which is told in lumps.

    Between two passes the caches hold the model's weights and nothing of ours: a value told alone
    costs ten times its part of a lump, and it comes for every token.
    """

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._held: deque[float] = deque()

    def observe(self, value: float) -> None:
        self._held.append(value)
        if len(self._held) >= LUMP:
            self.tell()

    def tell(self) -> None:
        """Hand on what is held."""
        with suppress(IndexError):
            while True:
                self._histogram.observe(self._held.popleft())


class Tallies(Collector):
    """All tallies of a registry. Whoever reads the registry finds their values: this is a collector
    of it that has no figures of its own, and must be registered before those that have."""

    def __init__(self) -> None:
        self._all: dict[tuple[Histogram, tuple[str, ...]], Tally] = {}

    def of(self, histogram: Histogram, *labels: str) -> Tally:
        """The one tally of a histogram and its labels' values."""
        key = histogram, labels
        if key not in self._all:
            self._all[key] = Tally(histogram.labels(*labels) if labels else histogram)
        return self._all[key]

    def collect(self) -> Iterable[Metric]:
        for tally in list(self._all.values()):
            tally.tell()
        return ()


class Metrics:
    """The figures of one server. Safe from any thread."""

    CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._tallies = Tallies()
        self.registry.register(self._tallies)
        self._requests()
        self._times()
        self._speculation()
        self._load()
        Gauge("outrider_build_info", "Version.", ["version"], registry=self.registry).labels(
            __version__
        ).set(1)

    def _requests(self) -> None:
        labels = ["profile", "prompt_type", "outcome"]
        self.requests = Counter(
            "outrider_requests", "Requests by how they ended.", labels, registry=self.registry
        )
        self.refused = Counter(
            "outrider_refused", "Responses with an error, by status.", ["status"],
            registry=self.registry,
        )  # fmt: skip
        self.prompt_tokens = Counter(
            "outrider_prompt_tokens", "Prompt tokens.", ["profile"], registry=self.registry
        )
        self.output_tokens = Counter(
            "outrider_output_tokens", "Output tokens.", ["profile"], registry=self.registry
        )
        self.engine_failures = Counter(
            "outrider_engine_failures", "Steps that the engine failed.", registry=self.registry
        )

    def _times(self) -> None:
        labels = ["profile", "prompt_type"]

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

        self.first_token = histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "From the arrival of the job in the engine to its first token.",
            FIRST,
        )
        self.per_token = histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "(duration - time to first token) / (tokens - 1), one value per request.",
            SHORT,
        )
        self.duration = histogram(
            "gen_ai_server_request_duration_seconds", "From arrival to the last token.", WHOLE
        )
        self.queue = histogram("outrider_queue_seconds", "Waiting for a slot.", FIRST)
        self._token_gap = histogram(
            "outrider_inter_token_seconds",
            "Time between tokens; a step that brings k tokens counts k times its k-th part.",
            SHORT,
        )
        self._chunk_gap = histogram(
            "outrider_chunk_gap_seconds",
            "Time between streamed chunks, whatever is in them.",
            SHORT,
        )

    def _speculation(self) -> None:
        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(name, text, ["profile", *more], registry=self.registry)

        self.drafts = counter("outrider_spec_decode_drafts", "Steps that checked guesses.")
        self.steps = counter("outrider_spec_decode_steps", "Steps that brought tokens.")
        self.drafted = counter("outrider_spec_decode_draft_tokens", "Guesses checked.")
        self.accepted = counter("outrider_spec_decode_accepted_tokens", "Guesses accepted.")
        self.accepted_at = counter(
            "outrider_spec_decode_accepted_tokens_per_pos", "Accepted, by depth.", "position"
        )
        self.reasons = counter(
            "outrider_spec_decode_idle_steps", "Steps that guessed nothing, by reason.", "reason"
        )
        self.draft_time = counter(
            "outrider_draft_seconds", "Drafting, a step's time shared among its sequences."
        )
        self.verify_time = counter(
            "outrider_verify_seconds", "Target passes, a step's time shared among its sequences."
        )

    def _load(self) -> None:
        def gauge(name: str, text: str, read: Callable[[Load], float]) -> None:
            found = Gauge(name, text, registry=self.registry)
            found.set_function(lambda: read(self._last_load))

        self._last_load = Load(running=0, waiting=0, slots=1, rows=0, capacity=1)
        gauge("outrider_requests_running", "Sequences in the batch.", lambda load: load.running)
        gauge("outrider_requests_waiting", "Sequences in the queue.", lambda load: load.waiting)
        gauge(
            "outrider_kv_cache_usage_ratio",
            "Cache rows held, of all.",
            lambda load: load.rows / load.capacity,
        )
        self.http_in_flight = Gauge(
            "outrider_http_in_flight", "HTTP requests under way.", registry=self.registry
        )
        steps = Histogram(
            "outrider_step_seconds", "A step of the engine.", buckets=SHORT, registry=self.registry
        )
        batch = Histogram(
            "outrider_batch_size", "Sequences running, per step.", buckets=BATCH,
            registry=self.registry,
        )  # fmt: skip
        self._step_times, self._batches = self._tallies.of(steps), self._tallies.of(batch)

    def text(self) -> bytes:
        """The exposition."""
        return bytes(generate_latest(self.registry))

    # -- what happens --------------------------------------------------------------------------

    def stepped(self, load: Load, seconds: float) -> None:
        self._last_load = load
        self._step_times.observe(seconds)
        self._batches.observe(load.running)

    def token_gaps(self, profile: str, kind: str) -> Tally:
        """Takes the time between tokens, in seconds, once for each."""
        return self._tallies.of(self._token_gap, profile, kind)

    def chunk_gaps(self, profile: str, kind: str) -> Tally:
        """Takes the time between chunks, in seconds."""
        return self._tallies.of(self._chunk_gap, profile, kind)

    def engine_failed(self) -> None:
        self.engine_failures.inc()

    def ended(self, profile: str, kind: str, outcome: str) -> None:
        """A request has ended in some way."""
        self.requests.labels(profile, kind, outcome if outcome in OUTCOMES else "error").inc()

    def completed(self, completion: Completion, profile: str, kind: str) -> None:
        """A sequence is finished; its times and its speculation."""
        tokens = len(completion.tokens)
        self.output_tokens.labels(profile).inc(tokens)
        self.queue.labels(profile, kind).observe(completion.queue_s)
        self.duration.labels(profile, kind).observe(completion.e2e_s)
        if completion.ttft_s is not None:
            self.first_token.labels(profile, kind).observe(completion.ttft_s)
            if tokens > 1:
                each = (completion.e2e_s - completion.ttft_s) / (tokens - 1)
                self.per_token.labels(profile, kind).observe(each)
        self._count_steps(completion.steps, profile)

    def _count_steps(self, steps: Sequence[StepRecord], profile: str) -> None:
        verify = [step for step in steps if is_verify_step(step)]
        self.steps.labels(profile).inc(len(verify))
        self.drafts.labels(profile).inc(sum(1 for step in verify if step.proposed))
        self.drafted.labels(profile).inc(sum(step.proposed for step in verify))
        self.accepted.labels(profile).inc(sum(accepted_in_output(step) for step in verify))
        for position, count in enumerate(by_position(steps)[0][:MAX_POSITION]):
            self.accepted_at.labels(profile, str(position)).inc(count)
        for step in steps:
            if step.reason:
                self.reasons.labels(profile, reason_label(step.reason)).inc()
        self.draft_time.labels(profile).inc(sum(s.draft_ms / s.sequences for s in steps) / 1000)
        self.verify_time.labels(profile).inc(sum(s.verify_ms / s.sequences for s in steps) / 1000)
