"""What an operator is shown: one JSON document of everything that is in force, and the history."""

from __future__ import annotations

from typing import Any

from outrider.rollout.config import BASELINE, percent
from outrider.serve.gateway.gateway import Gateway
from outrider.serve.gateway.lanes import Lane, monotonic

SHOWN = 200  # latest entries of the audit log


def status(gateway: Gateway) -> dict[str, Any]:
    """What is in force."""
    controller, stage = gateway.controller, gateway.stage
    weights = controller.weights
    return {
        "target": stage.config.target,
        "model": stage.model,
        "killed": weights.killed,
        "killed_why": controller.state.killed_why,
        "unsaved": controller.unsaved,
        "reload_fault": gateway.reload_fault,
        "baseline": _lane(stage.lanes[BASELINE]),
        "profiles": {name: _profile(gateway, name) for name in stage.config.canaries},
    }


def _profile(gateway: Gateway, name: str) -> dict[str, Any]:
    controller, config = gateway.controller, gateway.stage.config
    state = controller.state.profiles.get(name)
    report = controller.reports.get(name)
    return {
        "phase": "off" if state is None else state.phase,
        "weight": controller.weights.serving.get(name, 0),
        "share": percent(controller.weights.serving.get(name, 0)),
        "shadow": percent(controller.weights.shadow.get(name, 0)),
        "steps": [percent(step) for step in config.steps(name)],
        "since": 0.0 if state is None else state.since,
        "window": 0 if state is None else state.window,
        "why": "" if state is None else state.why,
        "evidence": "" if state is None else state.evidence,
        "approximate": config.profiles[name].approximate,
        "report": None if report is None else report.to_dict(),
        **_lane(gateway.stage.lanes[name]),
    }


def _lane(lane: Lane) -> dict[str, Any]:
    return {
        "engine": lane.kind,
        "healthy": lane.healthy,
        "breaker": lane.breaker.state(monotonic()),
        "running": lane.gate.running,
        "waiting": lane.gate.waiting,
        "lacking": sorted(lane.lacking),
    }


def history(gateway: Gateway) -> dict[str, Any]:
    """The audit log's end, and the latest verdicts."""
    log = gateway.ledger.history()
    return {
        "entries": list(log.entries[-SHOWN:]),
        "fault": log.fault,
        "verdicts": list(gateway.verdicts),
    }
