"""Replaces a small file atomically: after a power cut either the old or the new content exists, whole."""

import os
from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Write ``data`` to a temporary file beside ``path``, sync it, rename it over ``path``, sync the directory.

    Blocks. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
