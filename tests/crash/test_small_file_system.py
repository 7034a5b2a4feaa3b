"""A broker on a full file system of a few MiB: it refuses sends with figures, serves reads, and recovers."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.broker.wire_client import WireClient
from tests.crash.broker_process import BrokerProcess
from tests.crash.ledger import Stream
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.message import decode_messages

SIZE = 8 << 20
STEP = 256 << 10
BALLAST = 4 << 20
SETTINGS = {
    "mappedFileSizeCommitLog": 1 << 20,
    "commitLogReserveStep": STEP,
    "maxMessageSize": 64 << 10,
    "mappedFileSizeConsumeQueue": 20 * 1000,
    "maxHashSlotNum": 1000,
    "maxIndexNum": 4000,
    "cleanFileForciblyEnable": "false",
}


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A mounted file system of 8 MiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=700", "trimq-test", str(mount)],
        capture_output=True,
        check=False,
    )
    if done.returncode:
        why = f"no tmpfs can be mounted here: {done.stderr.decode(errors='replace').strip()}"
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


class Sender:
    """Sends to one stream and records the acknowledged messages."""

    def __init__(self, client: WireClient, stream: Stream) -> None:
        self.client = client
        self.stream = stream

    async def send(self) -> RemotingCommand:
        number = self.stream.take()
        reply = await self.client.send(
            self.stream.topic,
            self.stream.body(number),
            {"KEYS": self.stream.key(number)},
            queue_id=self.stream.queue_id,
        )
        if not reply.code:
            self.stream.acknowledge(number, int(reply.ext_fields()["queueOffset"]), time.monotonic())
        return reply

    async def until_refused(self) -> str:
        """Send until the broker refuses a message, and return the remark of the refusal."""
        with trio.fail_after(60):
            while not (reply := await self.send()).code:
                pass
        assert reply.code == ResponseCode.SERVICE_NOT_AVAILABLE
        return reply.remark or ""

    async def until_taken(self) -> None:
        with trio.fail_after(20):
            while (await self.send()).code:  # noqa: ASYNC110 - the broker does not notify clients
                await trio.sleep(0.1)  # the broker checks its space once a second

    async def check(self) -> None:
        """Check that the acknowledged messages can be read in order and are found by key."""
        numbers = [number for number, offset in enumerate(self.stream.offsets) if offset >= 0]
        assert [self.stream.offsets[number] for number in numbers] == list(range(len(numbers)))
        found: list[bytes] = []
        while len(found) < len(numbers):
            messages = await self.client.pull_messages(self.stream.topic, len(found), queueId=self.stream.queue_id)
            found += [stored.body for stored in messages]
        assert found == [self.stream.body(number) for number in numbers]
        for number in (numbers[0], numbers[-1]):
            fields = {"topic": self.stream.topic, "key": self.stream.key(number), "maxNum": 8, "beginTimestamp": 0}
            reply = await self.client.ask(RequestCode.QUERY_MESSAGE, {**fields, "endTimestamp": 1 << 62})
            assert [stored.body for stored in decode_messages(bytes(reply.body))] == [self.stream.body(number)]


def free(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


@pytest.mark.alone
@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
@pytest.mark.timeout(180)
async def test_full_and_healed(small: Path, tmp_path: Path, flush: str) -> None:
    ballast = small / "ballast"
    ballast.write_bytes(bytes(BALLAST))
    broker = BrokerProcess(tmp_path, **SETTINGS, storePathRootDir=small / "store", flushDiskType=flush)
    stream = Stream("Full", 0)
    await broker.start()
    try:
        async with WireClient.connect(broker.address) as client:
            sender = Sender(client, stream)
            remark = await sender.until_refused()
            # The remark names the file system, its free bytes, and the limit.
            assert str(small) in remark
            assert "tmpfs" in remark
            assert f"of {SIZE} bytes free" in remark
            assert f"{3 * STEP} are needed" in remark
            await sender.check()

            # Hysteresis: space for one or two steps must not let sends through, the next ones would be refused again.
            os.truncate(ballast, BALLAST - (2 * STEP - free(small)) if free(small) < 2 * STEP else BALLAST)
            assert STEP < free(small) < 3 * STEP
            until = trio.current_time() + 2.5
            while trio.current_time() < until:
                assert (await sender.send()).code == ResponseCode.SERVICE_NOT_AVAILABLE
                await trio.sleep(0.1)
            await sender.check()

            ballast.unlink()
            await sender.until_taken()
            for _ in range(200):
                assert (await sender.send()).code == 0
            await sender.check()
            # The broker fills the file system a second time, to the last step.
            await sender.until_refused()
            await sender.check()
        await broker.kill()
        await broker.start()
        async with WireClient.connect(broker.address) as client:
            await Sender(client, stream).check()
    finally:
        assert await broker.stop() == 0, broker.tail()
