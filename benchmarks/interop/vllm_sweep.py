"""Sweeps and evaluates vLLM on CPU through `outrider sweep` and `outrider eval`, as a user would.

    python benchmarks/interop/vllm_sweep.py              # some minutes on two cores

The sweep starts vLLM's own server once plainly and once with its n-gram method, and must find:
acceptance told by the answers, the same greedy outputs with and without guesses, and a verdict of
either kind with its files. Speed is not judged: two cores of a shared machine say nothing about it.
vLLM's CPU build is installed into .peers/ if it is not there.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "peers"), str(HERE)]

from install import vllm_python  # noqa: E402
from vllm_server import NAME, OWN  # noqa: E402

from outrider.evaluate.runs import Run  # noqa: E402
from outrider.models.load import find_source  # noqa: E402

BASE = "baseline"


def command(python: Path, model: Path) -> str:
    """How to start vLLM, with the places that `--launch` wants."""
    words = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    # in float32, where near-ties are rare and greedy outputs agree
    words += ["--served-model-name", NAME, "--host", "127.0.0.1", "--dtype", "float32"]
    words += ["--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "4"]
    return shlex.join(words) + " --port {port} {speculative}"


def outrider(*words: str) -> int:
    """Run the command line; returns its exit code."""
    done = subprocess.run([sys.executable, "-m", "outrider", *words], env={**os.environ, **OWN})
    return done.returncode


def faults_of(folder: Path) -> list[str]:
    """What is not as it must be."""
    run = Run.load(folder)
    guessed = [s for s in run.samples if s["setting"] != BASE]
    verdicts = json.loads((folder / "recommendation.json").read_text())["verdicts"]
    found = []
    if not run.finished or run.faults():
        found.append(f"the run is not whole: {run.faults()}")
    if any(s["error"] for s in run.samples):
        found.append(f"failed: {[s['error'] for s in run.samples if s['error']][:2]}")
    if {s["engine"] for s in run.samples} != {"vllm"}:
        found.append("the engine was not recognised")
    if not any(s["accepted"] for s in guessed):
        found.append("nothing was accepted, or acceptance was not told")
    if any(s["acceptance_source"] not in ("response", "counters") for s in guessed):
        found.append("acceptance has no source")
    for verdict in verdicts:
        equal, compared = verdict["same_outputs"]
        if not compared or equal < compared:
            found.append(f"{verdict['setting']}: {equal} of {compared} greedy outputs agree")
    if not (folder / "settings" / "outrider.yaml").exists():
        found.append("no settings were written")
    return found


def main() -> int:
    """Run it; 0 where everything is as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "vllm-sweep")
    options = parser.parse_args()
    python = vllm_python()
    shutil.rmtree(options.out, ignore_errors=True)
    words = ["sweep", NAME, "--launch", command(python, find_source(options.model).folder)]
    words += ["--engine", "vllm", "--method", "ngram", "--tokens", "3", "-c", "1", "--full"]
    words += ["--vary", "prompt_lookup_min=2", "--vary", "prompt_lookup_max=4"]
    words += ["--set", "builtin:edit", "--limit", str(options.limit), "--max-tokens", "48"]
    code = outrider(*words, "--out", str(options.out))
    faults = [f"exit code {code}"] if code else faults_of(options.out)
    print("\n".join(faults) or "everything is as it must be")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
