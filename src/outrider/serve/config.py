"""What a server is configured with: one YAML file, checked before anything is loaded.

Each part is a small frozen model of its own. Unknown keys are errors with a suggestion, so a typing
mistake never silently keeps a default. Secrets are not kept here: keys are given as SHA-256 hashes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from outrider.records.settings import checked, read_yaml

BASELINE = "baseline"
Rule = Literal["walk", "reject", "block"]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class Part(BaseModel):
    """A part of the configuration: frozen, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Profile(Part):
    """A way to decode: who guesses, and how much at most.

    Attributes:
        drafter: the drafter's spec, as on the command line.
        max_nodes, max_depth: never guess more than this per step; the budget may guess less.
        rule: how guesses are judged; `None` takes the engine's.
        pad: streamed chunks are padded to a multiple of 256 bytes, against reading along by size.
        interval_ms: streamed text is sent at most this often, against reading along by timing;
            0 sends every step's text at once.
    """

    drafter: str = "none"
    max_nodes: Count | None = None
    max_depth: Count | None = None
    rule: Rule | None = None
    pad: bool = False
    interval_ms: Annotated[int, Field(ge=0, le=10_000)] = 0


class EngineSettings(Part):
    """The engine under load; see `outrider.EngineConfig`.

    Attributes:
        slots: requests that run at once.
        context: most tokens of prompt and answer together; `None` takes what the model has and the
            memory allows.
        queue, patience_s: requests that may wait, and for how long.
        prefill_chunk, busy_chunk: prompt tokens per step, alone and while others are streaming.
        rule: the verification rule of profiles that name none.
        memory_share: part of the free memory that the cache may take.
    """

    slots: Annotated[int, Field(ge=1, le=1024)] = 16
    context: Annotated[int, Field(ge=16)] | None = None
    queue: Count = 64
    patience_s: Seconds = 30.0
    prefill_chunk: Count = 256
    busy_chunk: Count = 64
    rule: Rule = "walk"
    memory_share: Annotated[float, Field(gt=0, le=0.95)] = 0.5


class Limits(Part):
    """What one request may ask for, and how long the server bears with it."""

    body_bytes: Count = 4 * 2**20
    header_count: Count = 64
    header_bytes: Count = 16 * 2**10
    in_flight: Count = 256
    messages: Count = 1024
    prompts: Count = 16
    n: Annotated[int, Field(ge=1, le=8)] = 4
    stop: Annotated[int, Field(ge=1, le=64)] = 8
    stop_characters: Count = 256
    logit_bias: Count = 1024
    tools: Count = 128
    max_tokens: Count | None = None
    grammar_bytes: Count = 64 * 2**10
    request_s: Seconds = 600.0
    body_s: Seconds = 30.0
    template_s: Seconds = 5.0
    grammar_s: Seconds = 5.0
    keep_alive_s: Seconds = 15.0
    drain_s: Seconds = 30.0


class Key(Part):
    """Someone who may use the server.

    Attributes:
        name: who it is: the tenant in logs and stores.
        sha256: the hash of the key in hex, as `outrider serve --hash-key` prints it.
        profiles: the profiles it may choose; empty for all.
    """

    name: str
    sha256: str
    profiles: tuple[str, ...] = ()

    @field_validator("name")
    @classmethod
    def _named(cls, value: str) -> str:
        return _fitting(value, "a key's name")

    @field_validator("sha256")
    @classmethod
    def _hashed(cls, value: str) -> str:
        if not _SHA256.fullmatch(value):
            raise ValueError("is not a SHA-256 in lower-case hex; never put the key itself here")
        return value


class Tls(Part):
    """Files of a certificate and its key."""

    certificate: Path
    key: Path


class ServerConfig(Part):
    """A server.

    Attributes:
        target: the model, as on the command line.
        name: what clients call it; by default the target's own name.
        weights, device, exact: as on the command line.
        profiles: by name; `baseline` (plain decoding) is always there and cannot be changed.
        default_profile: for requests that name none; the only speculative one, or `baseline`.
        choose_profile: requests may choose a profile by header or model name.
        admin_port: metrics and profile figures are served there and not on `port`.
        allowed_hosts: values of the Host header that are served; empty for the address itself and
            localhost where the server listens on this machine only, and for any elsewhere.
        cors_origins: origins that a browser may call from; none by default.
        details: responses carry per-step acceptance.
        traces: where traces are sent over OTLP (HTTP), as in http://127.0.0.1:4318/v1/traces; needs
            the extra `otel`.
        ui: a page to try the server with, at /ui; its answers tell which tokens were guesses.
        ignore_unknown: unknown request parameters are ignored, not refused.
        tool_format: how the model writes tool calls; `auto` reads it off the chat template.
    """

    target: str
    name: str | None = None
    weights: str = "auto"
    device: str = "auto"
    exact: bool = False
    profiles: dict[str, Profile] = Field(default_factory=dict)
    default_profile: str | None = None
    choose_profile: bool = True
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    admin_host: str = "127.0.0.1"
    admin_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    tls: Tls | None = None
    keys: tuple[Key, ...] = ()
    engine: EngineSettings = EngineSettings()
    limits: Limits = Limits()
    details: bool = False
    traces: str | None = None
    ui: bool = False
    ignore_unknown: bool = False
    tool_format: Literal["auto", "hermes", "llama3", "mistral"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_json: bool = False

    @field_validator("name")
    @classmethod
    def _named(cls, value: str | None) -> str | None:
        return value if value is None else _fitting(value, "the served name")

    @field_validator("traces")
    @classmethod
    def _reachable(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", value):
            raise ValueError(f"is {value!r}; use an address as in http://127.0.0.1:4318/v1/traces")
        return value

    @field_validator("profiles")
    @classmethod
    def _profile_names(cls, value: dict[str, Profile]) -> dict[str, Profile]:
        for name in value:
            _fitting(name, "a profile's name")
        if BASELINE in value:
            raise ValueError(f"{BASELINE} is plain decoding and always there; use another name")
        return value

    @model_validator(mode="after")
    def _agrees(self) -> ServerConfig:
        known = self.profile_names
        if self.default_profile is not None and self.default_profile not in known:
            raise ValueError(f"default_profile {self.default_profile!r} is none of {known}")
        for key in self.keys:
            for name in key.profiles:
                if name not in known:
                    raise ValueError(f"key {key.name!r} names profile {name!r}, none of {known}")
        names = [key.name for key in self.keys]
        if len(set(names)) < len(names):
            raise ValueError("two keys have the same name; a name is one tenant")
        return self

    @property
    def profile_names(self) -> tuple[str, ...]:
        """All profiles, `baseline` last."""
        return (*self.profiles, BASELINE)

    @property
    def served_name(self) -> str:
        """What clients call the model."""
        if self.name is not None:
            return self.name
        own = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(self.target).name).strip("-.")[:64]
        return own or "model"

    @property
    def default(self) -> str:
        """The profile of requests that name none."""
        if self.default_profile is not None:
            return self.default_profile
        return next(iter(self.profiles)) if len(self.profiles) == 1 else BASELINE

    def profile(self, name: str) -> Profile:
        """A profile by name, with its rule; the caller knows that it is there."""
        profile = Profile() if name == BASELINE else self.profiles[name]
        return profile.model_copy(update={"rule": profile.rule or self.engine.rule})


def _fitting(value: str, what: str) -> str:
    if not NAME.fullmatch(value):
        raise ValueError(f"{what} is {value!r}; use letters, digits, '.', '_' and '-', at most 64")
    return value


def load_config(path: Path) -> ServerConfig:
    """The configuration in a YAML file.

    Raises:
        InvalidParameter: the file cannot be read, or the first thing that is wrong in it.
    """
    values = read_yaml(path, needs="at least target: MODEL")
    return make_config(values, source=str(path))


def make_config(values: dict[str, Any], *, source: str = "configuration") -> ServerConfig:
    """A checked configuration from plain values.

    Raises:
        InvalidParameter: the first thing that is wrong, in one line.
    """
    parts = (ServerConfig, Profile, EngineSettings, Limits, Key, Tls)
    return checked(ServerConfig, values, source=source, parts=parts)
