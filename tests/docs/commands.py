"""The shell commands of pages: blocks that start with ```sh and a name (without a name: the page's only block)."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {
    "operate": ROOT / "docs" / "operate.md",
    "readme": ROOT / "README.md",
    "security": ROOT / "docs" / "security.md",
}
_BLOCK = re.compile(r"^```sh *(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> dict[str, str]:
    """A page's blocks by name."""
    return {f"{page} {name}".strip(): text for name, text in _BLOCK.findall(PAGES[page].read_text(encoding="utf-8"))}


ALL = {name: text for page in PAGES for name, text in blocks(page).items()}

RUN_IN: dict[str, str] = {
    "operate shell": "tests/docs/test_operate.py",
    "operate backup": "tests/docs/test_operate.py",
    "operate restore": "tests/docs/test_operate.py",
    "operate move": "tests/docs/test_operate.py",
    "operate tier": "tests/docs/test_operate.py",
    "operate bucket": "tests/interop/test_bucket_tools.py",
    "operate bucket_restore": "tests/interop/test_bucket_tools.py",
    "operate switch": "tests/docs/test_operate.py",
    "operate docker": "tests/docker/test_single.py",
    "readme": "tests/docker/test_single.py",
    "readme first": "tests/interop/test_readme.py",
    "operate systemd": "tests/docker/test_systemd.py",
    "operate systemd_upgrade": "tests/docker/test_systemd.py",
    "operate upgrade": "tests/docker/test_cluster.py",
    "operate pipeline": "tests/docker/test_cluster.py",
    "operate replicated": "tests/docker/test_replicated.py",
    "operate ha": "tests/docker/test_ha.py",
    "operate tiered_docker": "tests/docker/test_tiered.py",
    "security certificates": "tests/docs/test_security.py",
    "security mqadmin": "tests/docs/test_security.py",
    "security copyauth": "tests/docs/test_security.py",
    "security docker": "tests/docker/test_users.py",
    "security admin_port": "tests/broker/test_admin_port.py",
}
"""Block to the tests that run it."""
