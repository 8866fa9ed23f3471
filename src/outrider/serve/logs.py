"""The server's log: one line per request, as text or as JSON. No prompt, no answer, no key.

What a client wrote appears quoted and clipped, so that it can neither forge a line nor fill a disk.
"""

from __future__ import annotations

import json
import logging
import sys
import time

from outrider.serve.exchange import Exchange

access = logging.getLogger("outrider.access")

PROBES = ("/health", "/ready")
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class JsonLines(logging.Formatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        facts = record.__dict__.get("facts", {})
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **facts,
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


class TextLines(logging.Formatter):
    """A line for people; the facts of a request behind the message."""

    def format(self, record: logging.LogRecord) -> str:
        facts = record.__dict__.get("facts", {})
        told = " ".join(f"{key}={_shown(value)}" for key, value in facts.items())
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock} {record.levelname.lower():7} {record.getMessage()} {told}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _shown(value: object) -> str:
    text = str(value)
    plain = text.isascii() and text.isprintable() and " " not in text
    return text if plain else ascii(text)


def set_up_logs(*, level: str, as_json: bool) -> None:
    """Send the log of the package to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else TextLines())
    root = logging.getLogger("outrider")
    root.handlers = [handler]
    root.propagate = False
    root.setLevel(LEVELS[level])
    for name in ("uvicorn", "uvicorn.error"):
        other = logging.getLogger(name)
        other.handlers = [handler]
        other.propagate = False
        other.setLevel(max(LEVELS[level], LEVELS["warning"]))


def log_request(exchange: Exchange, seconds: float) -> None:
    """The line of a request that is over."""
    status = exchange.status or 0
    facts = {
        "request": exchange.request_id,
        "method": exchange.method[:16],
        "path": exchange.path[:128],
        "status": status,
        "ms": round(seconds * 1000, 1),
        **exchange.facts,
    }
    level = logging.WARNING if status >= 500 else logging.INFO
    if exchange.path in PROBES and status < 400:
        level = logging.DEBUG  # somebody asks every second
    access.log(level, "request", extra={"facts": facts})
