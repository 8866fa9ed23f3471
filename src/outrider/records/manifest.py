"""Where a file's numbers come from: what was run, on what, with what. Plain data, no torch.

Every file that Outrider writes carries a `RunManifest`. It reads versions from installed metadata
and the machine from the operating system; what only the caller can know (threads, target, device)
is handed in. It holds no host name and no user name, and secrets on the command line are masked.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from outrider.records.request import InvalidRecord

SCHEMA_VERSION = 1
PACKAGES = ("outrider", "torch", "transformers", "numpy")
CPU_FLAGS = (
    *("avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)

_MASK = "***"
_SECRET_NAME = re.compile(r"(api[-_]?key|secret|password|passwd|credential|(^|[-_])token)$", re.I)
_SECRET_TEXT = re.compile(r"(?i)(\bbearer\s+|\bbasic\s+|://[^/\s:@]*:)[^\s@\"']+")


@dataclass(frozen=True)
class Machine:
    """The hardware, as the operating system tells it.

    Attributes:
        cpu: the model's name.
        flags: those of `CPU_FLAGS` that the CPU has.
        cores: logical cores of the machine.
        usable_cores: those that this process may run on.
        memory_bytes: main memory; `None` if unknown.
        system: operating system, its release, and the architecture.
        accelerator: the device that ran the target, if it was not the CPU.
    """

    cpu: str
    flags: tuple[str, ...]
    cores: int
    usable_cores: int
    memory_bytes: int | None
    system: str
    accelerator: str | None = None


@dataclass(frozen=True)
class TargetIdentity:
    """Which target ran: its name, a fingerprint of its weights, and the precision of these."""

    name: str
    fingerprint: str
    precision: str


@dataclass(frozen=True)
class RunManifest:
    """One run.

    Attributes:
        schema: version of this layout.
        command: the command line, secrets masked.
        versions: package (and "python") to version; packages that are not installed are left out.
        commit: the commit of Outrider's checkout; `None` if it runs from elsewhere.
        dirty: tracked files differ from that commit; `None` without one.
        machine: the hardware.
        threads: compute threads of the run; `None` if unknown.
        load_start, load_end: load averages over 1, 5 and 15 minutes; `None` if unknown.
        seed: the run's seed.
        started, finished: UTC, ISO 8601.
        target: which target ran; `None` for a file without one.
        options: the run's options, secrets masked.
    """

    command: tuple[str, ...]
    versions: Mapping[str, str]
    commit: str | None
    dirty: bool | None
    machine: Machine
    threads: int | None
    load_start: tuple[float, float, float] | None
    seed: int | None
    started: str
    target: TargetIdentity | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    load_end: tuple[float, float, float] | None = None
    finished: str | None = None
    schema: int = SCHEMA_VERSION

    def finish(self) -> RunManifest:
        """This manifest with the load and the time of now as the run's end."""
        return replace(self, load_end=load_average(), finished=now())

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        return {"schema": data.pop("schema"), **data}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunManifest:
        """The manifest of `to_dict`'s form.

        Raises:
            InvalidRecord: it was written by a newer Outrider, or a field is missing.
        """
        schema = data.get("schema")
        if not isinstance(schema, int) or schema > SCHEMA_VERSION:
            raise InvalidRecord(
                f"manifest schema {schema!r} is not known; this Outrider reads up to "
                f"{SCHEMA_VERSION}: update it"
            )
        try:
            machine = dict(data["machine"])
            target = data["target"]
            return cls(
                command=tuple(data["command"]),
                versions=dict(data["versions"]),
                commit=data["commit"],
                dirty=data["dirty"],
                machine=Machine(**{**machine, "flags": tuple(machine["flags"])}),
                threads=data["threads"],
                load_start=_load(data["load_start"]),
                seed=data["seed"],
                started=data["started"],
                target=None if target is None else TargetIdentity(**target),
                options=dict(data["options"]),
                load_end=_load(data["load_end"]),
                finished=data["finished"],
                schema=schema,
            )
        except (KeyError, TypeError, ValueError) as fault:
            raise InvalidRecord(f"manifest is malformed: {fault!r}") from None


def run_manifest(
    *,
    seed: int | None,
    threads: int | None = None,
    target: TargetIdentity | None = None,
    options: Mapping[str, Any] | None = None,
    command: Sequence[str] | None = None,
    accelerator: str | None = None,
) -> RunManifest:
    """The manifest of a run that starts now; `command` defaults to this process's own."""
    commit, dirty = checkout()
    return RunManifest(
        command=mask_command(sys.argv if command is None else command),
        versions=versions(),
        commit=commit,
        dirty=dirty,
        machine=machine(accelerator=accelerator),
        threads=threads,
        load_start=load_average(),
        seed=seed,
        started=now(),
        target=target,
        options=mask_options(options or {}),
    )


def now() -> str:
    """UTC to the second, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Versions from installed metadata, so that nothing heavy is imported to learn them."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def checkout() -> tuple[str | None, bool | None]:
    """(commit, dirty) of the checkout that holds this very file, or (None, None).

    An installed copy may lie inside another project's checkout; that one's commit would be a lie,
    hence the question whether this file is tracked.
    """
    here = Path(__file__).resolve()
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None, None
    commit = _git(here.parent, "rev-parse", "HEAD")
    changes = _git(here.parent, "status", "--porcelain", "--untracked-files=no")
    return commit, None if commit is None or changes is None else bool(changes)


def machine(*, accelerator: str | None = None) -> Machine:
    """The hardware of this process."""
    cpu, flags = _cpu()
    cores = os.cpu_count() or 1
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(cores)
    try:
        memory: int | None = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        memory = None
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return Machine(cpu, flags, cores, len(affinity), memory, system, accelerator)


def load_average() -> tuple[float, float, float] | None:
    """Runnable processes over 1, 5 and 15 minutes, or `None` where the system does not count."""
    try:
        return os.getloadavg()
    except (AttributeError, OSError):
        return None


def mask_command(arguments: Sequence[str]) -> tuple[str, ...]:
    """The command line with the values of secret options and of authorization headers masked."""
    masked: list[str] = []
    hide_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_secret = bool(_SECRET_NAME.search(name)) and (name.startswith("-") or bool(equals))
        if hide_next:
            masked.append(_MASK)
        elif is_secret and equals:
            masked.append(f"{name}={_MASK}")
        else:
            masked.append(_mask_text(argument))
        hide_next = is_secret and not equals and not hide_next
    return tuple(masked)


def mask_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with secret values masked, inside nested mappings and lists too."""
    return {
        key: _MASK if _SECRET_NAME.search(str(key)) and isinstance(value, str) else _masked(value)
        for key, value in options.items()
    }


def _masked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return mask_options(value)
    if isinstance(value, list | tuple):
        return [_masked(item) for item in value]
    return _mask_text(value) if isinstance(value, str) else value


def _mask_text(text: str) -> str:
    return _SECRET_TEXT.sub(lambda match: match.group(1) + _MASK, text)


def _load(values: Sequence[float] | None) -> tuple[float, float, float] | None:
    if values is None:
        return None
    one, five, fifteen = values
    return one, five, fifteen


def _cpu() -> tuple[str, tuple[str, ...]]:
    """The CPU's name and its flags of interest; the flags are known on Linux only."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    first: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        first.setdefault(key.strip(), value.strip())
    has = set((first.get("flags") or first.get("Features") or "").split())
    name = first.get("model name") or platform.processor() or platform.machine() or "unknown"
    return name, tuple(flag for flag in CPU_FLAGS if flag in has)


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of a read-only git command, or `None` if it fails, hangs or git is missing."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
