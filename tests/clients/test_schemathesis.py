"""Requests made from our own OpenAPI document, right and wrong ones: never an unexpected 5xx."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from outrider.serve.openapi import GETS, POSTS
from outrider.testing.serving import NAME, fake_service, running_server

EXAMPLES = int(os.environ.get("OUTRIDER_FUZZ", "12"))  # per path and mode; more for a long run
CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance]
OPERATIONS = [("POST", path) for path in POSTS] + [("GET", path) for path in GETS]


@pytest.fixture(scope="module")
def api() -> Iterator[schemathesis.BaseSchema]:
    limits = {"max_tokens": 12}
    with running_server(fake_service(limits=limits, allowed_hosts=["*"])) as address:
        yield schemathesis.openapi.from_url(f"{address}/openapi.json")


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_request_breaks_the_server(
    api: schemathesis.BaseSchema, method: str, path: str, mode: GenerationMode
) -> None:
    if mode is GenerationMode.NEGATIVE and method == "GET" and "{" not in path:
        return  # nothing to get wrong
    operation = api[path][method]
    seen: set[int] = set()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case: schemathesis.Case) -> None:
        if mode is GenerationMode.POSITIVE and method == "POST":
            case.body["model"] = NAME  # so that more than the name is tried
        seen.add(case.call_and_validate(checks=CHECKS).status_code)

    check()
    assert seen and not {status for status in seen if status >= 500}
