"""Fast paths made of a broker's context, for tests that call them without a connection's bytes."""

from trimq.broker.context import BrokerContext
from trimq.broker.processors.pull.pull_fast_path import PullFastPath
from trimq.broker.processors.send.send_fast_path import SendFastPath


def send_fast_path_of(context: BrokerContext) -> SendFastPath:
    """They answer nothing to what has failed."""
    return SendFastPath(
        configuration=context.configuration,
        topics=context.topics,
        store=context.store,
        stats=context.stats,
        store_host=context.store_host,
        answer=lambda *_: b"",
    )


def pull_fast_path_of(context: BrokerContext) -> PullFastPath:
    """They know no filter."""
    return PullFastPath(
        topics=context.topics,
        groups=context.groups,
        offsets=context.offsets,
        stats=context.stats,
        store=context.store,
        filter_of=lambda _: None,
    )
