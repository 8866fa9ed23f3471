"""What a rollout is configured with: one YAML file, checked before anything is started.

Shares are basis points (hundredths of a percent) inside and percentages in the file. Unknown keys
are errors with a suggestion; the first fault is one line that names the key. This module knows no
engine and no network: what an engine can do is probed elsewhere.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from outrider.records.settings import checked, read_yaml

BASELINE: Final = "baseline"
WHOLE: Final = 10_000
"""Basis points of all traffic."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
EXACT_RULES: Final = frozenset({"exact", "walk", "reject", "block"})
LOSSY_WORDS: Final = ("typical_acceptance", "posterior_threshold", "synthetic_acceptance")
"""Engine options that change the law of the output, wherever they stand in the arguments."""


def share(value: object) -> int:
    """Basis points of a percentage such as ``5%`` or ``0.25%``.

    Raises:
        ValueError: it is no percentage in [0 %, 100 %], or finer than a basis point.
    """
    if value == 0 and not isinstance(value, bool):
        return 0
    found = (
        re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", value) if isinstance(value, str) else None
    )
    if found is None:
        raise ValueError(f"{value!r} is not a share; write a percentage such as 5%")
    points = float(found[1]) * 100
    if points > WHOLE or abs(points - round(points)) > 1e-6:
        raise ValueError(f"{value} is out of range; use 0% to 100% in steps of 0.01%")
    return round(points)


def percent(points: int) -> str:
    """Basis points as people write them: ``5%``, ``0.25%``."""
    return f"{points / 100:g}%"


Share = Annotated[int, BeforeValidator(share)]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, lt=1)]


class Part(BaseModel):
    """A part of the configuration: frozen, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Limits(Part):
    """What one profile may take on. Overflow of a speculative profile spills to the baseline.

    Attributes:
        in_flight: requests at once; `None` for no bound.
        queue, queue_s: requests that may wait for a place, and for how long.
        requests_per_minute, tokens_per_minute: over a sliding minute; tokens of prompt and answer.
        max_tokens: the longest answer that may be asked for; longer requests are not eligible.
        prompt_tokens: the longest prompt that is eligible.
    """

    in_flight: Count | None = None
    queue: Annotated[int, Field(ge=0)] = 0
    queue_s: Seconds = 1.0
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_tokens: Count | None = None
    prompt_tokens: Count | None = None


class Timeouts(Part):
    """Four separate limits in seconds: to connect, to the first byte, between chunks, in all."""

    connect_s: Seconds = 2.0
    first_byte_s: Seconds = 60.0
    between_s: Seconds = 30.0
    total_s: Seconds = 600.0


class BackendSettings(Part):
    """Who runs a profile.

    Attributes:
        engine: which kind.
        url: of a running engine to attach to; without it one is started and supervised, where the
            kind can be.
        model: what that engine calls the model; `None` takes the rollout's target.
        args: passed on to the engine's own command line unchanged (parallelism, nodes, memory).
    """

    engine: Literal["embedded", "vllm", "sglang", "tensorrt_llm", "llamacpp", "openai"] = "embedded"
    url: str | None = None
    model: str | None = None
    args: tuple[str, ...] = ()


class Profile(Part):
    """A way to decode.

    Attributes:
        speculative: guesses are made. Only the baseline, and profiles to compare with, do not.
        method: the engine's name of the method, such as eagle3, ngram, draft_model.
        drafter: the drafter: a spec of the embedded engine, or a model for others.
        num_speculative_tokens: guesses per step at most.
        rule: the acceptance rule; any but those of `EXACT_RULES` needs `approximate`.
        approximate: answers may differ in law from the target's; every answer says so.
        rollout: the share of eligible traffic that the ramp starts with.
        shadow: the share of baseline requests that is mirrored while in shadow.
        refuses: request features that this profile does not honour, beside those that its engine
            was probed to lack; see `outrider.rollout.assign.FEATURES`.
        pad, interval_ms: against reading along by size and timing, as on a server.
        backend, limits, timeouts: of this profile alone.
    """

    speculative: bool
    method: str | None = None
    drafter: str | None = None
    num_speculative_tokens: Count | None = None
    rule: str = "exact"
    approximate: bool = False
    rollout: Share = 0
    shadow: Share = 0
    refuses: tuple[str, ...] = ()
    pad: bool = False
    interval_ms: Annotated[int, Field(ge=0, le=10_000)] = 0
    backend: BackendSettings = BackendSettings()
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()

    @model_validator(mode="after")
    def _agrees(self) -> Profile:
        if not self.speculative:
            for key in ("method", "drafter", "num_speculative_tokens"):
                if getattr(self, key) is not None:
                    raise ValueError(f"{key} needs speculative: true")
        elif self.method is None and self.drafter is None:
            raise ValueError("speculative: true needs method or drafter")
        lossy = [word for word in LOSSY_WORDS if any(word in arg for arg in self.backend.args)]
        if not self.approximate and (self.rule not in EXACT_RULES or lossy):
            named = lossy[0] if lossy else f"rule {self.rule!r}"
            raise ValueError(f"{named} changes the law of the output; say approximate: true")
        return self


class Route(Part):
    """A path or a group of callers with rules of its own.

    Attributes:
        approximate: approximate profiles may answer here.
        speculative: speculative profiles may answer here.
    """

    approximate: bool = True
    speculative: bool = True


class Ramp(Part):
    """How a profile's share grows.

    Attributes:
        steps: shares after the profile's own `rollout`; lower ones are left out.
        start: shadow mirrors first and needs a passing verdict there; canary serves at once.
        least_s: the shortest time at a step, however good its figures.
        automatic: a passing verdict raises the share; otherwise it holds for a person.
        rearm_s: after a rollback, a fresh passing gate arms again no sooner; `None` leaves it to a
            person alone.
    """

    steps: tuple[Share, ...] = (1000, 2500, 5000, 10_000)
    start: Literal["shadow", "canary"] = "canary"
    least_s: Annotated[float, Field(ge=0)] = 300.0
    automatic: bool = True
    rearm_s: Seconds | None = None

    @field_validator("steps")
    @classmethod
    def _rising(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not value or list(value) != sorted(set(value)) or value[0] == 0:
            raise ValueError("shares must rise from step to step and be above 0%")
        return value


class Gates(Part):
    """Evidence that must be on disk and pass before a profile serves; `None` asks for none.

    Attributes:
        certificate: written by `outrider certify`.
        preflight: printed by `outrider check --json`.
        evaluation: an offline evaluation, a JSON document with `status`.
        fresh_s: older evidence does not count; `None` for any age.
    """

    certificate: Path | None = None
    preflight: Path | None = None
    evaluation: Path | None = None
    fresh_s: Seconds | None = None


class Burst(Part):
    """So many events within so many seconds."""

    count: Count
    within_s: Seconds


class TripWires(Part):
    """What takes a profile back at once, without statistics.

    Attributes:
        unhealthy: failed health probes.
        restart, out_of_memory, parity, non_finite: crashes, OOM, outputs that differ from the
            baseline's where they must not, NaN.
        server_errors: answers of 5xx or broken connections.
        stalled: streams that stopped.
        sampled: the chance that an engine that is not exact and samples rightly is ever taken back
            for how it samples (`parity`); `None` sends no requests to find out.
        memory_share, kv_share: a bound for readings, of the device and of the cache; `None` for
            none.
    """

    unhealthy: Burst = Burst(count=3, within_s=30)
    restart: Burst = Burst(count=1, within_s=60)
    out_of_memory: Burst = Burst(count=1, within_s=60)
    parity: Burst = Burst(count=1, within_s=3600)
    non_finite: Burst = Burst(count=1, within_s=60)
    server_errors: Burst = Burst(count=5, within_s=10)
    stalled: Burst = Burst(count=3, within_s=60)
    sampled: Fraction | None = 1e-6
    memory_share: Fraction | None = None
    kv_share: Fraction | None = None


class Check(Part):
    """One figure that is judged.

    Attributes:
        critical: its failure takes the profile back; of another it only holds the share.
        must_have_data: no verdict passes without it.
        budget: its part of the false-rollback budget, relative to the other critical checks.
        tolerance: passes only where it is surely not worse by more: relative for times, absolute
            for rates.
        least: a smaller effect never fails, however sure.
    """

    critical: bool = False
    must_have_data: bool = False
    budget: Annotated[float, Field(ge=0)] = 1.0
    tolerance: Annotated[float, Field(gt=0)] = 0.1
    least: Annotated[float, Field(ge=0)] = 0.0


def _checks() -> dict[str, Check]:
    return {
        "tpot": Check(critical=True, must_have_data=True, budget=12, tolerance=0.05, least=0.03),
        "ttft": Check(critical=True, must_have_data=True, budget=4, tolerance=0.15, least=0.05),
        "error": Check(critical=True, budget=1, tolerance=0.02),
        "timeout": Check(critical=True, budget=0.5, tolerance=0.02),
        "out_of_memory": Check(critical=True, budget=0.5, tolerance=0.02),
        "invalid": Check(critical=True, budget=1, tolerance=0.02),
        "repetition": Check(critical=True, budget=1, tolerance=0.02),
        "cancelled": Check(tolerance=0.05),
        "length": Check(tolerance=0.05),
    }


class VerdictSettings(Part):
    """How figures are judged; the reasons are in docs/explanation/rollout-statistics.md.

    Attributes:
        false_rollback: the chance that a window takes back a profile that is as good as the
            baseline, over all its critical checks and all its looks.
        false_pass: the chance that a window lets a check pass that is worse by its tolerance.
        plan: canary samples (beside an equal control) at which the window wants to decide.
        least_samples: below this in either arm no statistical check is made.
        every_s: seconds between two looks.
        by_type: checks that are also made for each prompt type; they hold, they never take back.
        checks: by figure.
    """

    false_rollback: Fraction = 0.02
    false_pass: Fraction = 0.05
    plan: tuple[Count, ...] = (300, 1000)
    least_samples: Count = 30
    every_s: Seconds = 30.0
    by_type: tuple[str, ...] = ("tpot", "ttft")
    checks: dict[str, Check] = Field(default_factory=_checks)

    @field_validator("plan")
    @classmethod
    def _rising(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not value or list(value) != sorted(set(value)):
            raise ValueError("sample sizes must rise")
        return value

    @field_validator("checks", mode="before")
    @classmethod
    def _overlaid(cls, value: Any) -> Any:
        """Given checks change single keys of the defaults."""
        if not isinstance(value, dict):
            return value
        whole: dict[str, Any] = {name: check.model_dump() for name, check in _checks().items()}
        for name, given in value.items():
            if name not in whole:
                raise ValueError(f"{name!r} is none of {', '.join(whole)}")
            if isinstance(given, Check):
                given = given.model_dump()
            if not isinstance(given, dict):
                raise ValueError(f"{name} holds no settings")
            whole[name] = {**whole[name], **given}
        return whole

    @model_validator(mode="after")
    def _known(self) -> VerdictSettings:
        for name in self.by_type:
            if name not in self.checks:
                raise ValueError(f"by_type names {name!r}, none of {', '.join(self.checks)}")
        return self


class FeedbackSettings(Part):
    """What becomes of bad requests.

    Attributes:
        folder: where they are kept; `None` keeps none.
        text: prompts are kept, redacted; otherwise figures and a hash only.
        most: cases kept per profile, prompt type and reason.
        slow: a request is slow above this quantile of its prompt type.
        tail: acceptance below and above these quantiles is an outlier.
    """

    folder: Path | None = None
    text: bool = False
    most: Count = 100
    slow: Fraction = 0.99
    tail: Annotated[float, Field(gt=0, lt=0.5)] = 0.01


class RolloutConfig(Part):
    """A rollout.

    Attributes:
        target: the model, as on the command line.
        name: what clients call it; by default the target's own name.
        profiles: by name; `baseline` is plain decoding and is there even if not given.
        routes: by path; what is not listed may use everything.
        salt: changes who is in which cohort; one per experiment.
        control: size of the control cohort relative to the canary.
        state: folder of the persisted state and the audit log.
        evidence: folder of what the launch checklist looks at: runs, preflights, certificates and
            drills, at any depth.
        kill_file: while this file exists everything goes to the baseline.
        force: requests may name a profile by header or model name.
        webhook: told of every change and verdict; `None` for none.
    """

    target: str
    name: str | None = None
    profiles: dict[str, Profile]
    routes: dict[str, Route] = Field(default_factory=dict)
    salt: str = "1"
    control: Annotated[float, Field(gt=0, le=20)] = 1.0
    ramp: Ramp = Ramp()
    gates: Gates = Gates()
    trip_wires: TripWires = TripWires()
    verdict: VerdictSettings = VerdictSettings()
    feedback: FeedbackSettings = FeedbackSettings()
    state: Path = Path("rollout-state")
    evidence: Path = Path("rollout-evidence")
    kill_file: Path | None = None
    force: bool = False
    webhook: str | None = None
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    admin_host: str = "127.0.0.1"
    admin_port: Annotated[int, Field(ge=0, le=65535)] = 8001

    @field_validator("profiles")
    @classmethod
    def _named(cls, value: dict[str, Profile]) -> dict[str, Profile]:
        for name in value:
            if not NAME.fullmatch(name):
                raise ValueError(
                    f"profile name {name!r}: use letters, digits, '.', '_' and '-', at most 64"
                )
        return value if BASELINE in value else {BASELINE: Profile(speculative=False), **value}

    @model_validator(mode="after")
    def _agrees(self) -> RolloutConfig:
        plain = self.profiles[BASELINE]
        if plain.speculative or plain.approximate or plain.rollout or plain.shadow:
            raise ValueError(f"profiles.{BASELINE} is plain decoding and takes what is left")
        if not self.canaries:
            raise ValueError(f"profiles names nothing to roll out beside {BASELINE}")
        return self

    @property
    def canaries(self) -> tuple[str, ...]:
        """The profiles that are rolled out, in the order of the file."""
        return tuple(name for name in self.profiles if name != BASELINE)

    def steps(self, profile: str) -> tuple[int, ...]:
        """The shares that a profile goes through, in basis points."""
        first = self.profiles[profile].rollout
        later = tuple(step for step in self.ramp.steps if step > first)
        return (first, *later) if first else later

    def route(self, path: str) -> Route:
        """The rules of a path."""
        return self.routes.get(path, Route())


def is_rollout(values: object) -> bool:
    """Do these values of a YAML file describe a rollout, not a single server?"""
    if not isinstance(values, dict) or not isinstance(values.get("profiles"), dict):
        return False
    profiles = values["profiles"].values()
    return any(isinstance(p, dict) and ("speculative" in p or "rollout" in p) for p in profiles)


def load_rollout(path: Path) -> RolloutConfig:
    """The rollout in a YAML file.

    Raises:
        InvalidParameter: the file cannot be read, or the first thing that is wrong in it.
    """
    values = read_yaml(path, needs="target and profiles")
    return make_rollout(values, source=str(path))


def make_rollout(values: dict[str, Any], *, source: str = "rollout") -> RolloutConfig:
    """A checked rollout from plain values.

    Raises:
        InvalidParameter: the first thing that is wrong, in one line.
    """
    parts = (
        *(RolloutConfig, Profile, BackendSettings, Limits, Timeouts, Route, Ramp, Gates, Burst),
        *(TripWires, Check, VerdictSettings, FeedbackSettings),
    )
    return checked(RolloutConfig, values, source=source, parts=parts)
