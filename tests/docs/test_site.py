"""`make docs` makes a site from the pages that loads nothing from other servers, and fails on a broken link."""

import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.docs.examples import PAGES, ROOT

SPHINX = ROOT / ".venv-docs" / "bin"
pytestmark = [pytest.mark.xdist_group("site"), pytest.mark.timeout(180, func_only=True)]
IN_SITE = [
    page for page in PAGES if "/" not in page or page.startswith(("docs/", "bench/")) or page == "changelog.d/README.md"
]
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)]*)?\)")
CODE = re.compile(r"^ *```.*?^ *```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def need_sphinx() -> None:
    if not (SPHINX.parent / ".stamp").exists():
        message = "the site's tools are not installed: make .venv-docs/.stamp"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `make docs` makes."""
    need_sphinx()
    made = tmp_path_factory.mktemp("docs") / "site"
    environment = {**os.environ, "MAKEFLAGS": "", "ARGS": ""}
    command = ["make", "-C", str(ROOT), "docs", f"SITE={made}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return made


class Loads(HTMLParser):
    """The addresses that a browser loads to show a page, and the page's styles."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        name = {"link": "href", "object": "data"}.get(tag, "src")
        if tag != "a" and (address := found.get(name)):
            self.addresses.append(address)
        self.texts += filter(None, [found.get("style")])

    def handle_data(self, data: str) -> None:
        self.texts.append(data if self.lasttag == "style" else "")


def loaded(path: Path) -> list[str]:
    """The addresses that a page or a style sheet makes the browser load."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".html":
        return styled(text)
    page = Loads()
    page.feed(text)
    return page.addresses + styled("\n".join(page.texts))


def styled(text: str) -> list[str]:
    return re.findall(r"""(?:url\(|@import)\s*["']?([^"')\s;]+)""", text)


def is_elsewhere(address: str) -> bool:
    return re.match(r"(?:[a-z]+:)?//", address) is not None


def test_every_page_is_in_the_site(site: Path) -> None:
    assert {"README.md", "docs/README.md", "docs/sdk/produce.md", "bench/REPORT.md"} <= set(IN_SITE)
    assert [page for page in IN_SITE if not (site / page).with_suffix(".html").is_file()] == []
    assert "url=docs/README.html" in (site / "index.html").read_text()
    assert '"docs/fault-model"' in (site / "searchindex.js").read_text()  # the search needs no server


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    addresses = {address for path in site.rglob("*") if path.suffix in {".html", ".css"} for address in loaded(path)}
    assert len(addresses) > 10
    assert {address for address in addresses if is_elsewhere(address)} == set()
    scripts = "\n".join(path.read_text(encoding="utf-8") for path in site.rglob("*.js"))
    assert re.findall(r"\b(?:fetch|import|importScripts|XMLHttpRequest)\(\s*[\"'`]?https?:", scripts) == []


def test_what_comes_from_elsewhere_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        '<link rel="stylesheet" href="https://a/x.css"><script src="//b/x.js"></script><img src="c.png">'
        '<a href="https://d/">d</a><style>@import "https://e/x.css"; p {background: url(https://f/x.png)}</style>'
    )
    assert [address for address in loaded(page) if is_elsewhere(address)] == [
        "https://a/x.css",
        "//b/x.js",
        "https://e/x.css",
        "https://f/x.png",
    ]


def test_a_build_that_uses_the_network_fails() -> None:
    need_sphinx()
    connect = "socket.create_connection(('127.0.0.1', 9), timeout=1)"
    code = f"import runpy, socket; runpy.run_path('docs/site/conf.py'); {connect}"
    done = subprocess.run([SPHINX / "python", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "PermissionError: the site is built without a network" in done.stderr


def test_what_a_link_does_not_find_fails_the_build(tmp_path: Path) -> None:
    need_sphinx()
    tree = tmp_path / "tree"
    for path in ("docs", "bench/plots", "changelog.d", "conf", "docker/monitoring"):
        shutil.copytree(ROOT / path, tree / path)
    for file in [*ROOT.glob("*.md"), ROOT / "bench" / "REPORT.md"]:
        shutil.copy(file, tree / file.relative_to(ROOT))
    with (tree / "docs" / "operate.md").open("a", encoding="utf-8") as page:
        page.write("\n[page](nosuch.md) [anchor](fault-model.md#nosuch) [here](#nosuch) [file](../conf/nosuch.conf)\n")
    (tree / "docs" / "unlisted.md").write_text("# Unlisted\n", encoding="utf-8")
    flags = ["-c", "docs/site", "--fail-on-warning", "--keep-going", "--quiet"]
    command = [str(SPHINX / "sphinx-build"), *flags, ".", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False, timeout=150)
    warnings = [line for line in done.stderr.splitlines() if "WARNING" in line]
    found = [re.search(r"'([^']*nosuch[^']*)'|(unlisted)\.md", line) for line in warnings]
    assert sorted(each[1] or each[2] for each in found if each) == [
        "../conf/nosuch.conf",
        "nosuch",
        "nosuch",
        "nosuch.md",
        "unlisted",
    ], done.stderr
    assert len(warnings) == 5
    assert done.returncode != 0


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    """The links of all pages are checked, including pages outside the site, without Sphinx."""
    text = CODE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    targets = [target for target in LINK.findall(text) if not re.match(r"[a-z]+:", target)]
    folder = (ROOT / page).parent
    assert [target for target in targets if not (folder / target).is_file()] == []
