"""Sphinx's configuration for `make docs`: a site of the pages that GitHub shows.

The source folder is the repository, so that a relative link means the same on GitHub and in the site: to a page, to
a picture, or to a file, of which the site gets a copy. `make docs` turns warnings into errors: a link whose page or
anchor does not exist, and a page that ``CONTENTS`` does not list.
"""

import sys
from pathlib import Path
from typing import Any

from pygments.lexers.special import TextLexer

project = "TriMQ"
html_title = "TriMQ"
extensions = ["myst_parser"]
root_doc = "docs/README"
include_patterns = ["*.md", "bench/*.md", "changelog.d/README.md", "docs/**.md"]
# Folders that Sphinx need not search for pages.
exclude_patterns = [".*", "build", "data", "dist", "native", "tests", "trimq"]
highlight_language = "text"  # of blocks that name no language
html_theme = "furo"
html_extra_path = ["index.html"]
html_use_index = False
html_copy_source = False
html_show_copyright = False
myst_heading_anchors = 4  # GitHub's anchors, down to ####

CONTENTS = {
    "Start": ["README"],
    "Python SDK": [
        "docs/sdk/README",
        "docs/sdk/produce",
        "docs/sdk/consume",
        "docs/sdk/order",
        "docs/sdk/transactions",
        "docs/sdk/request-reply",
        "docs/sdk/tracing",
        "docs/sdk/performance",
        "docs/sdk/logging",
        "docs/sdk/testing",
        "docs/sdk/migrating-*",
    ],
    "Operate": ["docs/operate", "docs/security", "docs/threat-model", "docs/bucket-costs", "docs/fault-model"],
    "Spark": ["docs/pipeline", "docs/pipeline-jobs"],
    "Formats": ["docs/formats/*"],
    "Codes, properties, expressions": ["docs/codes", "docs/properties", "docs/sql92"],
    "Performance": ["docs/performance", "bench/REPORT"],
    "Decisions": ["docs/decisions/*"],
    "Develop": [
        "docs/architecture",
        "docs/add-a-request-code",
        "docs/add-a-check",
        "CONTRIBUTING",
        "SECURITY",
        "CHANGELOG",
        "changelog.d/README",
    ],
}
"""Headings of the sidebar, and the pages under each.

A name with an asterisk stands for every page that it fits, README first.
"""

ROOT = Path(__file__).resolve().parents[2]


def pages(name: str) -> list[str]:
    """The pages that a name of ``CONTENTS`` stands for."""
    if "*" not in name:
        return [name]
    found = [path.relative_to(ROOT).with_suffix("").as_posix() for path in ROOT.glob(f"{name}.md")]
    return sorted(found, key=lambda page: (not page.endswith("/README"), page))


def refuse_network(event: str, _arguments: tuple[Any, ...]) -> None:
    """Makes a build that opens a connection fail on every machine, not only on one without a network."""
    if event in {"socket.connect", "socket.getaddrinfo", "socket.gethostbyname"}:
        raise PermissionError(f"the site is built without a network: {event}")


sys.addaudithook(refuse_network)


def add_contents(_app: Any, name: str, source: list[str]) -> None:
    """Adds the sidebar to the first page. GitHub would show such a block as text, so it is not in the file."""
    if name == root_doc:
        for caption, names in CONTENTS.items():
            listed = "\n".join(f"/{page}" for name in names for page in pages(name))
            source[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listed}\n```\n"


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_contents)
    app.add_lexer("hex", TextLexer)  # the examples of docs/formats/
