"""Dashboard, alerts and metrics page name metrics and labels that the server really has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from outrider.serve.gateway.metrics import GatewayMetrics
from outrider.serve.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(r"\b(?:outrider|gen_ai_server)_[a-z_]+")
DASHBOARD = ROOT / "deploy" / "grafana-dashboard.json"
ALERTS = ROOT / "deploy" / "prometheus-alerts.yaml"


def known() -> dict[str, set[str]]:
    """Sample names of the server with their labels."""
    found: dict[str, set[str]] = {}
    for metric in Metrics().registry._names_to_collectors.items():
        name, collector = metric
        labels = set(collector._labelnames)  # type: ignore[attr-defined]
        found[name] = labels
    return found


def exported() -> dict[str, set[str]]:
    """Those of the server and of the gateway: panels may show either."""
    found = known()
    for name, collector in GatewayMetrics().registry._names_to_collectors.items():
        labels = set(collector._labelnames)  # type: ignore[attr-defined]
        found[name] = found.get(name, set()) | labels
    return found


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    return [t["expr"] for p in panels for t in p["targets"]] + [rule["expr"] for rule in rules]


def unknown_names(text: str, names: set[str]) -> set[str]:
    return {n for n in NAME.findall(text) if n not in names and n + "_bucket" not in names}


def test_every_expression_names_metrics_and_labels_that_are_there() -> None:
    names = exported()
    for expression in expressions():
        found = unknown_names(expression, set(names))
        assert NAME.search(expression) and not found, expression
        labels = set().union(*(names[name] for name in NAME.findall(expression))) | {"le"}
        for group in re.findall(r"by \(([a-z_, ]+)\)", expression):
            assert set(group.split(", ")) <= labels, expression
        for label in re.findall(r"[{,]\s*([a-z_]+)!?=", expression):
            assert label in labels, expression


def test_the_page_names_metrics_that_are_there() -> None:
    page = (ROOT / "docs" / "how-to" / "metrics.md").read_text()
    missing = {n for n in unknown_names(page, set(known())) if not n.endswith("_")}
    assert not missing


def test_every_metric_is_on_the_page() -> None:
    page = (ROOT / "docs" / "how-to" / "metrics.md").read_text()
    skip = ("_bucket", "_count", "_sum", "_created")
    for name in known():
        base = name if name.endswith("_total") else name + "_total"
        if name.endswith(skip) or (base in known() and base != name) or "build_info" in name:
            continue
        assert name in page or name.split("spec_decode")[-1].removeprefix("_") in page, name


def test_the_check_can_fail() -> None:
    assert unknown_names("rate(outrider_absent_total[5m])", set(exported())) == {
        "outrider_absent_total"
    }


def test_the_dashboard_shows_the_rollout() -> None:
    shown = " ".join(expressions())
    for name in (
        *("outrider_rollout_weight_ratio", "outrider_rollout_verdicts_total"),
        *("outrider_rollout_changes_total", "outrider_gateway_time_per_output_token_seconds"),
    ):
        assert name in shown
