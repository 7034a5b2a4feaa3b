"""Requests of RocketMQ that are not served: the refusal and the README name the feature."""

import re
from collections import defaultdict
from pathlib import Path

from tests.broker.wire_client import WireClient
from tests.namesrv.server import running
from trimq.broker.controller import BrokerController
from trimq.protocol.codes import NOT_SUPPORTED, RequestCode

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


async def test_each_code_is_refused_with_the_name_of_its_feature(
    client: WireClient, broker: BrokerController, tmp_path: Path
) -> None:
    # guards the text that users of such a feature read, and that no served code is in the table
    async with running(tmp_path) as namesrv, namesrv.connect() as names:
        for code, feature in NOT_SUPPORTED.items():
            for reply in (await client.ask(code, {"topic": "T"}), await names.ask(code)):
                assert (reply.code, reply.remark) == (3, f"{feature} ({code}) are not supported")
    assert NOT_SUPPORTED[513] == "static topics"


def test_every_code_is_served_or_in_the_table() -> None:
    # guards the table against a missing code: all others have a handler, or are requests that brokers send to clients
    texts = [
        *ROOT.glob("broker/processors/**/*.py"),
        ROOT / "namesrv/processor.py",
        ROOT / "controller/processor.py",
        ROOT / "client/consumer_requests.py",
    ]
    source = "\n".join(path.read_text() for path in texts)
    served = {RequestCode[name] for name in re.findall(r"RequestCode\.(\w+)(?:,|: self)", source)}
    to_clients = {220, 221, 39, 40}
    assert {code for code in RequestCode if code not in served} <= NOT_SUPPORTED.keys() | to_clients


def test_the_readme_lists_them() -> None:
    # guards the last row of "What is supported"
    (row,) = (line for line in README.read_text().splitlines() if line.startswith("| Not yet"))
    listed: dict[str, set[int]] = defaultdict(set)
    for feature, codes in re.findall(r"(?:: |; )([^;:()]+) \(([^)]*\d)\)", row):
        for part in codes.split(", "):
            first, _, last = part.partition(" to ")
            listed[feature].update(range(int(first), int(last or first) + 1))
    wanted: dict[str, set[int]] = defaultdict(set)
    for code, feature in NOT_SUPPORTED.items():
        wanted[feature].add(code)
    assert listed == wanted
