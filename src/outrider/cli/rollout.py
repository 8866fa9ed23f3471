"""`outrider rollout`: look at a rollout in force and turn it, from any terminal."""

from __future__ import annotations

import getpass
import json
import os
import time
import urllib.error
import urllib.request
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import typer

from outrider.cli.session import Session
from outrider.errors import InvalidParameter, OutriderError

KEY_VARIABLE = "OUTRIDER_ADMIN_KEY"
TIMEOUT_S = 30
Action = Literal[
    "status", "history", "set", "promote", "rollback", "arm", "hold", "shadow", "kill", "unkill",
    "reload",
]  # fmt: skip
ON_PROFILES = ("set", "promote", "rollback", "arm", "hold", "shadow")


class GatewayRefuses(OutriderError):
    """A gateway cannot be reached, or does not do what was asked."""

    exit_code = 3


class NotPossible(OutriderError):
    """A gateway says that what was asked for is not possible now."""

    exit_code = 1


def rollout(
    context: typer.Context,
    action: Annotated[Action, typer.Argument(help="What to do.")] = "status",
    profile: Annotated[
        str | None, typer.Argument(help="On which profile; the only one need not be named.")
    ] = None,
    share: Annotated[str | None, typer.Argument(help="For set: a percentage such as 25%.")] = None,
    url: Annotated[
        str, typer.Option(help="The operators' port of the gateway.")
    ] = "http://127.0.0.1:8001",
    why: Annotated[str, typer.Option(help="For the audit log.")] = "",
    force: Annotated[
        bool, typer.Option("--force", help="Also past a gate that does not pass.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the gateway's own JSON.")] = False,
) -> None:
    """Look at a rollout in force, or turn it: every change is effective at once and audited."""
    session: Session = context.obj
    gateway = Gateway(url)
    if action == "set" and share is None and profile is not None and profile.endswith("%"):
        profile, share = None, profile
    if action in ON_PROFILES:
        told = {"profile": profile or _only(gateway), "why": why, "force": force}
        if action == "set":
            if share is None:
                raise InvalidParameter("set needs a share, as in: outrider rollout set PROFILE 25%")
            told["share"] = share
        found = gateway.post(f"/rollout/{action}", told)
    elif action in ("kill", "unkill"):
        found = gateway.post("/rollout/kill", {"on": action == "kill", "why": why})
    elif action == "reload":
        found = gateway.post("/rollout/reload", {})
    else:
        found = gateway.get("/rollout" if action == "status" else "/rollout/history")
    if as_json:
        lines = [json.dumps(found, indent=2)]
    elif action == "status":
        lines = status_lines(found)
    elif action == "history":
        lines = history_lines(found)
    else:
        lines = [_change_line(found)]
    for line in lines:
        session.out.print(line, markup=False)


class Gateway:
    """The operators' port, by the standard library alone."""

    def __init__(self, url: str) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise InvalidParameter(f"{url!r} is no address; write http://HOST:PORT")
        self._url = url.rstrip("/")

    def get(self, path: str) -> dict[str, Any]:
        return self._call(path, None)

    def post(self, path: str, told: dict[str, Any]) -> dict[str, Any]:
        return self._call(path, {"who": _who(), **told})

    def _call(self, path: str, told: dict[str, Any] | None) -> dict[str, Any]:
        headers = {"content-type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            headers["authorization"] = f"Bearer {key}"
        data = None if told is None else json.dumps(told).encode()
        request = urllib.request.Request(self._url + path, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                found = json.load(response)
        except urllib.error.HTTPError as error:
            raise _refusal(error.code, error.read()) from None
        except (OSError, ValueError) as error:
            raise GatewayRefuses(f"no gateway answers at {self._url}: {error}") from None
        return found if isinstance(found, dict) else {}


def _refusal(status: int, body: bytes) -> OutriderError:
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = "no reason given"
    if status == 401:
        return GatewayRefuses(f"the gateway wants a key; set {KEY_VARIABLE}")
    if status in (400, 409):
        return NotPossible(message)
    return GatewayRefuses(f"the gateway refuses (HTTP {status}): {message}")


def _who() -> str:
    try:
        name = getpass.getuser()
    except (OSError, KeyError):
        name = "somebody"
    return name[:64]


def _only(gateway: Gateway) -> str:
    names = list(gateway.get("/rollout").get("profiles", {}))
    if len(names) != 1:
        raise InvalidParameter(f"name a profile: one of {', '.join(names)}")
    return str(names[0])


def _change_line(found: dict[str, Any]) -> str:
    change = found.get("change")
    if isinstance(change, dict):
        name = change["profile"] or "everything"
        return f"{name}: {change['before']} to {change['after']}: {change['why']}"
    return str(found.get("status", "it stands so already"))


def status_lines(found: dict[str, Any]) -> list[str]:
    """What is in force, for people."""
    lines = [f"target {found['target']}, clients call it {found['model']}"]
    if found["killed"]:
        lines.append(f"SWITCHED OFF: everything goes to the baseline. {found['killed_why']}")
    for name in ("unsaved", "reload_fault"):
        if found[name]:
            lines.append(f"{name.replace('_', ' ')}: {found[name]}")
    lines.append(_lane_line("baseline", found["baseline"]))
    for name, profile in found["profiles"].items():
        mark = " APPROXIMATE" if profile["approximate"] else ""
        lines.append(_lane_line(name, profile) + mark)
        lines.append(f"  {profile['phase']} at {profile['share']}, shadow {profile['shadow']}")
        if profile["why"]:
            lines.append(f"  since {_clock(profile['since'])}: {profile['why']}")
        if profile["report"]:
            lines += _report_lines(profile["report"])
    return lines


def _lane_line(name: str, lane: dict[str, Any]) -> str:
    health = {True: "healthy", False: "NOT HEALTHY", None: "not looked at"}[lane["healthy"]]
    circuit = "" if lane["breaker"] == "closed" else f", circuit {lane['breaker']}"
    return f"{name}: {lane['engine']}, {health}{circuit}, {lane['running']} under way"


def _report_lines(report: dict[str, Any]) -> list[str]:
    lines = [f"  verdict {report['state']} (look {report['look']}): {report['why']}"]
    for finding in report["findings"]:
        kind = f" [{finding['prompt_type']}]" if finding["prompt_type"] else ""
        lines.append(
            f"    {finding['state']:12} {finding['metric']}{kind}: n {finding['canary']} and "
            f"{finding['control']}: {finding['why']}"
        )
    return lines


def history_lines(found: dict[str, Any]) -> list[str]:
    """The audit log, oldest first."""
    lines = []
    for entry in found["entries"]:
        name = entry.get("profile") or "everything"
        lines.append(
            f"{_clock(entry.get('at', 0.0))} {name}: {entry.get('action')} by {entry.get('who')}: "
            f"{entry.get('before')} to {entry.get('after')}: {entry.get('why')}"
        )
    if found["fault"]:
        lines.append(f"THE LOG HAS BEEN CHANGED: {found['fault']}")
    return lines or ["nothing has happened yet"]


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
