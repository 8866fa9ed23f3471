"""The page at /ui/rollout: one file, nothing loaded from anywhere, only its own script may run."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from outrider.serve.ui import policy_for


@cache
def page() -> bytes:
    """The page's HTML."""
    return files("outrider.serve.gateway").joinpath("rollout.html").read_bytes()


@cache
def policy() -> str:
    """A content security policy for it."""
    return policy_for(page().decode())
