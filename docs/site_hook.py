"""What the site (mkdocs.yml) needs beyond docs/: pages from outside, all read as GitHub reads them.

It knows the layout of the repository and nothing of the pages' content. Its one idea: on the site a
file lies where it lies in the repository, but for the leading ``docs/``, so a link is moved by its
path alone. A link to anything else stays broken, and a strict build says so.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs/"
OUTSIDE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "deploy/README.md",
    "examples/README.md",
    "examples/curl.sh",
    "examples/langchain_chat.py",
    "examples/openai_chat.py",
)

FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\[[^\]]*\]\()([^)\s#]+)")
OTHER_SITE = re.compile(r"[a-z]+:|/")
# A list that follows its lead-in without an empty line: a list on GitHub, not in Python-Markdown.
LEAD_IN = re.compile(r"^((?!(?:[-*]|\d+\.) )\S.*)\n(?=(?:[-*]|\d+\.) )", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Headings get the anchors that they have on GitHub."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    return config


def slug(heading: str, separator: str) -> str:
    """The anchor of a heading, by the rule that docs/generate.py checks links with."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files that are not below docs/."""
    for path in OUTSIDE:
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page's text with links of the site and lists that are lists; code stays as it is."""
    return "".join(_parts(markdown, page.file.src_uri))


def _parts(markdown: str, uri: str) -> Iterator[str]:
    for part in FENCE.split(markdown):
        if part.startswith("```"):
            yield part
        else:
            moved = LINK.sub(lambda found: found[1] + site_link(found[2], uri), part)
            yield LEAD_IN.sub(r"\1\n\n", moved)


def site_link(link: str, uri: str) -> str:
    """A link of the repository, as the page at ``uri`` of the site must write it."""
    if OTHER_SITE.match(link):
        return link
    home = uri if uri in OUTSIDE else DOCS + uri
    there = posixpath.normpath(posixpath.join(posixpath.dirname(home), link))
    if there.startswith(DOCS) or there in OUTSIDE:
        target = there.removeprefix(DOCS)
    else:
        target = "../" + there  # not on the site: never to be mistaken for a page of that name
    return posixpath.relpath(target, posixpath.dirname(uri))
