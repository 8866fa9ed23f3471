"""Examples of deployment hold together, and the page on rollouts names metrics that are there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from outrider.rollout.config import is_rollout, load_rollout, make_rollout
from outrider.serve.gateway.metrics import GatewayMetrics

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def manifests() -> dict[tuple[str, str], Any]:
    text = (DEPLOY / "kubernetes" / "outrider.yaml").read_text()
    return {(d["kind"], d["metadata"]["name"]): d for d in yaml.safe_load_all(text)}


def test_the_rollouts_of_the_examples_are_right() -> None:
    assert load_rollout(DEPLOY / "rollout.yaml").admin_port == 8001
    inside = yaml.safe_load(manifests()["ConfigMap", "outrider"]["data"]["rollout.yaml"])
    assert is_rollout(inside) and make_rollout(inside).port == 8000


def test_the_manifests_name_each_other() -> None:
    found = manifests()
    pod = found["Deployment", "outrider"]["spec"]["template"]
    container = pod["spec"]["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"api": 8000, "admin": 8001}
    for name in ("outrider", "outrider-admin"):
        service = found["Service", name]["spec"]
        assert service["selector"].items() <= pod["metadata"]["labels"].items()
        assert all(port["targetPort"] in ports for port in service["ports"])
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert ("PersistentVolumeClaim", "outrider") in found


def test_compose_shows_the_operators_port_to_this_machine_only() -> None:
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["outrider"]
    assert "127.0.0.1:8001:8001" in service["ports"] and service["read_only"]


def test_the_page_names_metrics_that_are_there() -> None:
    page = (ROOT / "docs" / "how-to" / "roll-out.md").read_text()
    known = set(GatewayMetrics().registry._names_to_collectors)
    named = set(re.findall(r"`(outrider_(?:gateway|rollout)_[a-z_]+)`", page))
    assert len(named) >= 10 and named <= known, named - known
