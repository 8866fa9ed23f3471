"""Which profile a request gets, and why. Pure functions of the request's facts and the weights.

The order of decisions, first one wins: kill switch, forced profile, eligibility, percentage,
baseline. A key's place is a hash with the experiment's salt, in basis points of all keys; canaries
grow from 0 upwards, their control cohort from the top downwards. So a key never leaves a canary
while its share rises, both cohorts are random samples of the same eligible traffic, and they meet
only when there is no third part left.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from outrider.rollout.config import BASELINE, WHOLE, Profile, RolloutConfig, percent

Reason = Literal[
    "kill_switch", "forced", "ineligible", "split", "control", "default", "spill", "rolled_back"
]

FEATURES: Final = frozenset(
    {
        "min_p",
        "logit_bias",
        "logprobs",
        "prompt_logprobs",
        "n",
        "best_of",
        "penalties",
        "json_object",
        "json_schema",
        "regex",
        "grammar",
        "tools",
        "streamed_tools",
        "seed",
        "min_tokens",
        "bad_words",
        "images",
        "audio",
        "echo",
        "suffix",
        "lora",
        "sampled",
    }
)
"""What a request may use and an engine may fail to honour while it speculates."""

SESSION_HEADERS: Final = ("x-session-id", "x-conversation-id")
KEY_HEADER: Final = "x-outrider-key"


@dataclass(frozen=True)
class Key:
    """What an assignment sticks to.

    Attributes:
        text: the key itself; kept in memory only.
        source: header, user, session, api_key or request.
    """

    text: str
    source: str

    @property
    def hashed(self) -> str:
        """Names the key in records without telling it."""
        return hashlib.blake2b(self.text.encode(), digest_size=8, person=b"outrider").hexdigest()


@dataclass(frozen=True)
class RequestFacts:
    """What the decision looks at.

    Attributes:
        key: what the assignment sticks to.
        route: the path, from the connection's scope.
        features: those of `FEATURES` that the request uses.
        prompt_type: chat, tools, json, code, completion or what the caller says.
        prompt_tokens, max_tokens: sizes, `None` where unknown.
        forced: a profile that the request names and may name.
    """

    key: Key
    route: str = ""
    features: frozenset[str] = frozenset()
    prompt_type: str = ""
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    forced: str | None = None


@dataclass(frozen=True)
class Weights:
    """What is in force now: made by the ramp, read for every request.

    Attributes:
        serving: profile to its share in basis points; those that are off are absent.
        shadow: profile to the share of baseline requests that is mirrored to it.
        killed: everything goes to the baseline.
        rolled_back: profiles that were taken back, for the stated reason.
    """

    serving: Mapping[str, int] = field(default_factory=dict)
    shadow: Mapping[str, int] = field(default_factory=dict)
    killed: bool = False
    rolled_back: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Assignment:
    """Where a request goes.

    Attributes:
        profile: who answers.
        reason: why, one word; detail: why, in a line.
        control_for: profiles whose control cohort the request belongs to.
        shadow: profiles that get a copy.
        bucket: the key's place for the profile that decided, in basis points; `None` for none.
        approximate: the answer may differ in law and must say so.
    """

    profile: str
    reason: Reason
    detail: str
    control_for: tuple[str, ...] = ()
    shadow: tuple[str, ...] = ()
    bucket: int | None = None
    approximate: bool = False


def bucket(salt: str, key: str) -> int:
    """A key's place in [0, 10000): ``blake2b(salt, key) mod 10_000``.

    A NUL byte stands between the two, so that no pair reads like another.
    """
    digest = hashlib.blake2b(f"{salt}\0{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % WHOLE


def key_of(
    headers: Mapping[str, str],
    body: Mapping[str, Any],
    *,
    api_key_id: str | None = None,
    request_id: str,
) -> Key:
    """What an assignment sticks to: header, then user, session, API key, the request itself.

    Args:
        headers: names in lower case.
        body: the decoded request.
        api_key_id: names the caller's key; never the key itself.
        request_id: the last resort; then nothing sticks.
    """
    if given := headers.get(KEY_HEADER):
        return Key(given, "header")
    for name in ("safety_identifier", "user"):
        value = body.get(name)
        if isinstance(value, str) and value:
            return Key(value, "user")
    for name in SESSION_HEADERS:
        if given := headers.get(name):
            return Key(given, "session")
    if api_key_id:
        return Key(api_key_id, "api_key")
    return Key(request_id, "request")


def features_of(body: Mapping[str, Any]) -> frozenset[str]:
    """Those of `FEATURES` that a request of the OpenAI interface uses."""
    found = {name for name in ("min_p", "logit_bias", "bad_words", "min_tokens") if body.get(name)}
    logprobs = body.get("logprobs")
    if logprobs is not None and logprobs is not False:  # 0 asks for the chosen token's own
        found.add("logprobs")
    found |= {"prompt_logprobs"} if body.get("prompt_logprobs") is not None else set()
    found |= {name for name in ("n", "best_of") if _number(body.get(name)) > 1}
    found |= {name for name in ("echo", "suffix") if body.get(name)}
    if any(_number(body.get(name)) for name in ("presence_penalty", "frequency_penalty")):
        found.add("penalties")
    if body.get("repetition_penalty") not in (None, 1, 1.0):
        found.add("penalties")
    if body.get("seed") is not None:
        found.add("seed")
    if _number(body.get("temperature", 1.0)) > 0:
        found.add("sampled")
    if body.get("tools") or body.get("functions"):
        found.add("tools")
        found |= {"streamed_tools"} if body.get("stream") else set()
    return frozenset(found | _structured(body) | _media(body.get("messages")))


def _structured(body: Mapping[str, Any]) -> set[str]:
    """Ways to hold an answer to a form."""
    found = set()
    form = body.get("response_format")
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind in ("json_object", "json_schema"):
        found.add(str(kind))
    elif kind not in (None, "text"):
        found.add("grammar")
    for name, feature in (
        ("guided_json", "json_schema"),
        ("guided_regex", "regex"),
        ("guided_choice", "regex"),
        ("guided_grammar", "grammar"),
        ("structured_outputs", "grammar"),
        ("grammar", "grammar"),
        ("json_schema", "json_schema"),
        ("regex", "regex"),
    ):
        if body.get(name):
            found.add(feature)
    return found


def _media(messages: object) -> set[str]:
    """Parts of a conversation that are not text."""
    found = set()
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            kind = str(part.get("type", "")) if isinstance(part, Mapping) else ""
            found |= {"images"} if "image" in kind else set()
            found |= {"audio"} if "audio" in kind else set()
    return found


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


def prompt_type_of(body: Mapping[str, Any], header: str | None = None) -> str:
    """The kind of prompt, for cohorts: the caller's word, else by what the request uses."""
    if header and len(header) <= 32 and header.replace("-", "").replace("_", "").isalnum():
        return header
    used = features_of(body)
    if "tools" in used:
        return "tools"
    if used & {"json_object", "json_schema", "regex", "grammar"}:
        return "json"
    if "messages" not in body:
        return "completion"
    return "code" if "```" in json.dumps(body["messages"], default=str) else "chat"


def ineligible(
    facts: RequestFacts,
    profile: Profile,
    *,
    config: RolloutConfig,
    lacking: frozenset[str] = frozenset(),
) -> str | None:
    """Why a profile cannot honour a request; `None` where it can.

    Args:
        facts: the request.
        profile: the profile in question.
        config: for the rules of the route.
        lacking: features that the profile's engine was probed not to have.
    """
    route = config.route(facts.route)
    if profile.speculative and not route.speculative:
        return f"route {facts.route} takes no speculative profile"
    if profile.approximate and not route.approximate:
        return f"route {facts.route} forbids approximate profiles"
    if missing := sorted(facts.features & (lacking | set(profile.refuses))):
        return f"the profile does not honour {', '.join(missing)}"
    limits = profile.limits
    if limits.prompt_tokens is not None and (facts.prompt_tokens or 0) > limits.prompt_tokens:
        return f"prompt of {facts.prompt_tokens} tokens is longer than {limits.prompt_tokens}"
    if limits.max_tokens is not None and (
        facts.max_tokens is None or facts.max_tokens > limits.max_tokens
    ):
        asked = "no bound" if facts.max_tokens is None else facts.max_tokens
        return f"answer bound {asked} is above {limits.max_tokens} tokens"
    return None


def control_points(weight: int, multiple: float) -> int:
    """Size of the control cohort in basis points: what the canary leaves, at most."""
    return min(round(weight * multiple), WHOLE - weight)


def assign(
    facts: RequestFacts,
    config: RolloutConfig,
    weights: Weights,
    *,
    lacking: Mapping[str, frozenset[str]] | None = None,
) -> Assignment:
    """Where a request goes.

    Each profile has places of its own (its name is part of the salt). With several, the first in
    the file that a key falls into takes it, so a later one's share is of what earlier ones leave.

    Args:
        facts: the request.
        config: the rollout.
        weights: what is in force.
        lacking: profile to the features that its engine was probed not to have.
    """
    if weights.killed:
        return Assignment(BASELINE, "kill_switch", "the kill switch is on")
    probed = lacking or {}
    if facts.forced is not None:
        return _forced(facts, config, probed.get(facts.forced, frozenset()))
    refusals: list[str] = []
    control, shadow = [], []
    for name in config.canaries:
        weight, mirrored = weights.serving.get(name, 0), weights.shadow.get(name, 0)
        if not weight and not mirrored:
            continue
        profile = config.profiles[name]
        refusal = ineligible(facts, profile, config=config, lacking=probed.get(name, frozenset()))
        if refusal is not None:
            refusals.append(f"{name}: {refusal}")
            continue
        place = bucket(f"{config.salt}:{name}", facts.key.text)
        if place < weight:
            detail = f"place {place} of {WHOLE} is below {percent(weight)}"
            return Assignment(name, "split", detail, bucket=place, approximate=profile.approximate)
        if place >= WHOLE - control_points(weight, config.control):
            control.append(name)
        if place < mirrored:
            shadow.append(name)
    return _left(control, shadow, refusals, weights)


def _forced(facts: RequestFacts, config: RolloutConfig, lacking: frozenset[str]) -> Assignment:
    """A named profile, for debugging; never past what it cannot honour, never in a cohort."""
    name = facts.forced or BASELINE
    if name not in config.profiles:
        return Assignment(BASELINE, "default", f"profile {name!r} is unknown")
    profile = config.profiles[name]
    refusal = ineligible(facts, profile, config=config, lacking=lacking)
    if refusal is not None:
        return Assignment(BASELINE, "ineligible", f"{name}: {refusal}")
    return Assignment(name, "forced", "named by the request", approximate=profile.approximate)


def _left(
    control: list[str], shadow: list[str], refusals: list[str], weights: Weights
) -> Assignment:
    """A request that no canary took."""
    copies = tuple(shadow)
    if control:
        detail = f"control cohort of {', '.join(control)}"
        return Assignment(BASELINE, "control", detail, tuple(control), copies)
    if refusals:
        return Assignment(BASELINE, "ineligible", "; ".join(refusals), (), copies)
    if weights.rolled_back and not weights.serving:
        names = ", ".join(sorted(weights.rolled_back))
        return Assignment(BASELINE, "rolled_back", f"{names} was taken back", (), copies)
    return Assignment(BASELINE, "default", "outside of every share", (), copies)


def spill(assignment: Assignment, why: str) -> Assignment:
    """The same request on the baseline, because its profile has no room or failed before the first
    byte. It is in no cohort: it did not get what its place says."""
    return replace(
        assignment,
        profile=BASELINE,
        reason="spill",
        detail=f"{assignment.profile}: {why}",
        control_for=(),
        shadow=(),
        approximate=False,
    )
