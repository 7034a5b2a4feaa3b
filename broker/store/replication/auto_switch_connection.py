"""AutoSwitchHAConnection: a master's connection with one slave when controllers assign the roles.

Source: RocketMQ's AutoSwitchHAConnection. There the last transfer of an epoch has the number of the next one, and a
report is believed whatever it says.
"""

from typing import Final, Protocol

import trio

from trimq.broker.store.replication.epochs import EpochFileCache
from trimq.broker.store.replication.ha_connection import HAConnection, Master, SlaveState
from trimq.broker.store.replication.leadership import Leadership
from trimq.protocol.auto_switch_frames import (
    Hello,
    MasterEpochs,
    SlaveDecoder,
    encode_epochs,
    encode_header,
)
from trimq.protocol.epoch_file import Epoch
from trimq.protocol.ha_frames import HAFrameError

_MOST: Final = (4 << 20) - 36
"""The most bytes of a transfer: RocketMQ's slaves stop at one that, with its header, is longer than their buffer."""
_SIGN: Final = 0.05
"""Seconds after a transfer before a sign of life is sent only because the confirm offset has moved."""


class AutoSwitchMaster(Master, Protocol):
    """The part of AutoSwitchHAService that a connection uses."""

    leadership: Leadership
    epochs: EpochFileCache

    @property
    def confirmed_offset(self) -> int:
        """Every member of the set has everything below."""
        ...

    def greeted(self, connection: "AutoSwitchHAConnection") -> None:
        """The slave has said who it is."""
        ...


class AutoSwitchHAConnection(HAConnection):
    """One slave. ``broker_id`` is -1 before it has said who it is. A ``learner`` never joins the set."""

    def __init__(self, master: AutoSwitchMaster, stream: trio.abc.Stream, address: str) -> None:
        super().__init__(master, stream, address)
        self.broker_id = -1
        self.learner = False
        self._auto_switch = master
        self._messages = SlaveDecoder()
        self._hello: Hello | None = None
        self._greeted = trio.Event()
        self._sent_confirm = -1
        self._sent_at = 0.0

    @property
    def in_sync(self) -> bool:
        """Whether it has reported, and is a member of the set."""
        return self.ack_offset >= 0 and self.broker_id in self._auto_switch.leadership.members

    def state(self) -> SlaveState:
        """What there is to know of it."""
        return super().state()._replace(broker_id=self.broker_id)

    def _received(self, data: bytes) -> None:
        for message in self._messages.feed(data):
            if isinstance(message, Hello):
                self._greet(message)
            elif self._hello is None:
                raise HAFrameError("the slave reports before it has said who it is")
            else:
                self._reported(message.offset)

    def _greet(self, hello: Hello) -> None:
        if self._hello is not None:
            if hello != self._hello:
                raise HAFrameError(f"the slave is {hello}, and was {self._hello}")
            return  # RocketMQ's slave repeats it while it waits; a second answer would end the connection
        if hello.broker_id == self._auto_switch.leadership.broker_id:
            raise HAFrameError(f"the slave has this broker's id, {hello.broker_id}")
        self._hello = hello
        self.broker_id, self.learner = hello.broker_id, hello.learner
        self._auto_switch.greeted(self)
        self._greeted.set()

    async def _transfer(self) -> None:
        await self._greeted.wait()
        epochs = self._auto_switch.epochs
        mine = MasterEpochs(self._auto_switch.end_offset, epochs.last_epoch, epochs.entries)
        await self._stream.send_all(encode_epochs(mine))
        await super()._transfer()

    def _start_of(self, offset: int) -> int:
        files = self._auto_switch.log.files
        return offset or (files.last_start if self._hello is not None and self._hello.last_file else files.min_offset)

    def _epoch(self) -> tuple[Epoch, int | None]:
        found = self._auto_switch.epochs.entry_of(self.sent_offset)
        if found is None:
            raise HAFrameError(f"the epoch of the offset {self.sent_offset} is not known")
        return found

    def _most(self, count: int) -> int:
        _, end = self._epoch()
        return min(count, _MOST) if end is None else min(count, _MOST, end - self.sent_offset)

    def _header(self, size: int) -> bytes:
        epoch, _ = self._epoch()
        self._sent_confirm = self._auto_switch.confirmed_offset
        self._sent_at = trio.current_time()
        return encode_header(self.sent_offset, size, epoch, self._sent_confirm)

    def _sign_due(self) -> bool:
        """The slave dispatches no more than it knows to be confirmed."""
        moved = self._auto_switch.confirmed_offset != self._sent_confirm
        return moved and trio.current_time() - self._sent_at >= _SIGN
