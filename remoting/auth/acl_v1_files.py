"""Reads the files of RocketMQ 4's access control: conf/plain_acl.yml, and the files of conf/acl.

PyYAML is in the extra ``security``, and imported when a file is read.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from trimq.protocol.auth.migrate import Migration, migrate

MOST_FILES: Final = 1000
MOST_BYTES: Final = 16 * 1024 * 1024
"""Of one file."""


class AclFilesError(Exception):
    """The files cannot be read. The text says why, and has no secret in it."""


def files_of(home: Path) -> list[Path]:
    """The files in a ROCKETMQ_HOME, in the order in which RocketMQ reads them. Blocks."""
    plain, directory = home / "conf" / "plain_acl.yml", home / "conf" / "acl"
    return [path for path in (plain, *files_in(directory)) if path.is_file()]


def files_in(directory: Path) -> list[Path]:
    """The files of a directory such as conf/acl and those below it, by name; none if it does not exist. Blocks."""
    return sorted(path for path in directory.rglob("*") if path.suffix in (".yml", ".yaml"))


def read_files(paths: list[Path]) -> Migration:
    """What the accounts in these files become. Blocks. Raises AclFilesError."""
    if len(paths) > MOST_FILES:
        raise AclFilesError(f"there are {len(paths)} files of accounts; {MOST_FILES} are read")
    return migrate(_documents(paths))


def _documents(paths: list[Path]) -> Iterator[tuple[str, Any]]:
    try:
        import yaml  # noqa: PLC0415 - only with a file to read
    except ImportError:
        raise AclFilesError("files of RocketMQ 4's access control need PyYAML: pip install trimq[security]") from None
    for path in paths:
        try:
            with path.open("rb") as file:
                data = file.read(MOST_BYTES + 1)
            if len(data) > MOST_BYTES:
                raise AclFilesError(f"{path} has more than {MOST_BYTES} bytes")
            # The base loader makes texts of all scalars, so a secret key of digits stays as it is written.
            yield str(path), yaml.load(data.decode(), Loader=yaml.BaseLoader)  # noqa: S506 - it makes no objects
        except OSError as error:
            raise AclFilesError(f"{path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise AclFilesError(f"{path} is not UTF-8 text") from None
        except (yaml.YAMLError, RecursionError) as error:
            mark = getattr(error, "problem_mark", None)
            where = f", line {mark.line + 1}" if mark is not None else ""
            # Without the text of the error: it quotes the file, in which there are secrets.
            raise AclFilesError(f"{path}{where}: not YAML") from None
