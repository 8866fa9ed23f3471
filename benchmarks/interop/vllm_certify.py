"""Certifies vLLM on CPU: the test must pass what is right there and fail what is wrong.

    python benchmarks/interop/vllm_certify.py                   # some minutes on two cores
    python benchmarks/interop/vllm_certify.py --requests 2000   # with the power of a certificate
    python benchmarks/interop/vllm_certify.py --json FILE       # and both certificates as a result

Three runs of vLLM's own server: without speculation (all must pass); with a draft model, greedy
(must pass); and the same sampled (must fail: up to 0.33 its CPU build samples from uninitialised
temperatures when it speculates, vLLM issue 55005). The draft model is the target itself, so that
guesses are accepted. vLLM's CPU build is installed into .peers/ if it is not there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "peers"), str(HERE)]

from install import vllm_python  # noqa: E402
from vllm_server import server  # noqa: E402

from outrider.models.load import find_source  # noqa: E402
from outrider.records.files import write_json  # noqa: E402
from outrider.records.manifest import run_manifest  # noqa: E402

EXPECTED = (
    # speculation, parts of the certificate, verdict of each
    (False, {"greedy": "pass", "distribution": "pass", "features": None}),
    (True, {"greedy": "pass", "distribution": "fail", "features": None}),
)


def certify(url: str, parts: list[str], requests: int, out: Path) -> dict[str, Any]:
    """The certificate of a server; raises where none was written."""
    command = [sys.executable, "-m", "outrider", "certify"]
    command += ["--url", url, "--engine", "vllm", "--requests", str(requests)]
    command += ["--parts", ",".join(parts), "--json", str(out), "--page", str(out) + ".html"]
    subprocess.run(command, check=False)
    if not out.exists():
        raise SystemExit(f"no certificate of {url}")
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def unexpected(found: dict[str, Any], wanted: dict[str, str | None]) -> list[str]:
    """Parts whose verdict is another than it must be; `None` takes any."""
    verdicts = {section["name"]: section["verdict"] for section in found["sections"]}
    return [
        f"{name}: {verdicts.get(name)}, not {verdict}"
        for name, verdict in wanted.items()
        if verdict is not None and verdicts.get(name) != verdict
    ]


def main() -> int:
    """Run all; 0 where every verdict is the expected one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "vllm-certify")
    parser.add_argument("--only", choices=["plain", "speculative"])
    parser.add_argument("--json", type=Path, help="for the result")
    options = parser.parse_args()
    python = vllm_python()
    model = find_source(options.model).folder
    options.out.mkdir(parents=True, exist_ok=True)
    asked = {"model": options.model, "requests": options.requests, "only": options.only}
    manifest = run_manifest(seed=None, options=asked)
    faults, runs = [], []
    for speculate, wanted in EXPECTED:
        kind = "speculative" if speculate else "plain"
        if options.only not in (None, kind):
            continue
        log = options.out / f"{kind}.log"
        with server(python, model, log, speculate=speculate) as url:
            out = options.out / f"{kind}.json"
            out.unlink(missing_ok=True)
            begin = time.monotonic()
            found = certify(url, list(wanted), options.requests, out)
        seconds = round(time.monotonic() - begin, 1)
        runs.append({"server": kind, "seconds": seconds, "wanted": wanted, "certificate": found})
        faults += [f"{kind}: {fault}" for fault in unexpected(found, wanted)]
    if options.json:
        told = {"manifest": manifest.finish().to_dict(), "runs": runs, "faults": faults}
        write_json(options.json, told)
    print("\n".join(faults) or "every verdict is as it must be")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
