"""What becomes of requests that went badly, and of acceptance that drifts: kept for later sets.

Choosing is `rollout.feedback`'s. A disk that fails costs cases, never answers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from outrider.records.files import RecordFileError
from outrider.rollout.config import RolloutConfig
from outrider.rollout.feedback import Drift, DriftWatch, FeedbackFolder, Selector
from outrider.rollout.verdict import Observation

log = logging.getLogger(__name__)

DRIFTING = 500  # requests of a type that are wanted for training after a drift was found
MOST_TYPES = 64  # prompt types under watch; a client's word must not fill the memory


class Feedback:
    """The cases of one rollout.

    Args:
        config: the rollout; without a folder nothing is kept, and drift is still watched.
        redact: takes personal data out of a text.
        drifted: told of each drift: the profile, and what drifted.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        redact: Callable[[str], str],
        drifted: Callable[[str, Drift], None],
    ) -> None:
        settings = config.feedback
        self._folder = None if settings.folder is None else FeedbackFolder(settings.folder)
        self._settings, self._redact, self._drifted = settings, redact, drifted
        self._selectors: dict[str, Selector] = {}
        self._watches: dict[tuple[str, str], DriftWatch] = {}
        self._wanted: dict[tuple[str, str], int] = {}

    def consider(
        self,
        profile: str,
        observation: Observation,
        body: Mapping[str, Any],
        *,
        different: bool = False,
    ) -> None:
        """Take in a request that a speculative profile answered, or tried to."""
        drifting = not different and self._watched(profile, observation)
        if self._folder is None:
            return
        found = self._selector(profile, self._folder).consider(
            observation, _messages(body), different=different, drifting=drifting
        )
        if found is None:
            return
        try:
            self._folder.add(found)
        except RecordFileError as fault:
            log.warning("a case of feedback is lost: %s", fault)

    def _selector(self, profile: str, folder: FeedbackFolder) -> Selector:
        if profile not in self._selectors:
            self._selectors[profile] = Selector(
                profile, self._settings, redact=self._redact, kept=folder.kept(profile)
            )
        return self._selectors[profile]

    def _watched(self, profile: str, observation: Observation) -> bool:
        """Is the request's type one whose acceptance has drifted of late?"""
        key = (profile, observation.prompt_type)
        watch = self._watches.get(key)
        if watch is None:
            if len(self._watches) >= MOST_TYPES:
                return False
            watch = self._watches[key] = DriftWatch(observation.prompt_type)
        drift = watch.saw(observation)
        if drift is not None:
            self._wanted[key] = DRIFTING
            self._drifted(profile, drift)
        left = self._wanted.get(key, 0)
        if left:
            self._wanted[key] = left - 1
        return left > 0


def _messages(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The conversation; a plain prompt is what a user says."""
    messages = body.get("messages")
    if isinstance(messages, list):
        return [message for message in messages if isinstance(message, Mapping)]
    prompt = body.get("prompt")
    return [{"role": "user", "content": prompt if isinstance(prompt, str) else ""}]


def withhold(text: str) -> str:
    """The redaction of those who were given none: nothing of the text is kept."""
    return ""
