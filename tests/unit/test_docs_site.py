"""The site of the docs builds without a warning, and asks no other site for anything."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOADS = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^>]*"
    r"|<link\b[^>]*\bhref=[\"']?(?:https?:)?//[^>]*"
    r"|url\([\"']?(?:https?:)?//[^)]*"
    r"|@import[^;]*//[^;]*"
)


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """What `make docs` runs, into another folder."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    command += ["--config-file", str(config), "--site-dir", str(site)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What the site is built from, where a test may spoil it."""
    for name in ("docs", "examples", "deploy"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for name in ("mkdocs.yml", "CHANGELOG.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_every_page_is_on_the_site(site):
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    outside = ["CHANGELOG.md", "CONTRIBUTING.md", "deploy/README.md", "examples/README.md"]
    for page in [*pages, *map(Path, outside)]:
        name = "index.html" if page.name == "README.md" else f"{page.stem}.html"
        assert (site / page.with_name(name)).is_file(), page
    assert not list(site.glob("*.py"))


def test_links_between_docs_and_the_rest_are_moved(site):
    assert 'href="../CONTRIBUTING.html#add-a-drafter"' in _text(site / "reference/python.html")
    assert 'href="explanation/glossary.html"' in _text(site / "CONTRIBUTING.html")
    assert 'href="../how-to/roll-out.html"' in _text(site / "deploy/index.html")
    assert (site / "examples/openai_chat.py").is_file()


def test_a_list_after_its_lead_in_is_a_list(site):
    assert "<p><strong>Tutorials</strong></p>\n<ul>" in _text(site / "index.html")
    for page in site.rglob("*.html"):
        text = re.sub(r"<pre>.*?</pre>", "", _text(page), flags=re.DOTALL)
        assert not re.search(r"^- ", text, re.MULTILINE), page


def test_the_site_loads_nothing_from_elsewhere(site):
    files = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(files) > 40
    assert {str(f.relative_to(site)): hit for f in files if (hit := LOADS.findall(_text(f)))} == {}


def test_what_is_loaded_from_elsewhere_is_found():
    for text in (
        '<script src="https://example.com/a.js">',
        '<link rel="stylesheet" href="//example.com/a.css" />',
        "a { src: url('https://example.com/a.woff') }",
        '@import "https://example.com/a.css";',
    ):
        assert LOADS.search(text), text
    assert not LOADS.search('<a href="https://example.com">; <script src="js/theme.js">')


def test_a_strict_build_names_what_is_wrong(copy):
    (copy / "docs" / "orphan.md").write_text("# In no menu\n")
    links = {
        "no.md": "a page that is not there",
        "../README.md": "a file outside that is not brought in",
        "how-to/serve.md#gone": "a heading that is not there",
        "#nowhere": "one of the same page",
        "/absolute.md": "a link that depends on where the site lies",
        "how-to/": "a folder",
    }
    with (copy / "docs" / "log.md").open("a") as page:
        page.writelines(f"\n[{what}]({link})\n" for link, what in links.items())
    with (copy / "CONTRIBUTING.md").open("a") as page:
        page.write("\n[a name that docs/ has as well](README.md)\n")
    with (copy / "mkdocs.yml").open("a") as config:
        config.write("  - missing.md\n")
    done = build(copy / "mkdocs.yml", copy / "site")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    report = "\n".join(line for line in lines if not line.startswith("INFO"))  # warnings
    named = (f"{link.rstrip('/')}'" for link in links)
    lost = [name for name in (*named, "- orphan.md", "'missing.md'") if name not in report]
    assert lost == [], report
    assert 'not included in the "nav"' in report
    assert "'CONTRIBUTING.md' contains a link '../README.md'" in report


def test_the_command_of_the_makefile_is_the_one_tested():
    # With --quiet as well, mkdocs 1.6 does not count its own warnings: --strict passes anything.
    assert "\t$(BIN)/python -m mkdocs build --strict\n" in _text(ROOT / "Makefile")


def test_one_broken_link_fails_the_build(copy):
    with (copy / "docs" / "log.md").open("a") as page:
        page.write("\n[nowhere](no.md)\n")
    done = build(copy / "mkdocs.yml", copy / "site")
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if "WARNING" in line] == [
        "WARNING -  Doc file 'log.md' contains a link 'no.md', but the target is not found among"
        " documentation files."
    ]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
