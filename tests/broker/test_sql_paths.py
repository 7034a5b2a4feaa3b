"""Expressions over mixed traffic: the fast paths and the native extension deliver what the full path does.

Special messages are among the ordinary ones: halves, delayed ones, batches, and properties that are damaged or stored
twice. Each pull is compared in both brokers, and with the expression's own result for each stored message.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import trio
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.broker.fast_paths import fast_paths
from tests.broker.raw_client import Raw, json_frame
from tests.broker.test_send_native import only_python, send_frame
from tests.broker.test_sql_filters import sql_consumer
from tests.broker.test_transaction_mixed import TOPIC, brokers
from tests.broker.transactions import Life
from tests.broker.wire_client import consumer, pull_ext
from trimq.broker.processors.pull.pull_reply import SUBSCRIPTION_FORBIDDEN
from trimq.protocol.batch import encode_batch
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.frame import decode
from trimq.protocol.message import decode_messages
from trimq.protocol.sql92 import compile_expression
from trimq.protocol.sysflag import PULL_SUBSCRIPTION

EXAMPLES = max(8, settings().max_examples // 20)
"""Fewer examples than other tests: each of them starts two brokers."""

NAMES = ["n", "color", "TAGS", "KEYS", "rare"]
VALUES = ["2", "3", "-1", "4.5", "many", "red", "blau", "grün", "a", "k1 k2", "99999999999999999999", "yes"]
PROPERTIES = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(VALUES), max_size=5)
KINDS = st.sampled_from(["plain", "plain", "plain", "old", "binary", "half", "delayed", "batch", "twice", "damaged"])
MESSAGES = st.lists(st.tuples(KINDS, PROPERTIES, st.sampled_from([0, 20, 3000])), min_size=1, max_size=60)

TERMS = st.sampled_from(
    [
        "n > 2",
        "n BETWEEN 2 AND 5",
        "n NOT BETWEEN 3 AND 2147483648",
        "color IN ('red', 'blau')",
        "color IS NULL",
        "color CONTAINS 'r'",
        "color NOT STARTSWITH 'g'",
        "TAGS = 'a'",
        "TAGS <> color",
        "n < rare",
        "rare = 'yes'",
        "KEYS ENDSWITH 'k2'",
        "UNIQ_KEY IS NOT NULL",
        "TRUE",
        "-(n > 2) BETWEEN 1 AND n",
    ]
)
EXPRESSIONS = st.recursive(
    TERMS,
    lambda inner: st.one_of(
        st.builds("({} AND {})".format, inner, inner),
        st.builds("({} OR {})".format, inner, inner),
        st.builds("NOT ({})".format, inner),
        st.builds("(({}) = ({}))".format, inner, inner),
    ),
    max_leaves=5,
)


def frame_of(kind: str, number: int, wanted: dict[str, str], size: int) -> bytes:
    """A send to queue 0; the fields do not depend on the path."""
    usual = {"UNIQ_KEY": f"7F{number:030X}", "WAIT": "true"} | wanted
    more: dict[str, Any] = {"queue_id": 0, "body": bytes(size) + b"%d" % number}
    match kind:
        case "old":
            return send_frame(number, usual, v1=True, **more)
        case "binary":
            return send_frame(number, usual, binary=True, **more)
        case "half":
            return send_frame(number, usual | {"TRAN_MSG": "true", "PGROUP": "P"}, sys_flag=4, **more)
        case "delayed":
            return send_frame(number, usual | {"DELAY": "1"}, **more)
        case "batch":
            text = "".join(f"{name}\x01{value}\x02" for name, value in usual.items()).encode()
            body = encode_batch([(0, b"b%d" % number, text), (0, b"", b"n\x013\x02"), (0, b"c", b"")])
            return send_frame(number, {}, **more | {"body": body}, code=RequestCode.SEND_BATCH_MESSAGE, batch="true")
        case "twice":
            once = "".join(f"{name}\x01{value}\x02" for name, value in (usual | {"n": "3"}).items())
            return send_frame(number, once + "n\x01\x02color\x01red", **more)
        case "damaged":
            return send_frame(number, "n\x013\x02color\x02\x01red\x02KEYS", **more)
    return send_frame(number, usual, **more)


async def walk(
    raw: Raw, fields: dict[str, Any], *, fast: bool
) -> list[tuple[int, dict[str, str], list[tuple[int, bytes]]]]:
    """Read queue 0 as a consumer does: code, fields, and offsets and bodies of the messages of each reply."""
    found = []
    offset, end = 0, 1
    while offset < end:
        reply = decode(memoryview(await raw.ask(json_frame(11, fields | {"queueOffset": str(offset)}, fast=fast)))[4:])
        assert reply.code in (ResponseCode.SUCCESS, ResponseCode.PULL_RETRY_IMMEDIATELY), reply.remark
        ext = reply.ext_fields()
        messages = [(message.queue_offset, message.body) for message in decode_messages(bytes(reply.body))]
        found.append((reply.code, ext, messages))
        following, end = int(ext["nextBeginOffset"]), int(ext["maxOffset"])
        assert following > offset, "a consumer would stay here"
        offset = following
    return found


async def forbidden(life: Life, raw: Raw, group: str, fields: dict[str, Any], *, fast: bool) -> list[Any]:
    """Forbid the group to read; the replies to pulls by its heartbeat and by request. Then allow it again."""
    ext = {"group": group, "topic": TOPIC}
    assert (await life.client.ask(RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN, ext | {"readable": "false"})).code == 0
    found = []
    by_request = fields | {"sysFlag": str(PULL_SUBSCRIPTION), "subscription": "*", "expressionType": "TAG"}
    for each in (fields, fields, by_request):
        reply = decode(memoryview(await raw.ask(json_frame(11, each, fast=fast)))[4:])
        found.append((reply.code, reply.ext_fields(), bool(reply.body)))
    refused = (ResponseCode.NO_PERMISSION, {"forbiddenType": str(SUBSCRIPTION_FORBIDDEN)}, False)
    # As in RocketMQ, only those who read by their heartbeat are refused.
    assert found[:2] == [refused, refused]
    assert found[2][0] == ResponseCode.SUCCESS
    assert (await life.client.ask(RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN, ext | {"readable": "true"})).code == 0
    return found


async def answers(
    life: Life, frames: list[bytes], expressions: list[str], count: int, forbid: Sequence[bool], *, fast: bool
) -> list[Any]:
    """Send all in one write; then what consumers of each expression, and of all tags, get.

    By request and by heartbeat; if ``forbid`` says so for the expression (the last one is for the tags), the group is
    forbidden to read after that, and reads again when it is allowed.
    """
    await life.client.stream.send_all(b"".join(frames))
    codes = [(await life.client.reply(1000 + at)).code for at in range(len(frames))]
    assert set(codes) == {0}
    groups = {text: f"G{number}" for number, text in enumerate(expressions)}
    consumers = [sql_consumer(group, (TOPIC, text)) for text, group in groups.items()]
    await life.client.heartbeat("c", consumers=[*consumers, consumer("Tags", TOPIC)])
    stored = {message.queue_offset: message.properties for message in await life.stored(TOPIC, [0])}
    if not stored:
        return []
    found: list[Any] = []
    async with await trio.open_tcp_stream(*life.broker.endpoint) as stream:
        raw = Raw(stream)
        for (text, group), forbids in zip([*groups.items(), (None, "Tags")], forbid, strict=True):
            kind = {"expressionType": "TAG" if text is None else "SQL92"}
            ext = pull_ext(TOPIC, 0, group=group, maxMsgNums=count, subVersion=1, **kind)
            by_request = ext | {"sysFlag": PULL_SUBSCRIPTION, "subscription": text or "*"}
            by_heartbeat = {
                name: str(value) for name, value in (ext | {"sysFlag": 0}).items() if name != "subscription"
            }
            expected = list(stored)
            if text is not None:
                matches = compile_expression(text).matches
                expected = [offset for offset, properties in stored.items() if matches(properties)]
            walks: list[dict[str, Any]] = [by_request, by_heartbeat, *[by_heartbeat] * forbids]
            for at, fields in enumerate(walks):
                if at == 2:
                    found.append(await forbidden(life, raw, group, by_heartbeat | {"queueOffset": "0"}, fast=fast))
                replies = await walk(raw, {name: str(value) for name, value in fields.items()}, fast=fast)
                assert [offset for _, _, messages in replies for offset, _ in messages] == expected, text
                found.append(replies)
    return found


@pytest.mark.parametrize(("flush", "native"), [("ASYNC_FLUSH", True), ("ASYNC_FLUSH", False), ("SYNC_FLUSH", True)])
@given(
    messages=MESSAGES,
    expressions=st.lists(EXPRESSIONS, min_size=1, max_size=4, unique=True),
    count=st.integers(1, 32),
    forbid=st.lists(st.booleans(), min_size=5, max_size=5),
)
@example(messages=[("plain", {"n": "3"}, 20)] * 8, expressions=["n > 2"], count=3, forbid=[True] * 5)
@settings(max_examples=EXAMPLES, deadline=None)
def test_all_paths_deliver_the_same(
    flush: str,
    native: bool,
    messages: list[tuple[str, dict[str, str], int]],
    expressions: list[str],
    count: int,
    forbid: list[bool],
) -> None:
    forbid = forbid[: len(expressions) + 1]
    frames = [frame_of(kind, 1000 + at, wanted, size) for at, (kind, wanted, size) in enumerate(messages)]

    async def both() -> None:
        async with brokers({"flushDiskType": flush, "enablePropertyFilter": True}) as (fast, full):
            if not native:
                for table in {connection.table for connection in fast.broker.reactor.connections.values()}:
                    only_python(table)
            taken = fast_paths(fast.broker)
            one = await answers(fast, frames, expressions, count, forbid, fast=True)
            assert one == await answers(full, frames, expressions, count, forbid, fast=False)
            assert not fast_paths(full.broker)
            if sum(kind == "plain" for kind, _, _ in messages) > 2:
                assert taken, "a fast path has served nothing: the test compares nothing"

    trio.run(both)
