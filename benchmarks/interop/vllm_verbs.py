"""Points the other verbs at vLLM on CPU, as a user would: `eval`, `check` and `diagnose`.

    python benchmarks/interop/vllm_verbs.py                    # some minutes on two cores

One server with a draft model that is the target itself. `eval` must find every answer whole and
acceptance told by the answers (four at once without grammars: vLLM 0.32 on CPU now and then answers
500 where several requests, guesses and a grammar meet), `check` must find the server's tokenizer
equal to the files and a folder with another tokenizer out, `diagnose` must reach a verdict within
its time. Speed is not judged. vLLM's CPU build is installed into .peers/ if it is not there.
"""

from __future__ import annotations

import argparse
import json
import shutil
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

from outrider.evaluate.runs import Run  # noqa: E402
from outrider.models.load import find_source  # noqa: E402

DIAGNOSE_S = 30.0
SPACE = "\u0120"  # as byte-level vocabularies write it


def outrider(*words: str) -> tuple[int, str]:
    """The exit code and output of a command line."""
    command = [sys.executable, "-m", "outrider", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    return done.returncode, done.stdout


def evaluated(url: str, out: Path, *words: str) -> list[str]:
    """What is wrong with an evaluation."""
    shutil.rmtree(out, ignore_errors=True)
    code, _ = outrider("eval", url, "--max-tokens", "32", "--out", str(out), *words)
    run = Run.load(out)
    found = [f"eval: exit code {code}"] if code else []
    if not run.finished or run.faults():
        found.append(f"eval: the run is not whole: {run.faults()}")
    failed = [s["error"] for s in run.samples if s["error"]]
    if failed:
        found.append(f"eval: failed: {failed[:2]}")
    if {s["engine"] for s in run.samples} != {"vllm"}:
        found.append("eval: the engine was not recognised")
    told = [s for s in run.samples if s.get("acceptance_source") == "response"]
    if not sum(s["accepted"] for s in told):
        found.append("eval: no answer told what was accepted")
    if any(s.get("ttft_ms") is None for s in run.samples if not s["error"]):
        found.append("eval: an answer without the time of its first token")
    return found


def other_tokenizer(model: Path, out: Path) -> Path:
    """A copy of the target whose tokenizer has two frequent tokens swapped."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(model, out)
    file = out / "tokenizer.json"
    told = json.loads(file.read_text())
    vocabulary = told["model"]["vocab"]
    the, a = f"{SPACE}the", f"{SPACE}a"
    vocabulary[the], vocabulary[a] = vocabulary[a], vocabulary[the]
    file.unlink()
    file.write_text(json.dumps(told))
    return out


def checked(url: str, model: Path, out: Path) -> list[str]:
    """What is wrong with the comparison of tokenizers."""
    found = []
    for target, wanted in ((model, 0), (other_tokenizer(model, out), 1)):
        words = ["check", "--target", str(target), "--drafter", "suffix", "--no-probe"]
        code, text = outrider(*words, "--url", url, "--json")
        rows = json.loads(text)["rows"] if text else []
        status = {row["name"]: row["status"] for row in rows}.get("server's tokenizer")
        if (code, status) != (wanted, "fail" if wanted else "pass"):
            found.append(f"check: exit code {code}, not {wanted}; the tokenizer's row: {status}")
    return found


def diagnosed(url: str) -> list[str]:
    """What is wrong with a diagnosis."""
    begin = time.monotonic()
    code, text = outrider("diagnose", "--url", url, "--json")
    took = time.monotonic() - begin
    told: dict[str, Any] = json.loads(text) if text else {}
    found = [f"diagnose: exit code {code}"] if code else []
    if not told.get("verdict"):
        found.append("diagnose: no verdict")
    if took > DIAGNOSE_S:
        found.append(f"diagnose: {took:.0f} s")
    return found


def main() -> int:
    """Run all; 0 where everything is as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "vllm-verbs")
    options = parser.parse_args()
    python = vllm_python()
    model = find_source(options.model).folder
    options.out.mkdir(parents=True, exist_ok=True)
    limit, log = ("--limit", str(options.limit)), options.out / "server.log"
    tools = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with server(python, model, log, speculate=True, more=tools) as url:
        faults = [
            *checked(url, model, options.out / "other"),
            *diagnosed(url),
            *evaluated(url, options.out / "alone", *limit),
            *evaluated(url, options.out / "four", *limit, "-c", "4", "--set", "builtin:edit"),
        ]
    print("\n".join(faults) or "everything is as it must be")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
