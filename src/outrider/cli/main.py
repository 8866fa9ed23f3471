"""The entry point: the app, its verbs, and how errors become exit codes.

Exit codes: 0 done; 1 a check failed; 2 the request was wrong; 3 the machine or its files are not
fit for it; 130 interrupted; 141 nobody reads the output any more.
"""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from outrider import __version__
from outrider.cli.bench import bench
from outrider.cli.certify import certify
from outrider.cli.chat import chat
from outrider.cli.check import check
from outrider.cli.checklist import checklist
from outrider.cli.collect import collect
from outrider.cli.convert import convert
from outrider.cli.demo import demo
from outrider.cli.diagnose import diagnose
from outrider.cli.doctor import doctor
from outrider.cli.eval import eval
from outrider.cli.generate import INTERRUPTED, generate
from outrider.cli.models import models
from outrider.cli.plan import plan
from outrider.cli.replay import replay
from outrider.cli.report import report
from outrider.cli.rollout import rollout
from outrider.cli.serve import serve
from outrider.cli.session import Session
from outrider.cli.sweep import sweep
from outrider.cli.train import train
from outrider.errors import OutriderError

UNFIT = 3

VERBS = (
    demo,
    generate,
    chat,
    serve,
    rollout,
    checklist,
    plan,
    bench,
    train,
    replay,
    diagnose,
    check,
    eval,
    sweep,
    report,
    collect,
    certify,
    convert,
    models,
    doctor,
)

app = typer.Typer(
    help="Speculative decoding that does not change a single token.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # errors are one plain line, help is plain text
)
for verb in VERBS:
    app.command()(verb)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    session: Session = context.obj
    session.debug = debug


def run(args: Sequence[str] | None, *, session: Session) -> int:
    """Run a command line; returns the exit code and never raises for what a user can do wrong.

    Args:
        args: the words after the program's name; `None` takes the process's own.
        session: where models and screens come from.
    """
    try:
        app(args if args is None else list(args), prog_name="outrider", obj=session)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except OutriderError as error:
        if session.debug:
            traceback.print_exc()
        session.err.print(f"error: {error}", markup=False)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if session.debug or error.filename is not None or error.errno != errno.ENOSPC:
            raise
        session.err.print("error: the output cannot be written: no space left; free some")
        return UNFIT
    return 0


def main() -> None:
    """The `outrider` command."""
    sys.exit(run(None, session=Session()))
