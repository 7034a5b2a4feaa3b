"""Topics that a request does not name, those in which a group has offsets; and a group that would be made."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.broker.auth.signed import User, closed_broker, is_refused
from tests.broker.wire_client import WireClient, pull_ext, send_ext
from trimq.broker.controller import BrokerController
from trimq.broker.processors.common import require_topics
from trimq.broker.testing import running_broker
from trimq.protocol.auth.rules import GET
from trimq.protocol.command import RemotingCommand
from trimq.protocol.json_pieces import BATCH
from trimq.remoting.auth.permit import OPEN

CLONE = {"srcGroup": "S", "destGroup": "D", "topic": "", "offline": "true"}
READER = ("Topic:* Get", "Group:S Get")
COPIER = ("Topic:* Update", "Group:S Get", "Group:D Update")
RETRY = "%RETRY%S"


async def committed(broker: BrokerController, root: User, *topics: str) -> None:
    """The group S has read one message in each topic, and one in its retry topic."""
    for topic in topics:
        assert (await root.ask(310, send_ext(topic), b"m")).code == 0
        assert (await root.ask(11, pull_ext(topic, group="S", sysFlag=5, commitOffset=1))).code == 0
    retry = {"topic": RETRY, "defaultTopic": "TBW102", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
    assert (await root.ask(17, retry | {"topicFilterType": "SINGLE_TAG"})).code == 0
    broker.context.store.create_queues(RETRY, 1)
    commit = {"consumerGroup": "S", "topic": RETRY, "queueId": 0, "commitOffset": 0}
    reply = await root.ask(15, commit)
    assert reply.code == 0, reply.remark


async def test_a_deny_of_one_topic_counts_for_a_copy_of_all(tmp_path: Path) -> None:
    # guards the offsets in that topic: a group that had 0 read could skip its messages
    async with closed_broker(tmp_path) as (broker, root):
        await committed(broker, root, "Plain", "Secret", "Gone")
        op = await root.make("op", *COPIER, "Deny Topic:Secret Update", "Deny Topic:Gone Update")
        offsets = broker.context.offsets
        assert (await root.ask(215, {"topic": "Gone"})).code == 0
        for topic in ("Secret", ""):
            reply = await op.ask(314, CLONE | {"topic": topic})
            text = "User:op has no permission to access Topic:Secret from 127.0.0.1, the decision is deny."
            assert (is_refused(reply), reply.remark) == (True, text)
            assert offsets.topics_of("D") == set(), "not even those that sort before it"
        refused = broker.context.users.access.refused["authorization"] if broker.context.users else 0
        assert refused == 2
        assert (await op.ask(314, CLONE | {"topic": "Plain"})).code == 0
        assert offsets.topics_of("D") == {"Plain"}
        assert (await root.ask(314, CLONE)).code == 0
        assert offsets.topics_of("D") == {"Plain", "Secret", RETRY}


@pytest.mark.parametrize(("source", "retry"), [("Group:S Get", set()), ("Group:S Get|Update", {RETRY})])
async def test_all_offsets_of_a_group_are_copied_if_all_its_topics_are_permitted(
    tmp_path: Path, source: str, retry: set[str]
) -> None:
    """Those in the retry topic are of the source group: to copy them needs Update of it, with a name and without."""
    async with closed_broker(tmp_path) as (broker, root):
        await committed(broker, root, "Plain", "Other")
        op = await root.make("op", "Topic:* Update", "Group:D Update", source)
        assert is_refused(await op.ask(314, CLONE | {"topic": RETRY})) is not bool(retry)
        assert (await op.ask(314, CLONE)).code == 0
        assert broker.context.offsets.topics_of("D") == {"Plain", "Other"} | retry


async def test_a_deny_of_one_topic_counts_for_the_progress_in_all(tmp_path: Path) -> None:
    # guards the ends of its queues
    async with closed_broker(tmp_path) as (broker, root):
        await committed(broker, root, "Plain", "Secret")
        app = await root.make("app", *READER, "Deny Topic:Secret Get")
        for ext in ({"topic": "Secret"}, {"topicList": "Plain;Secret"}, {}):
            reply = await app.ask(208, {"consumerGroup": "S"} | ext)
            assert (is_refused(reply), len(reply.body)) == (True, 0)
            assert "Topic:Secret" in (reply.remark or "")
        assert b"Plain" in bytes((await app.ask(208, {"consumerGroup": "S", "topic": "Plain"})).body)
        reader = await root.make("reader", *READER)
        for user in (reader, root):
            found = bytes((await user.ask(208, {"consumerGroup": "S"})).body)
            assert all(name in found for name in (b"Plain", b"Secret", RETRY.encode()))


@pytest.mark.parametrize(
    ("entries", "makes"),
    [
        (("Group:* Get",), False),
        (("Group:* Get|Update|List|Delete",), False),
        (("Group:* Get|Sub", "Deny Group:New Sub"), False),
        (("Group:* Get|Sub",), True),
        (("Group:* Get", "Group:New Create"), True),
    ],
    ids=str,
)
async def test_who_may_only_read_makes_no_group(tmp_path: Path, entries: tuple[str, ...], makes: bool) -> None:
    # guards maxOffsetGroups
    async with closed_broker(tmp_path) as (broker, root):
        app = await root.make("app", *entries)
        groups = broker.context.groups.table
        before = len(groups)
        reply = await app.ask(352, {"group": "New"})
        assert reply.code == (0 if makes else 26)
        assert makes or reply.remark == "the consumer group New does not exist on this broker"
        assert len(groups) == before + makes
        assert (await root.ask(352, {"group": "New"})).code == 0
        assert (await app.ask(352, {"group": "New"})).code == 0, "a group that is there"
        assert len(groups) == before + 1


@pytest.mark.parametrize("changes", [{"authorizationEnabled": False}, {"authorizationWhitelist": "352"}], ids=str)
async def test_where_no_policy_counts_a_group_is_made(tmp_path: Path, changes: dict[str, Any]) -> None:
    async with closed_broker(tmp_path, **changes) as (_, root):
        app = await root.make("app")
        reply = await app.ask(352, {"group": "New"})
        assert msgspec.json.decode(reply.body)["groupName"] == "New"


async def test_without_access_control_a_group_is_made(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "store") as broker, WireClient.connect(broker.endpoint) as client:
        assert (await client.ask(352, {"group": "New"})).code == 0
        assert "New" in broker.context.groups.table
        assert (await client.ask(352, {"group": " "})).code == 26


async def test_many_topics_are_checked_in_slices() -> None:
    await require_topics(OPEN, None, RemotingCommand(208), ["T"] * (BATCH + 1), GET)  # type: ignore[arg-type]
