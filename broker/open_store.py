"""Part of the composition root: makes the store that the configuration asks for, and opens it."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import structlog

from trimq.broker.config import BrokerConfig, ControllerModeConfig, MessageStoreConfig, ReplicationConfig
from trimq.broker.start_error import StartError
from trimq.broker.store.message_store import MessageStore, StoreInUseError, StoreLoadError
from trimq.broker.tiered_config import TieredStoreConfig
from trimq.remoting.config.configuration import Configuration

_log = structlog.get_logger("broker")


def make_store(configuration: Configuration, **parts: Any) -> MessageStore:
    """Make a store, with a tier if one is configured. ``parts``: see MessageStore. Raises StartError."""
    config, tier = configuration.section(MessageStoreConfig), configuration.section(TieredStoreConfig)
    # Controllers assign roles, so that of the configuration does not count then.
    replication = parts.pop("replication", None) or configuration.section(ReplicationConfig)
    parts.setdefault("controller_mode", configuration.section(ControllerModeConfig))
    if tier.is_enabled and replication.is_slave and not tier.uses_bucket:
        # The tier is the master's: two brokers of one name would write into the same segments.
        _log.info("tier_not_opened", reason="a slave uploads nothing (brokerRole=SLAVE)")
        return MessageStore(config, replication=replication, **parts)
    if not tier.is_enabled:
        return MessageStore(config, replication=replication, **parts)
    broker = configuration.section(BrokerConfig)
    parts |= {"cluster": broker.broker_cluster_name, "broker_name": broker.broker_name, "replication": replication}
    # Only then: a broker without a tier starts faster and needs less memory.
    try:
        if tier.uses_bucket:
            from trimq.broker.store.tiered.bucket.bucket_message_store import BucketMessageStore  # noqa: PLC0415
            from trimq.broker.store.tiered.bucket.open_object_store import open_object_store  # noqa: PLC0415

            return BucketMessageStore(config, tier, open_object_store(tier), **parts)
        from trimq.broker.store.tiered.access.tiered_message_store import TieredMessageStore  # noqa: PLC0415

        return TieredMessageStore(config, tier, **parts)
    except StoreLoadError as error:
        raise StartError(str(error)) from error


@asynccontextmanager
async def opened(store: MessageStore) -> AsyncIterator[None]:
    """Run a store. Raises StartError if it cannot be opened."""
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(store.opened())
        except (StoreInUseError, StoreLoadError) as error:
            raise StartError(str(error)) from error
        except OSError as error:
            raise StartError(f"the store {store.root} cannot be opened: {error}") from error
        except ExceptionGroup as group:  # the tier is loaded while tasks of the store run already
            reason = group.exceptions[0]
            if isinstance(reason, StoreLoadError | OSError):
                raise StartError(str(reason)) from group
            raise
        yield
