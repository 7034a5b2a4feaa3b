"""The files of this checkout, and a copy of it. Works without .git too, as in an exported tree."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_MADE = ("__pycache__", "node_modules", "target", "build", "dist", "data", "wheels")


def files() -> list[str]:
    """Paths relative to the root, including links, without files that git ignores."""
    words = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        names = [name for name in listed.stdout.split("\0") if name]
    else:
        names = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if not path.is_dir() or path.is_symlink()]
        names = [name for name in names if not set(Path(name).parts) & {*_MADE} and not _hidden(name)]
    return sorted(name for name in names if (ROOT / name).is_symlink() or (ROOT / name).is_file())


def _hidden(name: str) -> bool:
    parts = Path(name).parts
    return any(part.startswith(".venv") or part.endswith("_cache") or part in {".git", ".hypothesis"} for part in parts)


def copied(target: Path) -> Path:
    """Copy the checkout to ``target``; links stay links."""
    for name in files():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target
