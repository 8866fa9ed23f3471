"""Who is asking. Keys are known by their SHA-256 hashes and compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import dataclass

from outrider.errors import InvalidParameter
from outrider.serve.config import Key, ServerConfig

ENVIRONMENT = "OUTRIDER_API_KEYS"  # keys in clear, separated by commas; hashed at start
MAX_KEY = 512


@dataclass(frozen=True)
class Caller:
    """Who sent a request.

    Attributes:
        tenant: the key's name; empty where the server has no keys.
        profiles: what it may choose; empty for all.
    """

    tenant: str = ""
    profiles: tuple[str, ...] = ()

    def may_use(self, profile: str) -> bool:
        return not self.profiles or profile in self.profiles


def hash_key(key: str) -> str:
    """What the configuration holds instead of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def keys_from_environment() -> tuple[Key, ...]:
    """The keys that the environment names.

    Raises:
        InvalidParameter: one of them is too short to be a secret.
    """
    found = [key.strip() for key in os.environ.get(ENVIRONMENT, "").split(",") if key.strip()]
    if any(len(key) < 8 for key in found):
        raise InvalidParameter(f"{ENVIRONMENT} holds a key of fewer than 8 characters; use more")
    return tuple(
        Key(name=f"key-{number}", sha256=hash_key(key)) for number, key in enumerate(found, start=1)
    )


class KeyRing:
    """The keys of a server."""

    def __init__(self, config: ServerConfig) -> None:
        self._keys = [(bytes.fromhex(key.sha256), key) for key in config.keys]

    @property
    def open(self) -> bool:
        """Nobody needs a key."""
        return not self._keys

    def caller(self, authorization: bytes | None) -> Caller | None:
        """Who sends this Authorization header; `None` for nobody we know.

        Every key is compared, and only hashes are, so time tells nothing of a key.
        """
        if self.open:
            return Caller()
        scheme, _, token = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not token or len(token) > MAX_KEY:
            return None
        given = hashlib.sha256(token.strip()).digest()
        found = None
        for known, key in self._keys:
            if hmac.compare_digest(given, known):
                found = key
        return None if found is None else Caller(found.name, found.profiles)
