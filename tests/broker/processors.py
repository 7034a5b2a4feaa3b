"""Fast ways made of a broker's context, for tests that call them without a connection's bytes."""

from trimq.broker.context import BrokerContext
from trimq.broker.processors.pull.pull_direct import DirectPulls
from trimq.broker.processors.send.send_direct import DirectSends


def direct_sends_of(context: BrokerContext) -> DirectSends:
    """They answer nothing to what has failed."""
    return DirectSends(
        configuration=context.configuration,
        topics=context.topics,
        store=context.store,
        stats=context.stats,
        store_host=context.store_host,
        answer=lambda *_: b"",
    )


def direct_pulls_of(context: BrokerContext) -> DirectPulls:
    """They know no filter."""
    return DirectPulls(
        topics=context.topics,
        groups=context.groups,
        offsets=context.offsets,
        stats=context.stats,
        store=context.store,
        filter_of=lambda _: None,
    )
