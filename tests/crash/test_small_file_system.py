"""A broker on a file system of a few MiB: it fills up, refuses with figures, is read on, and heals."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.broker.wire_client import WireClient
from tests.crash.broker_process import BrokerProcess
from tests.crash.ledger import Lane
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
    """A directory of its own that holds 8 MiB."""
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
    """Sends to one lane and keeps account."""

    def __init__(self, client: WireClient, lane: Lane) -> None:
        self.client = client
        self.lane = lane

    async def send(self) -> RemotingCommand:
        number = self.lane.take()
        reply = await self.client.send(
            self.lane.topic, self.lane.body(number), {"KEYS": self.lane.key(number)}, queue_id=self.lane.queue_id
        )
        if not reply.code:
            self.lane.acknowledge(number, int(reply.ext_fields()["queueOffset"]), time.monotonic())
        return reply

    async def until_refused(self) -> str:
        """Fill it up; what the broker says then."""
        with trio.fail_after(60):
            while not (reply := await self.send()).code:
                pass
        assert reply.code == ResponseCode.SERVICE_NOT_AVAILABLE
        return reply.remark or ""

    async def until_taken(self) -> None:
        with trio.fail_after(20):
            while (await self.send()).code:  # noqa: ASYNC110 - the broker tells nobody
                await trio.sleep(0.1)  # the broker looks once a second

    async def check(self) -> None:
        """What was acknowledged can be read, in order, and is found by key."""
        numbers = [number for number, offset in enumerate(self.lane.offsets) if offset >= 0]
        assert [self.lane.offsets[number] for number in numbers] == list(range(len(numbers)))
        found: list[bytes] = []
        while len(found) < len(numbers):
            messages = await self.client.pull_messages(self.lane.topic, len(found), queueId=self.lane.queue_id)
            found += [stored.body for stored in messages]
        assert found == [self.lane.body(number) for number in numbers]
        for number in (numbers[0], numbers[-1]):
            fields = {"topic": self.lane.topic, "key": self.lane.key(number), "maxNum": 8, "beginTimestamp": 0}
            reply = await self.client.ask(RequestCode.QUERY_MESSAGE, {**fields, "endTimestamp": 1 << 62})
            assert [stored.body for stored in decode_messages(bytes(reply.body))] == [self.lane.body(number)]


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
    lane = Lane("Full", 0)
    await broker.start()
    try:
        async with WireClient.connect(broker.address) as client:
            sender = Sender(client, lane)
            remark = await sender.until_refused()
            # the file system, how much of it is free, and the limit
            assert str(small) in remark
            assert "tmpfs" in remark
            assert f"of {SIZE} bytes free" in remark
            assert f"{3 * STEP} are needed" in remark
            await sender.check()

            # hysteresis: room for a step or two does not let it begin again, and be refused again at once
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
            # and once more, to the brim
            await sender.until_refused()
            await sender.check()
        await broker.kill()
        await broker.start()
        async with WireClient.connect(broker.address) as client:
            await Sender(client, lane).check()
    finally:
        assert await broker.stop() == 0, broker.tail()
