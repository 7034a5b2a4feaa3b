"""Fast paths made from a broker's context, for tests that call them without a connection."""

from trimq.broker.context import BrokerContext
from trimq.broker.processors.pull.pull_fast_path import PullFastPath
from trimq.broker.processors.send.send_fast_path import SendFastPath


def send_fast_path_of(context: BrokerContext) -> SendFastPath:
    """Its requests get no reply if they fail."""
    return SendFastPath(
        configuration=context.configuration,
        topics=context.topics,
        store=context.store,
        stats=context.stats,
        store_host=context.store_host,
        answer=lambda *_: b"",
    )


def pull_fast_path_of(context: BrokerContext) -> PullFastPath:
    """It has no tag filters."""
    return PullFastPath(
        topics=context.topics,
        groups=context.groups,
        offsets=context.offsets,
        stats=context.stats,
        store=context.store,
        filter_of=lambda _: None,
    )
