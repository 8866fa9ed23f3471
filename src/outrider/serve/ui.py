"""The page at /ui: one file, nothing loaded from anywhere, only its own script may run."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files


@cache
def page() -> bytes:
    """The page's HTML."""
    return files("outrider.serve").joinpath("ui.html").read_bytes()


@cache
def policy() -> str:
    """A content security policy for it."""
    return policy_for(page().decode())


def policy_for(text: str) -> str:
    """A content security policy that allows this page's script and style, and calls to its own
    server."""
    return (
        f"default-src 'none'; connect-src 'self'; script-src {_digest(text, 'script')}; "
        f"style-src {_digest(text, 'style')}; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


def _digest(text: str, tag: str) -> str:
    inside = text.split(f"<{tag}>", 1)[1].split(f"</{tag}>", 1)[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
