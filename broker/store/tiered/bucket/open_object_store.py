"""Opens the object store that the configuration names."""

from trimq.broker.store.disk.mapped_file_queue import StoreLoadError
from trimq.broker.store.tiered.bucket.object_store import ObjectStore
from trimq.broker.tiered_config import TieredStoreConfig


def open_object_store(config: TieredStoreConfig) -> ObjectStore:
    """The bucket of tieredStoreBucket. Sends no request. Raises StoreLoadError with a remedy."""
    try:
        # Only then: a broker without a bucket needs no library for it.
        from trimq.broker.store.tiered.bucket.obstore_store import connect  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        raise StoreLoadError(
            f"tieredStoreBucket={config.tiered_store_bucket} needs the package obstore: pip install 'trimq[s3]'"
        ) from error
    try:
        return connect(
            config.tiered_store_bucket,
            endpoint=config.tiered_store_bucket_endpoint,
            region=config.tiered_store_bucket_region,
            path_style=config.tiered_store_bucket_path_style,
            timeout_ms=config.tiered_store_bucket_request_timeout,
        )
    except OSError as error:
        raise StoreLoadError(f"tieredStoreBucket={config.tiered_store_bucket}: {error}") from None
