"""`outrider doctor`: what this machine has, and what would run on it."""

from __future__ import annotations

import json
import os
import platform
import shutil
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer
from rich.table import Table

from outrider.cli import options
from outrider.cli.models import ModelRow, list_models
from outrider.cli.session import Session

PACKAGES = ("outrider", "torch", "numpy", "transformers", "safetensors", "gguf", "huggingface-hub")
# The instruction sets that decide which kernels can be used.
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16")
NOTHING_RUNS = 3


@dataclass(frozen=True)
class Examination:
    """What was found.

    Attributes:
        versions: package to version, or "not installed".
        cpu: the processor's name.
        cpu_flags: those of `CPU_FLAGS` that it has.
        cores, threads: cores this process may use, threads the tensor library uses.
        devices: devices that a model can run on.
        weights: device to the precisions of weights that it can run.
        kernels: what computes on this machine, and why.
        memory_mb, free_mb: of the machine.
        cache: where converted models and measurements are kept, and whether they can be.
        models: models that can be loaded.
        verdict: what would run, in one line.
    """

    versions: dict[str, str]
    cpu: str
    cpu_flags: list[str]
    cores: int
    threads: int
    devices: list[str]
    weights: dict[str, list[str]]
    kernels: str
    memory_mb: int
    free_mb: int
    cache: str
    models: list[ModelRow]
    verdict: str

    @property
    def can_run(self) -> bool:
        return any(row.found for row in self.models)


def doctor(context: typer.Context, as_json: options.Json = False) -> None:
    """Show device, kernels, models and versions; exit code 3 if nothing can run."""
    session: Session = context.obj
    found = examine()
    if as_json:
        session.out.out(json.dumps(asdict(found), indent=2))
    else:
        session.out.print(as_table(found))
    if not found.can_run:
        raise typer.Exit(NOTHING_RUNS)


def examine() -> Examination:
    """Look at the machine. Loads no model."""
    import torch

    from outrider.models.paths import cache_folder

    rows = list_models()
    memory = _memory_mb()
    return Examination(
        versions={"python": platform.python_version()} | {p: _version(p) for p in PACKAGES},
        cpu=_cpu_field("model name") or platform.processor() or platform.machine(),
        cpu_flags=[f for f in CPU_FLAGS if f in _cpu_field("flags").split()],
        cores=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        devices=_devices(),
        weights=_weights(),
        kernels=_kernels(),
        memory_mb=memory.get("MemTotal", 0),
        free_mb=memory.get("MemAvailable", 0),
        cache=_cache(cache_folder()),
        models=rows,
        verdict=_verdict(rows),
    )


def as_table(found: Examination) -> Table:
    """The findings for people."""
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    rows = (
        ("versions", ", ".join(f"{name} {number}" for name, number in found.versions.items())),
        ("cpu", f"{found.cpu} ({', '.join(found.cpu_flags) or 'no vector extension known here'})"),
        ("threads", f"{found.threads} used, {found.cores} cores allowed"),
        ("devices", ", ".join(found.devices)),
        ("weights", "; ".join(f"{d}: {', '.join(p)}" for d, p in found.weights.items())),
        ("kernels", found.kernels),
        ("memory", f"{found.free_mb:,} of {found.memory_mb:,} MB free"),
        ("cache", found.cache),
        ("models", ", ".join(row.name for row in found.models if row.found) or "none found"),
        ("verdict", found.verdict),
    )
    for row in rows:
        table.add_row(*row)
    return table


def _verdict(rows: list[ModelRow]) -> str:
    ready = next((row for row in rows if row.found), None)
    if ready is None:
        remedies = "; ".join(f"{row.name}: {row.remedy}" for row in rows)
        return f"nothing can run, no model is on this machine ({remedies})"
    return f"ready: outrider generate {ready.name} --prompt 'Hello'"


def _cache(folder: Path) -> str:
    """The cache folder, and what is wrong with it: a conversion is refused there, so say it now."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return f"{folder} (cannot be written; set OUTRIDER_CACHE to another folder)"
    return f"{folder} ({shutil.disk_usage(there).free // 1_000_000:,} MB free on its disk)"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _devices() -> list[str]:
    import torch

    gpus = [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    return ["cpu", *gpus]


def _weights() -> dict[str, list[str]]:
    """Per device the precisions that weights can be held in."""
    import torch

    from outrider.kernels import native
    from outrider.models.load import DTYPES

    ours = [] if native.unavailable() else ["int8", "int4"]
    found = {"cpu": [*ours, *DTYPES]}
    if torch.cuda.is_available():
        found["cuda"] = list(DTYPES)
    return found


def _kernels() -> str:
    """What computes on the CPU: our own kernels and their instruction set, or why not."""
    from outrider.kernels import native

    missing = native.unavailable()
    if missing:
        return f"PyTorch; no native kernels ({missing}), so no int8 and no int4"
    return f"native ({native.isa()}); PyTorch for models that these do not have, and for fp16"


def _cpu_field(name: str) -> str:
    """The first value of a field of the kernel's processor list; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def _memory_mb() -> dict[str, int]:
    """The kernel's memory figures in MB; empty where it has none."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {words[0].rstrip(":"): int(words[1]) // 1024 for words in fields if len(words) > 1}
