"""Signed requests, made with the pure signature, and a broker that asks for them."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.broker.wire_client import WireClient
from tests.canary import CANARY, permit
from trimq.broker.controller import BrokerController
from trimq.broker.testing import running_broker
from trimq.protocol.auth.signature import ACCESS_KEY, SIGNATURE, sign
from trimq.protocol.codes import VERSION, ResponseCode
from trimq.protocol.command import RemotingCommand

ROOT, ROOT_SECRET = "root", "root secret canary-7f3a91"
SECRETS = {ROOT: ROOT_SECRET}
ON: dict[str, Any] = {
    "authenticationEnabled": True,
    "authorizationEnabled": True,
    "allowSecretsInClear": True,
    "allowAdminOverPlain": True,
    "initAuthenticationUser": json.dumps({"username": ROOT, "password": ROOT_SECRET}),
}


def secret_of(name: str) -> str:
    """The password of a user that ``User.make`` makes."""
    return f"{CANARY}secret of {name}"


def signed(ext: dict[str, Any] | None, body: bytes, name: str, secret: str, version: int = VERSION) -> dict[str, str]:
    """The ext fields with a user's name and signature."""
    fields = {key: str(value) for key, value in (ext or {}).items() if value is not None} | {ACCESS_KEY: name}
    return fields | {SIGNATURE: sign(secret, fields, body, version)}


class User:
    """A user on a connection."""

    def __init__(self, client: WireClient, name: str = ROOT, secret: str | None = None) -> None:
        self.client = client
        self.name = name
        self.secret = secret if secret is not None else SECRETS.get(name, secret_of(name))

    async def post(self, code: int, ext: dict[str, Any] | None = None, body: bytes = b"", **more: Any) -> int:
        return await self.client.post(code, signed(ext, body, self.name, self.secret), body, **more)

    async def ask(
        self, code: int, ext: dict[str, Any] | None = None, body: bytes = b"", **more: Any
    ) -> RemotingCommand:
        return await self.client.reply(await self.post(code, ext, body, **more))

    # for administrators

    async def make(self, name: str, *entries: str, kind: str = "Normal") -> "User":
        """Make a user whose policy has these entries, such as "Topic:T Pub|Sub" or "Deny Topic:T Pub"."""
        body = {"username": name, "password": secret_of(name), "userType": kind}
        reply = await self.ask(3001, {"username": name}, json.dumps(body).encode())
        assert reply.code == 0, reply.remark
        if entries:
            await self.grant(name, *entries)
        return User(self.client, name)

    async def grant(self, name: str, *entries: str, ips: list[str] | None = None) -> None:
        """Add entries to a user's policy."""
        reply = await self.ask(3006, {"subject": f"User:{name}"}, acl(name, *entries, ips=ips))
        assert reply.code == 0, reply.remark


def acl(name: str, *entries: str, ips: list[str] | None = None) -> bytes:
    """The body of 3006."""
    found = []
    for text in entries:
        decision, resource, actions = (["Allow", *text.split()] if text.count(" ") == 1 else text.split())[:3]
        entry: dict[str, Any] = {"resource": resource, "actions": actions.split("|"), "decision": decision}
        found.append(entry | ({"sourceIps": ips} if ips else {}))
    policies = [{"policyType": "Custom", "entries": found}]
    return json.dumps({"subject": f"User:{name}", "policies": policies}).encode()


def is_refused(reply: RemotingCommand) -> bool:
    return reply.code == ResponseCode.NO_PERMISSION


@asynccontextmanager
async def closed_broker(directory: Path, **changes: Any) -> AsyncIterator[tuple[BrokerController, User]]:
    """A broker with authentication and authorization, and its administrator."""
    if (ON | changes)["allowSecretsInClear"]:
        permit(directory / "store" / "config" / "auth.json*")
    async with (
        running_broker(directory / "store", **{**ON, **changes}) as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        yield broker, User(client)
