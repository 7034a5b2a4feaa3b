"""How much one pull may get (RocketMQ's maxTransfer... and maxFilterMessageSize keys)."""

from typing import Final

from trimq.broker.config import MessageStoreConfig
from trimq.broker.store.types import MessageFilter
from trimq.protocol.queue_unit import FILLER_SIZE, UNIT_SIZE

_MIN_BYTES: Final = 100


class GetLimits:
    """The limits of a configuration, which may be replaced at any time.

    ``ram``: bytes of RAM of this machine. ``memory``: how far behind the log's end (bytes) a record may be that counts
    as in memory for these limits.
    """

    memory: int

    def __init__(self, config: MessageStoreConfig, ram: int) -> None:
        self._ram = ram
        self.set_config(config)

    def set_config(self, config: MessageStoreConfig) -> None:
        """Apply changed limits."""
        self.memory = self._ram * config.access_message_in_memory_max_ratio // 100
        self._scan_units = config.max_filter_message_size // UNIT_SIZE
        self._memory_limits = (
            min(config.max_transfer_bytes_on_message_in_memory, FILLER_SIZE - 1),
            config.max_transfer_count_on_message_in_memory,
        )
        self._disk_limits = (
            config.max_transfer_bytes_on_message_in_disk,
            config.max_transfer_count_on_message_in_disk,
        )

    def in_memory(self, max_bytes: int, max_count: int) -> tuple[int, int]:
        """Bytes and number of messages in memory, of those that a consumer requests."""
        size, count = self._memory_limits
        if max_bytes < size:
            size = max(max_bytes, _MIN_BYTES)
        return size, min(max_count, count)

    def on_disk(self, max_bytes: int, max_count: int) -> tuple[int, int]:
        """As ``in_memory``, for messages on disk."""
        size, count = self._disk_limits
        if max_bytes < size:
            size = max(max_bytes, _MIN_BYTES)
        return size, min(max_count, count)

    def units_to_read(self, max_count: int, filter: MessageFilter | None) -> int:
        """How many units of the queue may be looked at for one pull."""
        if filter is None:
            return max(1, min(max_count, max(self._memory_limits[1], self._disk_limits[1])))
        return max(self._scan_units, max_count)
