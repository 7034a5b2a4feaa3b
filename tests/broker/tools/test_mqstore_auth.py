"""``mqstore authkey`` and ``mqstore authrotate``."""

from pathlib import Path

import trio

from tests.broker.tools.test_mqstore import run
from tests.remoting.auth.stores import CANARY
from trimq.broker.services.auth_file import DiskAuthFile
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.store.disk.store_lock import StoreLock
from trimq.protocol.auth.model import UserChange
from trimq.remoting.auth.auth_store import AuthStore
from trimq.remoting.auth.secrets import Secrets, read_key_file


def store_in(directory: Path, secrets: Secrets) -> AuthStore:
    return AuthStore(DiskAuthFile(RealDisk(), str(directory)), secrets)


def test_passwords_in_clear_become_encrypted_and_keys_rotate(tmp_path: Path) -> None:
    root, key_file = tmp_path / "store", tmp_path / "auth.key"
    root.mkdir()
    path = root / "config" / "auth.json"
    trio.run(store_in(path.parent, Secrets(allow_clear=True)).create_user, "me", UserChange(CANARY))
    assert CANARY.encode() in path.read_bytes()

    done = run("authkey", key_file)
    assert done.exit_code == 0, done.output
    first = read_key_file(key_file).first_id
    assert done.stdout == f"{key_file}: key {first} encrypts from now on. Keep a copy outside this machine\n"
    assert not any(line in done.output for line in key_file.read_text().splitlines())

    refused = run("authrotate", root, "-k", key_file)
    assert refused.exit_code == 2
    assert "its secrets are in clear" in refused.stderr
    done = run("authrotate", root, "-k", key_file, "--allowSecretsInClear")
    assert done.stdout == f"{path}: 1 of 1 passwords were encrypted with key {first}\n"
    assert CANARY.encode() not in path.read_bytes()

    assert run("authkey", "--add", key_file).exit_code == 0
    second = read_key_file(key_file).first_id
    assert second != first
    done = run("authrotate", root, "--authKeyFile", key_file, "--authConfigPath", path.parent)
    assert done.stdout == f"{path}: 1 of 1 passwords were encrypted with key {second}\n"
    assert run("authrotate", root, "-k", key_file).stdout.startswith(f"{path}: 0 of 1 ")
    # Without the first key.
    key_file.write_text(key_file.read_text().splitlines()[0])
    store = store_in(path.parent, Secrets(read_key_file(key_file)))
    trio.run(store.load)
    assert store.users["me"].password == CANARY


def test_what_cannot_be_done_is_said(tmp_path: Path) -> None:
    root, key_file = tmp_path / "store", tmp_path / "auth.key"
    assert "cannot be read: No such file" in run("authkey", "--add", key_file).stderr
    assert "cannot be read: No such file" in run("authrotate", root, "-k", key_file).stderr
    run("authkey", key_file)
    again = run("authkey", key_file)
    assert again.exit_code == 2
    assert "exists already" in again.stderr
    assert "there is no directory" in run("authrotate", root, "-k", key_file).stderr
    root.mkdir()
    lock = StoreLock.acquire(RealDisk(), str(root))
    try:
        refused = run("authrotate", root, "-k", key_file)
    finally:
        lock.release()
    assert refused.exit_code == 2
    assert "mqstore: " in refused.stderr
