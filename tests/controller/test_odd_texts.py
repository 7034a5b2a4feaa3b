"""Half surrogate pairs in any field of a request to a controller: it answers, and others are served as before."""

from functools import partial
from pathlib import Path

from tests.broker.auth.signed import signed
from tests.controller.server import running
from tests.remoting.auth.user_files import following, key_file, writer
from tests.remoting.fuzz.odd_texts import by, outlives
from trimq.protocol.auth.model import User, UserType
from trimq.protocol.codes import RequestCode

ROOT = User("root", "root canary-42", UserType.SUPER)
NORMAL = User("normal", "normal canary-42")
INFO = RequestCode.CONTROLLER_GET_METADATA_INFO


async def test_without_access_control(tmp_path: Path) -> None:
    async with running(tmp_path) as server:
        address = server.controller.address
        assert address is not None
        assert await outlives(address, partial(server.wire.ask, INFO)) > 1000
        assert (await server.wire.ask(INFO)).code == 0


async def test_a_user_without_policies(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    await writer(tmp_path / "config", keys, ROOT, NORMAL)
    config = following(tmp_path / "config", keys) | {"allowAdminOverPlain": "true"}
    async with running(tmp_path, sqlite=False, **config) as server:
        address = server.controller.address
        assert address is not None
        ask = partial(server.wire.ask, INFO, signed({}, b"", ROOT.username, ROOT.password, 479))
        assert await outlives(address, ask, by(NORMAL.username, NORMAL.password)) > 1000
        assert (await ask()).code == 0
