"""The real broker inside a test: in the caller's trio loop, on free ports, in a directory of its own.

::

    async with running_broker() as broker:
        stream = await trio.open_tcp_stream(*broker.endpoint)
"""

import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import trio

from trimq.broker.controller import BrokerController
from trimq.broker.store.disk.disk import Disk
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import Clock

SMALL: Final = {
    "brokerName": "broker-a",
    "brokerIP1": "127.0.0.1",
    "bindAddress": "127.0.0.1",
    "listenPort": "0",
    "embeddedNamesrvEnable": "false",
    "mappedFileSizeCommitLog": str(16 * 1024 * 1024),
    "commitLogReserveStep": str(1024 * 1024),
    "mappedFileSizeConsumeQueue": str(1000 * 20),
    "maxHashSlotNum": "1000",
    "maxIndexNum": "4000",
    "shutdownWaitTimeSeconds": "5",
}
"""Settings that make a broker quick to start and small on disk. ``changes`` override them."""

_REGISTRATION_SECONDS: Final = 10.0


def configuration(directory: Path, changes: Mapping[str, object] | None = None) -> Configuration:
    """A configuration for a broker in ``directory``: SMALL, overridden by ``changes``, which have RocketMQ's keys."""
    from trimq.broker.config import SCHEMA  # noqa: PLC0415 - imported next to its only use

    found = Configuration(SCHEMA)
    values = {**SMALL, "storePathRootDir": str(directory), **(changes or {})}
    for key, value in values.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        found.apply(key, text, "trimq.broker.testing")
    found.check()
    return found


@asynccontextmanager
async def running_broker(
    directory: Path | None = None,
    *,
    clock: Clock | None = None,
    disk: Disk | None = None,
    **changes: object,
) -> AsyncIterator[BrokerController]:
    """Run a broker while the block runs, and stop it in order afterwards.

    When the block starts, the broker and its topics are registered with every name server that can be reached.
    ``changes`` are configuration keys as RocketMQ spells them. Without ``directory`` a temporary one is used.
    """
    with tempfile.TemporaryDirectory(prefix="trimq-") as temporary:
        settings = configuration(directory or Path(temporary), changes)
        controller = BrokerController(settings, clock=clock, disk=disk)
        async with trio.open_nursery() as nursery:
            await nursery.start(controller.run)
            await controller.context.registration.registered(_REGISTRATION_SECONDS)
            try:
                yield controller
            finally:
                with trio.CancelScope(shield=True):
                    controller.shutdown()
                    await controller.stopped.wait()
