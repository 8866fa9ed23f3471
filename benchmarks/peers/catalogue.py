"""Which sides take part: every engine with every precision and mode, and what is missing of them.

A side that cannot take part is in the list all the same, with the reason: it becomes a row.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gguf_files import precision, variant
from wire import Setting

from outrider.models.load import find_source

HERE = Path(__file__).resolve().parent
OURS = "outrider"
LLAMA_MODES = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
# Beside the defaults (12 tokens looked up, 48 guessed) one setting that suits short repetitions.
LLAMA_TUNED = ("ngram-simple:3:8", "ngram-map-k:3:8")


@dataclass(frozen=True)
class Side:
    """One engine in one precision and one mode.

    Attributes:
        name: what the table calls it: engine, precision, mode.
        peer: the engine.
        script: its adapter's file.
        python: the interpreter of its environment.
        setting: what the adapter is started with.
        environment: variables beside the common ones.
        installed: versions and build flags from its installation.
        missing: why it cannot take part; empty if it can.
    """

    name: str
    peer: str
    script: Path
    python: Path
    setting: Setting
    environment: dict[str, str] = field(default_factory=dict)
    installed: dict[str, object] = field(default_factory=dict)
    missing: str = ""

    @property
    def mode(self) -> str:
        return self.setting.mode


@dataclass(frozen=True)
class Wanted:
    """What a run is asked for: the target, threads, our weights and drafters, the peers' folder."""

    target: str
    threads: int
    weights: tuple[str, ...]
    drafters: tuple[str, ...]
    folder: Path
    context: int


def all_sides(wanted: Wanted) -> list[Side]:
    """Ours first, then every peer."""
    makers = (_outrider, _llama_cpp, _openvino, _transformers, _vllm)
    return [side for make in makers for side in make(wanted)]


def _outrider(wanted: Wanted) -> Iterator[Side]:
    for weights in wanted.weights:
        for mode in ("plain", *wanted.drafters):
            setting = Setting(
                wanted.target, wanted.threads, mode, {"weights": weights}, wanted.context
            )
            name = f"{OURS} {weights} {mode}"
            yield Side(name, OURS, HERE / "peer_outrider.py", Path(sys.executable), setting)


def _transformers(wanted: Wanted) -> Iterator[Side]:
    """In our own environment, on the folder that our loader reads."""
    folder = str(find_source(wanted.target).folder)
    script, python = HERE / "peer_transformers.py", Path(sys.executable)
    for weights in ("bf16", "fp32"):
        for mode in ("plain", "lookup"):
            setting = Setting(folder, wanted.threads, mode, {"weights": weights}, wanted.context)
            yield Side(f"transformers {weights} {mode}", "transformers", script, python, setting)


def _llama_cpp(wanted: Wanted) -> Iterator[Side]:
    place = wanted.folder / "llama.cpp"
    facts, missing = _installation(place, place / "bin" / "llama-server")
    gguf_file, reason = _gguf(wanted)
    kinds = {"Q8_0": (*LLAMA_MODES, *LLAMA_TUNED), "BF16": LLAMA_TUNED}
    kinds[precision(gguf_file) if gguf_file else "Q4_1"] = LLAMA_TUNED
    for kind, modes in kinds.items():
        model = "" if missing or gguf_file is None else str(_variant(wanted, gguf_file, kind))
        for mode in ("plain", *modes):
            setting = Setting(
                model, wanted.threads, mode, {"binaries": str(place / "bin")}, wanted.context
            )
            yield Side(
                f"llama.cpp {kind} {mode}",
                "llama.cpp",
                HERE / "peer_llamacpp.py",
                Path(sys.executable),
                setting,
                installed=facts,
                missing=missing or reason,
            )


def _openvino(wanted: Wanted) -> Iterator[Side]:
    place = wanted.folder / "openvino"
    python = place / "venv" / "bin" / "python"
    facts, missing = _installation(place, python)
    gguf_file, reason = _gguf(wanted)
    ready = gguf_file is not None and not missing
    model = str(_variant(wanted, gguf_file, "Q8_0")) if ready and gguf_file else ""
    for mode in ("plain", "lookup"):
        yield Side(
            f"OpenVINO GenAI Q8_0 {mode}",
            "openvino",
            HERE / "peer_openvino.py",
            python,
            Setting(model, wanted.threads, mode, context=wanted.context),
            installed=facts,
            missing=missing or reason,
        )


def _vllm(wanted: Wanted) -> Iterator[Side]:
    place = wanted.folder / "vllm"
    python = place / "venv" / "bin" / "python"
    facts, missing = _installation(place, python)
    cores = sorted(os.sched_getaffinity(0))[: wanted.threads]
    environment = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))}
    library = place / "venv" / "lib" / "libiomp5.so"
    if library.exists():  # vLLM itself asks for it: without it, it is slower
        environment["LD_PRELOAD"] = str(library)
    folder = str(find_source(wanted.target).folder)
    for mode in ("plain", "ngram"):
        yield Side(
            f"vLLM CPU bf16 {mode}",
            "vllm",
            HERE / "peer_vllm.py",
            python,
            Setting(folder, wanted.threads, mode, context=wanted.context),
            environment=environment,
            installed=facts,
            missing=missing,
        )


def _installation(place: Path, program: Path) -> tuple[dict[str, object], str]:
    """What the installer wrote down, and why the engine is missing, if it is."""
    note = place / "install.json"
    if not note.exists():
        return {}, "not installed; run benchmarks/peers/install.py"
    facts: dict[str, object] = json.loads(note.read_text())
    if not facts["ok"]:
        return facts, str(facts["reason"])
    return facts, "" if program.exists() else f"not installed: {program.name} is gone"


def _gguf(wanted: Wanted) -> tuple[Path | None, str]:
    path = find_source(wanted.target).gguf
    return path, "" if path else f"{wanted.target} is no GGUF file, which this engine needs"


def _variant(wanted: Wanted, source: Path, kind: str) -> Path:
    return variant(source, kind, wanted.folder / "models")
