"""``mqstore authkey`` and ``mqstore authrotate``: the keys that encrypt the passwords of users."""

from pathlib import Path

import click

from trimq.broker.tools import command_parts as parts
from trimq.broker.tools.offline_store import NotUsableError, locked

_key_file = click.argument("key_file", type=click.Path(path_type=Path, dir_okay=False))


@click.command()
@_key_file
@click.option("--add", is_flag=True, help="Put a new key in front of those of an existing file.")
def authkey(key_file: Path, add: bool) -> None:
    """Make a key file (authKeyFile), which only its owner may read. Nothing of the key is printed.

    With --add, the next start encrypts all passwords with the new key, and so does `mqstore authrotate`. After that the
    old key can be removed from the file: with it, only copies of the old state can be read.
    """
    from trimq.remoting.auth.secrets import SecretsError, add_key, make_key_file  # noqa: PLC0415 - see authrotate

    try:
        key_id = (add_key if add else make_key_file)(key_file.absolute())
    except SecretsError as error:
        parts.fail(str(error))
    click.echo(f"{key_file}: key {key_id} encrypts from now on. Keep a copy outside this machine")


@click.command()
@click.argument("store", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "-k", "--authKeyFile", "key_file", required=True, type=click.Path(path_type=Path, dir_okay=False), metavar="FILE"
)
@click.option(
    "--authConfigPath", "directory", type=click.Path(path_type=Path, file_okay=False), help="Default: STORE/config."
)
@click.option("--allowSecretsInClear", "allow_clear", is_flag=True, help="Also encrypt passwords stored in clear.")
def authrotate(store: Path, key_file: Path, directory: Path | None, allow_clear: bool) -> None:
    """Encrypt the passwords of all users with the first key of the key file. The broker must be stopped."""
    import trio  # noqa: PLC0415 - the other commands need no event loop

    from trimq.broker.services.auth_file import DiskAuthFile  # noqa: PLC0415 - as above
    from trimq.broker.store.disk.real_disk import RealDisk  # noqa: PLC0415 - as above
    from trimq.remoting.auth.auth_store import AuthStore, AuthStoreError  # noqa: PLC0415 - as above
    from trimq.remoting.auth.secrets import Secrets, SecretsError, read_key_file  # noqa: PLC0415 - as above

    try:
        keys = read_key_file(key_file.absolute())
        with locked(store.absolute()):
            file = DiskAuthFile(RealDisk(), str((directory or store / "config").absolute()))
            auth = AuthStore(file, Secrets(keys, allow_clear=allow_clear))
            changed = trio.run(auth.load)
    except (AuthStoreError, SecretsError, NotUsableError, OSError) as error:
        parts.fail(str(error))
    click.echo(f"{file.path}: {changed} of {len(auth.users)} passwords were encrypted with key {keys.first_id}")
