"""`outrider models`: what can be run by name, and which conversions are kept."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import typer
from rich.table import Table

from outrider.cli import options
from outrider.cli.session import Session


@dataclass(frozen=True)
class ModelRow:
    """A model that can be named.

    Attributes:
        name: what to type.
        path: its file or folder; empty where it is not on this machine.
        size: bytes on disk; 0 where it is not there.
        remedy: how to get it, where it is not there.
    """

    name: str
    path: str
    size: int
    remedy: str

    @property
    def found(self) -> bool:
        return bool(self.path)


@dataclass(frozen=True)
class ConversionRow:
    """A GGUF file's converted twin in the cache folder.

    Attributes:
        source: the file's name.
        path: the folder that holds the conversion; it may be deleted at any time.
        size: bytes on disk.
    """

    source: str
    path: str
    size: int


def models(context: typer.Context, as_json: options.Json = False) -> None:
    """List models that can be run by name, and converted files kept in the cache."""
    session: Session = context.obj
    named, kept = list_models(), list_conversions()
    if as_json:
        found = {
            "models": [asdict(row) for row in named],
            "conversions": [asdict(row) for row in kept],
        }
        session.out.out(json.dumps(found, indent=2))
        return
    session.out.print(_models_table(named))
    if kept:
        session.out.print(_conversions_table(kept))


def list_models() -> list[ModelRow]:
    """Every model with a name of its own, installed or not."""
    from outrider.models.load import available_models

    return [_row(model.spec, model.path, model.remedy) for model in available_models()]


def _row(name: str, path: Path | None, remedy: str) -> ModelRow:
    if path is None:
        return ModelRow(name, "", 0, remedy)
    if not path.exists():  # an environment variable can name anything
        return ModelRow(name, "", 0, f"{path} does not exist; correct the path that names it")
    return ModelRow(name, str(path), disk_size(path), "")


def list_conversions() -> list[ConversionRow]:
    """The conversions in the cache folder. Damaged ones are listed by their folder's name."""
    from outrider.models.paths import cache_folder

    folders = sorted(path for path in (cache_folder() / "gguf").glob("*") if path.is_dir())
    return [ConversionRow(_source(folder), str(folder), disk_size(folder)) for folder in folders]


def disk_size(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; what vanishes meanwhile counts nothing."""
    files: Iterable[Path] = path.rglob("*") if path.is_dir() else (path,)
    total = 0
    for file in files:
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:
            continue
    return total


def _source(folder: Path) -> str:
    try:
        return str(json.loads((folder / "source.json").read_text(encoding="utf-8"))["file"])
    except (OSError, ValueError, KeyError, TypeError):
        return folder.name


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB" if size else ""


def _models_table(rows: list[ModelRow]) -> Table:
    table = Table(box=None, padding=(0, 2))
    table.add_column("model")
    table.add_column("size", justify="right")
    table.add_column("where", overflow="fold")
    for row in rows:
        table.add_row(row.name, _megabytes(row.size), row.path or f"not here; {row.remedy}")
    return table


def _conversions_table(rows: list[ConversionRow]) -> Table:
    table = Table(box=None, padding=(0, 2))
    table.add_column("converted from")
    table.add_column("size", justify="right")
    table.add_column("kept in", overflow="fold")
    for row in rows:
        table.add_row(row.source, _megabytes(row.size), row.path)
    return table
