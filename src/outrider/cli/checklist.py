"""`outrider checklist`: the go-live list of a rollout, from evidence on disk and a live gateway."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options
from outrider.cli.rollout import Gateway
from outrider.cli.session import Session
from outrider.errors import InvalidParameter

if TYPE_CHECKING:
    from outrider.rollout.checklist import Row

WHY = "drill of the launch checklist"
SWITCH_MS = 100.0


def checklist(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="The rollout's YAML.")],
    url: Annotated[
        str | None, typer.Option(help="The operators' port of a gateway, for live figures.")
    ] = None,
    drill: Annotated[
        bool,
        typer.Option("--drill", help="Pull the kill switch of that gateway, and put it back."),
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the rows to this file.")
    ] = None,
) -> None:
    """Is there evidence for everything that must be known before going live?"""
    from outrider.rollout.checklist import (
        checklist as rows_of,
    )
    from outrider.rollout.checklist import gather, launchable, to_text, write_drill
    from outrider.rollout.config import load_rollout

    session: Session = context.obj
    config = load_rollout(file)
    if json_file is not None:
        options.check_writable(json_file)
    if drill and url is None:
        raise InvalidParameter("--drill needs the --url of a gateway")
    gateway = None if url is None else Gateway(url)
    if drill and gateway is not None:
        write_drill(config.evidence / "drill-switch.json", [pull(gateway)])
    live: Mapping[str, Any] = {}
    if gateway is not None:
        profiles = gateway.get("/rollout").get("profiles", {})
        live = {n: p["report"] for n, p in profiles.items() if p.get("report")}
    evidence = gather(config, live=live)
    rows = rows_of(config, evidence)
    for fault in evidence.faults:
        session.err.print(f"passed over: {fault}", style="dim", markup=False)
    session.out.print(to_text(rows), markup=False)
    if json_file is not None:
        document = {"checklist": 1, "rows": [row.to_dict() for row in rows]}
        options.write_file(json_file, json.dumps(document, indent=2) + "\n")
    if not launchable(rows):
        raise typer.Exit(1)


def pull(gateway: Gateway) -> Row:
    """Kill, look, and put back: whatever happens between, the switch is put back.

    A gateway that was killed already is left as it is.
    """
    from outrider.rollout.checklist import Row

    name = "switch"
    if gateway.get("/rollout").get("killed"):
        return Row(name, "fail", "the switch was on already; nothing was drilled")
    begin = time.monotonic()
    try:
        gateway.post("/rollout/kill", {"on": True, "why": WHY})
        took = (time.monotonic() - begin) * 1000
        killed = bool(gateway.get("/rollout").get("killed"))
    finally:
        gateway.post("/rollout/kill", {"on": False, "why": WHY})
    back = not gateway.get("/rollout").get("killed")
    told = f"{took:.0f} ms to switch off, put back: {'yes' if back else 'NO'}"
    return Row(name, "pass" if killed and back and took <= SWITCH_MS else "fail", told)
