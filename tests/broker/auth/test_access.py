"""The replies to requests that are not let through, on a running broker: every row of the facts' table."""

import json
from pathlib import Path

import pytest

from tests.broker.auth.signed import ROOT, ROOT_SECRET, User, closed_broker, is_refused, signed
from tests.broker.wire_client import WireClient, send_ext


async def test_first(tmp_path: Path) -> None:
    async with closed_broker(tmp_path) as (broker, root):
        reply = await root.ask(3005)
        assert reply.code == 0, reply.remark
        assert json.loads(reply.body) == [{"userStatus": "enable", "userType": "Super", "username": "root"}]
        reply = await root.client.ask(3005)
        assert (reply.code, reply.remark) == (16, "username cannot be null.")
        app = await root.make("app", "Topic:T Pub")
        reply = await app.ask(310, send_ext("T"), b"hello")
        assert reply.code == 0, reply.remark
        reply = await app.ask(310, send_ext("U"), b"hello")
        assert (reply.code, reply.remark) == (
            16, "User:app has no permission to access Topic:U from 127.0.0.1, no matched policies."
        )
