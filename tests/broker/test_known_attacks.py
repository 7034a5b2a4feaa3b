"""Requests that have made RocketMQ's servers do what they should not. docs/threat-model.md names them by their CVE."""

import json
import re
from pathlib import Path

import pytest

from tests.broker.wire_client import WireClient, consumer, pull_ext, send_ext
from trimq.broker.config import SCHEMA
from trimq.broker.controller import BrokerController
from trimq.broker.testing import running_broker
from trimq.controller.config import SCHEMA as CONTROLLER_SCHEMA
from trimq.namesrv.config import SCHEMA as NAMESRV_SCHEMA
from trimq.protocol.batch import encode_batch
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.remoting.config import properties
from trimq.remoting.config.configuration import Schema
from trimq.remoting.config.options import options_of

ROOT = Path(__file__).resolve().parents[2]
PATHS = ["../../evil", "a/../../evil", "/evil", "a\\evil", "evil\0", "%RETRY%../../evil", "%DLQ%../../evil"]
SENDS = (RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)
SERVERS = {"mqbroker": SCHEMA, "mqnamesrv": NAMESRV_SCHEMA, "mqcontroller": CONTROLLER_SCHEMA}


def files_in(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*")}


@pytest.mark.parametrize("name", PATHS)
async def test_names_that_are_paths_make_no_files(
    tmp_path: Path, broker: BrokerController, client: WireClient, name: str
) -> None:
    """CVE-2019-17572: a send to such a topic made directories outside the store."""
    assert (await client.send("Orders")).code == 0
    known = files_in(tmp_path.parent)
    for code in SENDS:
        is_batch = code == RequestCode.SEND_BATCH_MESSAGE
        ext = send_ext(name, v1=code == RequestCode.SEND_MESSAGE, batch="true" if is_batch else None)
        body = encode_batch([(0, b"x", b"")]) if is_batch else b"x"
        assert (await client.ask(code, ext, body)).code != 0
    topic = {"topic": name, "defaultTopic": "TBW102", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
    topic |= {"topicFilterType": "SINGLE_TAG"}
    assert (await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, topic)).code != 0
    group = json.dumps({"groupName": name}).encode()
    assert (await client.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None, group)).code != 0
    await client.heartbeat("me", consumers=[consumer(name, name)], producers=[name])
    assert (await client.ask(RequestCode.PULL_MESSAGE, pull_ext(name, group=name))).code != 0
    offset = {"consumerGroup": name, "topic": name, "queueId": 0, "commitOffset": 1}
    await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, offset)
    await client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": name})
    await client.ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": name})
    made = files_in(tmp_path.parent) - known
    assert [path for path in made if "evil" in str(path) or path.parts[:2] != (tmp_path.name, "store")] == []
    assert (await client.send("Orders")).code == 0


@pytest.mark.parametrize("key", ["rocketmqHome", "storePathRootDir", "storePathCommitLog", "authConfigPath"])
async def test_a_request_changes_no_path_and_starts_no_program(tmp_path: Path, key: str) -> None:
    """CVE-2023-33246: rocketmqHome, set with 25, became a part of a command of the shell."""
    folder, made = tmp_path / "store", tmp_path / "made"
    shell = f"-c $@|sh . echo touch {made};"
    async with running_broker(folder) as broker, WireClient.connect(broker.endpoint) as client:
        before = broker.configuration.effective()
        change = f"{key}={shell}\nfilterServerNums=1\n".encode()
        reply = await client.ask(RequestCode.UPDATE_BROKER_CONFIG, None, change)
        assert (reply.code == 0) == (key == "rocketmqHome")  # a key that is not known has no effect, as in RocketMQ
        assert broker.configuration.effective() == before
        saved = folder / "config" / "broker.properties"
        assert not saved.exists() or not saved.read_text().strip()
    assert not made.exists()


async def test_a_value_with_line_breaks_sets_no_other_key(tmp_path: Path) -> None:
    """CVE-2023-37582: a request wrote chosen lines to a file of the server."""
    async with running_broker(tmp_path) as broker, WireClient.connect(broker.endpoint) as client:
        change = rb"regionId=a\nauthenticationEnabled=true\r\u000acleanFileForciblyEnable=false\\"
        assert (await client.ask(RequestCode.UPDATE_BROKER_CONFIG, None, change)).code == 0
        text = (tmp_path / "config" / "broker.properties").read_text()
    assert [entry.key for entry in properties.parse(text)] == ["regionId"]
    assert text.count("\n") == 1


@pytest.mark.parametrize("schema", SERVERS.values(), ids=SERVERS)
def test_what_requests_may_change_is_no_path_no_address_and_no_secret(schema: Schema) -> None:
    """An allow list: the keys that are marked so. RocketMQ has a list of keys that requests may not change."""
    dynamic = [opt for section in schema.sections for opt in options_of(section) if opt.dynamic]
    assert len(dynamic) > 3
    assert [opt.key for opt in dynamic if opt.key in schema.protected or opt.secret] == []
    numbers_and_choices = re.compile(r"-?\d+(\.\d+)?|true|false|INFO")
    texts = {opt.key for opt in dynamic if not numbers_and_choices.fullmatch(opt.text(opt.default))}
    assert texts <= {"regionId", "deleteWhen"}


def test_servers_start_no_programs() -> None:
    """What is not there cannot be made to run with another text."""
    starts = re.compile(r"\bsubprocess\b|\bos\.(system|popen|exec\w+|spawn\w+|posix_spawn\w*)\b|\b(run|open)_process\b")
    folders = ("broker", "namesrv", "controller", "remoting", "protocol")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 200
    assert [str(path) for path in files if starts.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("code", [50, 51, 52, 53, 54])
async def test_the_requests_of_acl_1_are_not_served(client: WireClient, code: int) -> None:
    """54 returned the accounts with their secret keys."""
    reply = await client.ask(code, {"accessKey": "rocketmq2", "secretKey": "12345678", "admin": "true"})
    assert reply.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
    assert not reply.body
