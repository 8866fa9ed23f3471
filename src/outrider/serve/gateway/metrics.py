"""What the gateway tells Prometheus. Labels are profile names, reasons and kinds of ours alone."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from outrider import __version__

FIRST = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 30)
SHORT = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
OWN = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
PHASES = ("off", "shadow", "canary", "hold", "promoted", "rolled_back")
BREAKER = {"closed": 0, "half-open": 1, "open": 2}


@dataclass(frozen=True)
class EdgeCounts:
    """Figures of one port."""

    http_in_flight: Gauge
    refused: Counter


class GatewayMetrics:
    """The figures of one gateway."""

    CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests()
        self._rollout()
        self._gauge("outrider_build_info", "Version.", "version").labels(__version__).set(1)

    def edge(self, port: str) -> EdgeCounts:
        """Of one of the gateway's ports."""
        return EdgeCounts(self.http_in_flight.labels(port), self.refused)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            name, text, ["profile", "arm"], buckets=buckets, registry=self.registry
        )  # fmt: skip

    def _requests(self) -> None:
        self.requests = self._counter(
            "outrider_gateway_requests",
            "Answered requests, by who answered, why that profile, and how it ended.",
            *("profile", "reason", "outcome"),
        )
        self.refused = self._counter(
            "outrider_gateway_refused", "Errors of the gateway's own, by status.", "status"
        )
        self.http_in_flight = self._gauge(
            "outrider_http_in_flight", "HTTP requests under way, by port.", "port"
        )
        self.faults = self._counter(
            "outrider_gateway_upstream_faults", "Tries that failed, by kind.", "profile", "kind"
        )
        self.saved = self._counter(
            "outrider_gateway_saved", "Requests answered by the baseline instead.", "profile", "why"
        )
        self.first = self._histogram(
            "outrider_gateway_time_to_first_token_seconds",
            "From the request's arrival at the gateway to the first content.",
            FIRST,
        )
        self.per_token = self._histogram(
            "outrider_gateway_time_per_output_token_seconds",
            "(last content - first content) / (tokens - 1), tokens from usage.",
            SHORT,
        )
        self.own = Histogram(
            "outrider_gateway_overhead_seconds",
            "The gateway's own work between a request's body and its sending on.",
            buckets=OWN,
            registry=self.registry,
        )
        self.tokens = self._counter(
            "outrider_gateway_output_tokens", "Output tokens, from usage.", "profile"
        )
        self.drafted = self._counter(
            "outrider_gateway_draft_tokens", "Guesses, as the engine tells.", "profile"
        )
        self.accepted = self._counter(
            "outrider_gateway_accepted_tokens", "Accepted guesses.", "profile"
        )
        self.in_flight = self._gauge("outrider_gateway_in_flight", "Under way.", "profile")

    def _rollout(self) -> None:
        self.compared = self._counter(
            "outrider_gateway_compared", "Mirrored requests, by agreement.", "profile", "agreement"
        )
        self.law_tokens = self._counter(
            "outrider_gateway_law_tokens",
            "Sampled tokens held against their law, tested or undecided.",
            *("profile", "outcome"),
        )
        self.law_evidence = self._gauge(
            "outrider_gateway_law_evidence_nats",
            "Logarithm of the e-value against how a profile samples; 13.8 is 1e6 to 1.",
            "profile",
        )
        self.skipped = self._counter(
            "outrider_gateway_mirrors_skipped", "Mirrors that found no room.", "profile"
        )
        self.drifts = self._counter(
            "outrider_rollout_drifts", "Times that acceptance of a prompt type drifted.", "profile"
        )
        self.weight = self._gauge(
            "outrider_rollout_weight_ratio", "Share of eligible traffic.", "profile"
        )
        self.phase = self._gauge(
            "outrider_rollout_phase", "1 for the phase that a profile is in.", "profile", "phase"
        )
        self.changes = self._counter(
            "outrider_rollout_changes", "Changes of phase or weight.", "profile", "action"
        )
        self.verdicts = self._counter(
            "outrider_rollout_verdicts",
            "Looks at a profile, by what they said.",
            "profile",
            "state",
        )
        self.killed = self._gauge("outrider_rollout_killed", "1 while everything is switched off.")
        self.unsaved = self._gauge("outrider_rollout_unsaved", "1 while the state is not on disk.")
        self.breaker = self._gauge(
            "outrider_gateway_breaker", "0 closed, 1 half-open, 2 open.", "profile"
        )
        self.healthy = self._gauge("outrider_gateway_healthy", "Of the last probe.", "profile")
        self.restarts = self._counter(
            "outrider_gateway_engine_restarts", "Of a supervised engine.", "profile"
        )

    def text(self) -> bytes:
        """The exposition."""
        return bytes(generate_latest(self.registry))
