"""Makes segments for the configured provider."""

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.tiered.driver.file_segment import FileSegment
from trimq.broker.store.tiered.driver.memory import MemoryFileSegment
from trimq.broker.store.tiered.driver.posix import PosixFileSegment
from trimq.broker.store.tiered.driver.provider_stats import PHYSICAL_KIND, ProviderStats
from trimq.broker.tiered_config import POSIX_PROVIDER, TieredStoreConfig
from trimq.protocol.tiered_layout import SegmentType, cluster_directory


class FileSegmentFactory:
    """Chooses the provider by tieredBackendServiceProvider. ``keeps`` is false if it loses its segments at a stop."""

    def __init__(self, config: TieredStoreConfig, disk: Disk, cluster: str) -> None:
        self.config = config
        self._disk = disk
        self._cluster = cluster
        self.stats = ProviderStats()
        self.keeps = config.tiered_backend_service_provider == POSIX_PROVIDER

    def create(self, type: SegmentType, path: str, base_offset: int, suffix: str = "") -> FileSegment:
        """The segment, which need not exist. ``suffix``: a file beside it."""
        segment = self._create(type, path, base_offset, suffix)
        segment.stats = self.stats.of(PHYSICAL_KIND if suffix else type.name.lower())
        return segment

    def _create(self, type: SegmentType, path: str, base_offset: int, suffix: str) -> FileSegment:
        if self.keeps:
            root = self.config.tiered_store_file_path
            return PosixFileSegment(self._disk, root, self._cluster, type, path, base_offset, suffix)
        return MemoryFileSegment(type, path, base_offset)

    def has_segments(self, broker_name: str) -> bool:
        """Whether the provider keeps anything of a broker. Blocks."""
        return self.keeps and bool(
            self._disk.list(f"{self.config.tiered_store_file_path}/{cluster_directory(self._cluster)}/{broker_name}")
        )

    def max_size(self, type: SegmentType) -> int | None:
        """The most bytes of a segment; None if there is no limit."""
        if type is SegmentType.COMMIT_LOG:
            return self.config.tiered_store_commit_log_max_size
        if type is SegmentType.CONSUME_QUEUE:
            return self.config.tiered_store_consume_queue_max_size
        return None
