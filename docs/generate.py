"""Writes docs/reference/cli.md from the program's own help, and checks the links of all pages.

Run it by `make docs`. A test calls the same functions, so that neither can fall behind unnoticed.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from outrider.cli.main import VERBS, run
from outrider.cli.session import Session

ROOT = Path(__file__).resolve().parents[1]
CLI_PAGE = ROOT / "docs" / "reference" / "cli.md"
COLUMNS = "100"  # of the help text, whatever the terminal

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)

HEAD = """# Command line

Generated from the program's own help by `make docs`; do not edit.

Exit codes: 0 done, 1 a check failed, 2 the request was wrong, 3 the machine or its files are not
fit for it, 130 interrupted. Errors are one line on stderr; `outrider --debug VERB ...` adds the
traceback.
"""


def cli_page() -> str:
    """The reference page of the command line."""
    calls = [[], *([verb.__name__] for verb in VERBS)]
    sections = (f"\n## {' '.join(['outrider', *c])}\n\n```text\n{_help(c)}\n```\n" for c in calls)
    return HEAD + "".join(sections)


def _help(words: list[str]) -> str:
    """What ``outrider WORDS --help`` prints."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = COLUMNS
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            run([*words, "--help"], session=Session())
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before
    return "\n".join(line.rstrip() for line in text.getvalue().strip().splitlines())


def pages() -> list[Path]:
    """Every page for people."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def broken_links(page: Path) -> Iterator[str]:
    """Links to files or headings of this repository that are not there."""
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue  # another site; not ours to check without a network
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield f"{page.relative_to(ROOT)}: {link} is not there"
        elif anchor and anchor not in anchors(target):
            yield f"{page.relative_to(ROOT)}: {path} has no heading for #{anchor}"


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get."""
    headings = HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def main() -> int:
    """Write the page; say what is broken."""
    CLI_PAGE.parent.mkdir(parents=True, exist_ok=True)
    CLI_PAGE.write_text(cli_page(), encoding="utf-8")
    faults = [fault for page in pages() for fault in broken_links(page)]
    print("\n".join([f"wrote {CLI_PAGE.relative_to(ROOT)}", *faults]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
