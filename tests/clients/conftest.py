"""One server for the tests of real clients, on a socket of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from outrider.serve.keys import hash_key
from outrider.testing.serving import FakeModel, fake_service, running_server, text_target

KEY = "sk-client-test-key"

# Before any client is imported: no telemetry, and no list of prices from the network.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["LITELLM_TELEMETRY"] = "False"
os.environ["LANGSMITH_TRACING"] = "false"


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    keys = [{"name": "client", "sha256": hash_key(KEY)}]
    engine = {"slots": 4, "context": 4096}
    model = FakeModel(text_target(context=4096))
    with running_server(fake_service(model=model, keys=keys, engine=engine)) as address:
        yield f"{address}/v1"
