"""How groups get the messages of a topic, PULL or POP: messageRequestMode.json (RocketMQ's MessageRequestModeManager).

The modes are stored and returned, so that a store that moves between brokers keeps them. This broker itself does not
use them: it has no POP, and answers every client PULL.
"""

from collections.abc import Iterator
from typing import Any, Final

import structlog

from trimq.broker.config import BrokerConfig, MessageStoreConfig
from trimq.broker.services.state_file import (
    PersistentTable,
    StateFile,
    StateFileError,
    encode_pieces,
    unknown_fields,
)
from trimq.broker.store.disk.disk import Disk
from trimq.protocol.body import SetMessageRequestModeRequestBody
from trimq.protocol.codes import ResponseCode
from trimq.protocol.errors import RemotingError
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import Clock

_log = structlog.get_logger("broker.request_mode")

PULL: Final = "PULL"
POP: Final = "POP"

_MAP: Final = "messageRequestModeMap"


class MessageRequestModeManager(PersistentTable):
    """The modes by topic and group. ``table`` has the entries as they are in the file, unknown fields included."""

    def __init__(self, configuration: Configuration, disk: Disk, clock: Clock) -> None:
        self._configuration = configuration
        self._clock = clock
        self._rest: dict[str, Any] = {}
        self._count = 0
        self.table: dict[str, dict[str, dict[str, Any]]] = {}
        path = configuration.section(MessageStoreConfig).config_path / "messageRequestMode.json"
        self._file = StateFile(disk, str(path), self.pieces)

    async def load(self) -> None:
        """Read messageRequestMode.json. Raises StateFileError."""
        state = await self._file.load()
        if state is not None:
            self._take(state, self._file.path)

    def follow(self, state: dict[str, Any]) -> None:
        """Take the modes of a slave's master. Raises StateFileError."""
        if (state.get(_MAP) or {}) != self.table:
            self._take(state, "the master's modes")
            self._file.changed()

    def _take(self, state: dict[str, Any], where: str) -> None:
        table = state.get(_MAP) or {}
        if not isinstance(table, dict) or not all(
            isinstance(groups, dict) and all(isinstance(entry, dict) for entry in groups.values())
            for groups in table.values()
        ):
            raise StateFileError(f"{where}: {_MAP} is not a table of topics and groups")
        self.table = table
        self._count = sum(len(groups) for groups in table.values())
        self._rest = unknown_fields(state, frozenset({_MAP}))

    def pieces(self) -> Iterator[bytes]:
        """The content of messageRequestMode.json; also the body of GET_ALL_MESSAGE_REQUEST_MODE (402)."""
        return encode_pieces({_MAP: self.table} | self._rest)

    def set(self, body: SetMessageRequestModeRequestBody) -> None:
        """Set the mode of a group for a topic. The caller has checked both, and replies after ``persisted()``.

        Raises SYSTEM_BUSY if there are maxOffsetGroups modes already.
        """
        groups = self.table.get(body.topic, {})
        before = groups.get(body.consumer_group)
        most = self._configuration.section(BrokerConfig).max_offset_groups
        if before is None and self._count >= most:
            raise RemotingError(
                ResponseCode.SYSTEM_BUSY,
                f"this broker has {self._count} message request modes and may have {most} (maxOffsetGroups)",
            )
        if before is None:
            self._count += 1
        self.table.setdefault(body.topic, groups)[body.consumer_group] = (before or {}) | {
            "consumerGroup": body.consumer_group,
            "mode": body.mode,
            "popShareQueueNum": body.pop_share_queue_num,
            "topic": body.topic,
        }
        self._file.changed()
        if body.mode == POP:
            _log.warning("pop_mode_has_no_effect", topic=body.topic, group=body.consumer_group)
