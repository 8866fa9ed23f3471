"""Which way a request is decoded: from a model's name and a header to a profile.

A model is listed under its name (the default profile) and under `name@profile` for each profile;
`name@baseline` is plain decoding and always there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from outrider import __version__
from outrider.drafters.base import NodeBudget
from outrider.serve.config import Profile, ServerConfig
from outrider.serve.errors import ApiError, bad_request
from outrider.serve.keys import Caller

HEADER = b"x-outrider-profile"
UNBOUNDED = 2**31


@dataclass(frozen=True)
class Choice:
    """A profile that a request runs under.

    Attributes:
        name: the profile's name.
        model: what the response calls the model.
        profile: its settings.
        fingerprint: changes with the target's and the drafter's content, profile and version.
    """

    name: str
    model: str
    profile: Profile
    fingerprint: str

    @property
    def most(self) -> NodeBudget | None:
        """What the profile allows to guess; `None` for no bound of its own."""
        nodes, depth = self.profile.max_nodes, self.profile.max_depth
        if nodes is None and depth is None:
            return None
        return NodeBudget(nodes or UNBOUNDED, depth or UNBOUNDED)


class Profiles:
    """The profiles of a server."""

    def __init__(
        self, config: ServerConfig, *, target_fingerprint: str, drafters: Mapping[str, str]
    ) -> None:
        """Args:
        config: the server's.
        target_fingerprint: the target's.
        drafters: what each spec stands for: a hash of the drafter's files.
        """
        self._config = config
        self._target = target_fingerprint
        self._drafters = drafters

    @property
    def names(self) -> tuple[str, ...]:
        return self._config.profile_names

    def models(self, caller: Caller) -> list[str]:
        """The model names that a caller may use."""
        name = self._config.served_name
        usable = [p for p in self.names if caller.may_use(p)]
        if not self._config.choose_profile:
            return [name]
        return [name, *(f"{name}@{profile}" for profile in usable)]

    def choose(self, model: str, header: str | None, caller: Caller) -> Choice:
        """The profile for a request.

        Raises:
            ApiError: 404 for a model that is not here, 400 for an unknown or contradicted profile,
                403 where the choice is not the caller's.
        """
        name, at, suffix = model.partition("@")
        if name != self._config.served_name or (at and suffix not in self.names):
            here = ", ".join(self.models(caller))
            raise ApiError(
                404,
                f"model {_clip(model)} is not here; this server has {here}",
                param="model",
                code="model_not_found",
            )
        if header and header not in self.names:
            raise bad_request(
                f"profile {_clip(header)} is unknown; use one of {', '.join(self.names)}",
                param=HEADER.decode(),
                code="unknown_profile",
            )
        if suffix and header and suffix != header:
            raise bad_request(
                f"the model names profile {suffix}, the header {header}; name one",
                param=HEADER.decode(),
            )
        return self.choice(self._permitted(suffix or header or "", caller), model=model)

    def _permitted(self, wanted: str, caller: Caller) -> str:
        default = self._config.default
        if not wanted:
            if caller.may_use(default):
                return default
            return caller.profiles[0]
        if (wanted != default and not self._config.choose_profile) or not caller.may_use(wanted):
            raise ApiError(
                403,
                f"profile {wanted} is not yours to choose",
                param="model",
                code="profile_not_permitted",
            )
        return wanted

    def choice(self, name: str, *, model: str) -> Choice:
        """A profile by name."""
        profile = self._config.profile(name)
        parts = (
            __version__,
            self._target,
            name,
            profile.drafter,
            self._drafters.get(profile.drafter, ""),
            str(profile.max_nodes),
            str(profile.max_depth),
            str(profile.rule),
        )
        digest = hashlib.sha256("|".join(parts).encode()).hexdigest()
        return Choice(name, model, profile, f"fp_{digest[:16]}")


def _clip(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
