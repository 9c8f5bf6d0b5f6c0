"""The site of docs/ builds without a warning and without a network, and holds what the documents hold."""

from __future__ import annotations

import html
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from documents import DOCUMENTS, ROOT, blocks
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from conformance.backend import contract, interface
from conformance.ggml.ops.build import Builder

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGES = ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers")
MANUAL = [p for p in sorted((ROOT / "docs").rglob("*.md")) if "measurements" not in p.parts]
PAGES, WORDS, README = 28, 20_000, 800
"""At most; the words go down with each page that is merged."""
LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]+))?\)")
LOCK = ROOT / "ci" / "site-requirements.txt"
needs_mkdocs = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in PACKAGES),
    reason="the group `site` of pyproject.toml is not installed: pip install -r ci/site-requirements.txt",
)
NO_NETWORK = """
import socket, sys, runpy
def refuse(*_): raise SystemExit("the build of the site asked for the network")
socket.socket.connect = socket.getaddrinfo = refuse
sys.argv[0] = "mkdocs"
runpy.run_module("mkdocs", run_name="__main__")
"""


class _Page(HTMLParser):
    """What a page loads when it opens, and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.text: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "link" and found.get("rel") in {"canonical", "prev", "next"}:
            return
        if tag in {"script", "link", "img", "iframe", "source"}:
            self.loads += [value for name in ("src", "href") if (value := found.get(name))]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site. A warning ends the build with an error, and so does a connection."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-c", NO_NETWORK, "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def _pages(site: Path) -> Iterator[tuple[str, Path]]:
    """Each document with its page."""
    for document in DOCUMENTS:
        page = "index.md" if document == "README.md" else document.removeprefix("docs/")
        yield document, site / Path(page).with_suffix(".html")


@needs_mkdocs
def test_every_document_is_a_page_with_all_of_its_code(site: Path) -> None:
    """Each fenced block stands on the page of its document as it is, and the backslash of a table's pipe is gone."""
    for document, path in _pages(site):
        text = "".join(_Page(path).text)
        for block in blocks(document):
            assert all(line.strip() in text for line in block.lines), f"{document}:{block.line}"
    assert "--level smoke|standard|full" in "".join(_Page(site / "index.html").text)


@needs_mkdocs
def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    """No font, script, style or picture has an address: the site reads without a network."""
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > len(DOCUMENTS)
    for path in pages:
        assert [x for x in _Page(path).loads if re.match(r"(https?:)?//", x)] == [], path.name
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", style.read_text(encoding="utf-8")), style.name


@needs_mkdocs
@pytest.mark.parametrize("module", [interface, contract])
def test_the_reference_has_the_public_names(site: Path, module: object) -> None:
    """Each public class and function of the backend contract stands there, with the first line of its docstring."""
    text = re.sub(r"\s+", " ", "".join(_Page(site / "reference" / "backend.html").text))
    mine = [x for name, x in vars(module).items() if not name.startswith("_") and callable(x)]
    mine = [x for x in mine if getattr(x, "__module__", "") == getattr(module, "__name__", None) and x.__doc__]
    assert mine
    for x in mine:
        assert x.__name__ in text
        assert html.unescape(re.split(r"[`.*<(:]", x.__doc__.strip())[0].strip())[:40] in text, x.__name__


@needs_mkdocs
def test_the_reference_has_every_constructor(site: Path) -> None:
    """`Builder` stands there with what it inherits topic by topic; the text names those without a docstring."""
    page = (site / "reference" / "case.html").read_text(encoding="utf-8")
    names = [name for name in dir(Builder) if not name.startswith("_")]
    assert "mul_mat" in names
    bare = [name for name in names if f'id="conformance.ggml.ops.build.Builder.{name}"' not in page]
    text = (ROOT / "docs" / "reference" / "case.md").read_text(encoding="utf-8")
    assert {re.sub("_(inplace|swapped|split)$", "", name) for name in bare} == set(
        re.findall(r"`([a-z]\w*)`", text)
    ) - {"ne"}


def test_the_lock_of_the_site_is_within_the_ranges() -> None:
    """What the workflow installs has hashes, and is what the group `site` of pyproject.toml asks for."""
    text = LOCK.read_text(encoding="utf-8")
    pinned = dict(re.findall(r"(?m)^([\w.-]+)==([^ ;]+)", text))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for requirement in map(Requirement, project["dependency-groups"]["site"]):
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)])
    assert len(re.findall(r"(?m)^[\w.-]+==", text)) == len(re.findall(r"(?m)^[\w.-]+==.*\\\n +--hash=sha256:", text))
    assert "://" not in text


def test_the_manual_is_short() -> None:
    """The pages that users read, measurements apart, are few and have few words."""
    assert len(MANUAL) <= PAGES
    assert sum(len(p.read_text(encoding="utf-8").split()) for p in MANUAL) <= WORDS
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= README


def test_links_lead_somewhere() -> None:
    """Each file that a page links to exists, and so does the heading."""
    wrong = []
    for page in (ROOT / d for d in DOCUMENTS):
        for file, anchor in LINK.findall(page.read_text(encoding="utf-8")):
            other = (page.parent / file).resolve() if file else page
            if not other.exists() or (anchor and other.suffix == ".md" and anchor not in _anchors(other)):
                wrong.append(f"{page.name}: {file}#{anchor}")
    assert wrong == []


def _anchors(page: Path) -> set[str]:
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))
    heads = (re.sub(r"[`*\[\]]|\([^)]*\)", "", h).strip().lower() for h in re.findall(r"(?m)^#+ (.*)", text))
    return {re.sub(r"[^\w\- ]", "", h).replace(" ", "-") for h in heads}
