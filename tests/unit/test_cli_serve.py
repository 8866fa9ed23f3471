"""`outrider serve`: how the command line and the file come together, and what is refused."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.serve import configuration
from outrider.errors import InvalidParameter
from outrider.serve.config import ServerConfig, Tls, load_config, make_config
from outrider.serve.run import check_tls, serve
from outrider.testing.serving import fake_service

FILE = """
target: smollm2-135m
profiles:
  fast: {drafter: suffix, max_nodes: 8}
  wide: {drafter: ngram}
default_profile: fast
engine: {slots: 3}
limits: {n: 2}
"""


def write(folder: Path, text: str) -> str:
    path = folder / "server.yaml"
    path.write_text(text)
    return str(path)


def made(what: str, drafter: str | None = None, **given: Any) -> ServerConfig:
    engine = {"slots": given.pop("slots", None), "context": None}
    return configuration(what, drafter=drafter, given=given, engine=engine)


def test_a_model_alone_is_served_plainly() -> None:
    config = made("smollm2-135m")
    assert (config.served_name, config.default, config.profile_names) == (
        "smollm2-135m",
        "baseline",
        ("baseline",),
    )
    assert (config.host, config.port) == ("127.0.0.1", 8000)


def test_a_drafter_is_a_profile_and_the_default() -> None:
    config = made("some/Model-1", "draft_model:folder", port=1)
    assert config.profile_names == ("draft-model", "baseline") and config.default == "draft-model"
    assert config.profile("draft-model").drafter == "draft_model:folder"
    assert (config.served_name, config.port) == ("Model-1", 1)


def test_a_file_says_it_all_and_the_command_line_has_the_last_word(tmp_path: Path) -> None:
    what = write(tmp_path, FILE)
    config = made(what)
    assert config.default == "fast" and config.engine.slots == 3 and config.limits.n == 2
    assert config == load_config(Path(what))
    config = made(what, "hybrid", host="0.0.0.0", slots=7)
    assert config.default == "hybrid" and config.profile_names == (
        "fast",
        "wide",
        "hybrid",
        "baseline",
    )
    assert (config.host, config.engine.slots, config.limits.n) == ("0.0.0.0", 7, 2)


def test_keys_come_from_the_environment_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_API_KEYS", "sk-first-key, sk-second-key")
    config = made("m")
    assert [key.name for key in config.keys] == ["key-1", "key-2"]
    assert "sk-first-key" not in config.model_dump_json()
    monkeypatch.setenv("OUTRIDER_API_KEYS", "short")
    with pytest.raises(InvalidParameter, match="fewer than 8"):
        made("m")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "target is missing"),
        ({"target": "m", "prot": 1}, "prot is unknown; did you mean port?"),
        ({"target": "m", "engine": {"slotz": 1}}, "engine.slotz is unknown; did you mean slots?"),
        ({"target": "m", "port": 70000}, "port: "),
        ({"target": "m", "profiles": {"baseline": {}}}, "baseline is plain decoding"),
        ({"target": "m", "profiles": {"a b": {}}}, "a profile's name is 'a b'"),
        ({"target": "m", "default_profile": "x"}, "default_profile 'x' is none of"),
        ({"target": "m", "keys": [{"name": "a", "sha256": "sk-secret"}]}, "never put the key"),
        ({"target": "m", "limits": {"n": 100}}, "limits.n: "),
    ],
)
def test_a_configuration_that_cannot_be_is_one_line(values: Any, message: str) -> None:
    with pytest.raises(InvalidParameter) as refusal:
        make_config(values, source="server.yaml")
    assert message in str(refusal.value) and "\n" not in str(refusal.value)
    assert str(refusal.value).startswith("server.yaml: ") and "sk-secret" not in str(refusal.value)


@pytest.mark.parametrize("text", ["", "a: [", "- 1", "\x00"])
def test_a_file_that_holds_no_settings(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidParameter, match=r"server\.yaml"):
        load_config(Path(write(tmp_path, text)))


def test_nothing_to_serve_and_a_drafter_that_is_not_there(cli: Any, tmp_path: Path) -> None:
    assert cli("serve").code == 2
    outcome = cli("serve", "fake", "--drafter", "sufix")
    assert outcome.code == 2 and "did you mean suffix" in outcome.err
    outcome = cli("serve", str(tmp_path / "absent.yaml"))
    assert outcome.code == 2 and "cannot be read" in outcome.err


SERVE_FAKE = """
import sys
from outrider.cli.main import run
from outrider.cli.session import Session
from outrider.testing.serving import FakeModel
def load(spec, **options):
    return FakeModel()
sys.exit(run(sys.argv[1:], session=Session(load=load)))
"""


def test_the_process_serves_and_ends_on_a_signal(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        SERVE_FAKE,
        "serve",
        "fake",
        "--port",
        "0",
        "--admin-port",
        "0",
    ]
    command += ["--slots", "1", "--context-length", "256", "--log-json"]
    environment = {**os.environ, "OUTRIDER_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        found: list[str] = []
        for line in process.stderr:
            if line.startswith("listening on "):
                found.append(line.split()[-1])
            if len(found) == 2:
                break
        api, admin = found
        with urllib.request.urlopen(f"{api}/v1/models", timeout=20) as response:
            assert json.load(response)["data"][0]["id"] == "fake"
        with urllib.request.urlopen(f"{admin}/metrics", timeout=20) as response:
            assert b"outrider_requests_running" in response.read()
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(30) == 0
    assert '"path": "/v1/models"' in rest and "Traceback" not in rest


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [
            sys.executable,
            "-c",
            SERVE_FAKE,
            "serve",
            "fake",
            "--port",
            port,
            "--slots",
            "1",
        ]
        command += ["--context-length", "64"]
        environment = {**os.environ, "OUTRIDER_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env=environment, check=False
        )
    told = f"error: 127.0.0.1:{port} cannot be listened on (address already in use)"
    assert done.returncode == 3 and done.stderr.startswith(told)
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("there", [False, True])
def test_files_of_tls_that_cannot_be_used_are_told_before_a_model_is_loaded(
    tmp_path: Path, there: bool
) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    if there:
        for path in (certificate, key):
            path.write_text("no certificate")
    with pytest.raises(InvalidParameter, match=r"tls: certificate .*cert\.pem .* cannot be used"):
        check_tls(Tls(certificate=certificate, key=key))
    what = write(tmp_path, f"target: nowhere\ntls: {{certificate: {certificate}, key: {key}}}")
    command = [sys.executable, "-m", "outrider", "serve", what]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "error: tls: certificate" in ended.stderr and "loading" not in ended.stderr


def test_a_server_that_fails_does_not_end_as_if_all_were_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(server: object) -> None:
        raise RuntimeError("a fault of uvicorn")

    monkeypatch.setattr("outrider.serve.run._Server.serve", fail)
    told: list[str] = []
    with pytest.raises(RuntimeError, match="a fault of uvicorn"):
        asyncio.run(serve(fake_service(), listening=told.append, signals=False))
    assert not told


def test_a_mistyped_name_is_told_before_what_it_leaves_missing() -> None:
    with pytest.raises(InvalidParameter, match="targt is unknown; did you mean target"):
        make_config({"targt": "m"})


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:4318", "http://", "ftp://host/x"])
def test_traces_go_to_an_http_address(address: str) -> None:
    with pytest.raises(InvalidParameter, match=r"traces: is '.*'; use an address as in http://"):
        make_config({"target": "m", "traces": address})
