"""Fast ways made of a broker's parts, for tests that call them without a connection's bytes."""

from trimq.broker.parts import BrokerParts
from trimq.broker.processors.pull.pull_direct import DirectPulls
from trimq.broker.processors.send.send_direct import DirectSends


def direct_sends_of(parts: BrokerParts) -> DirectSends:
    """They answer nothing to what has failed."""
    return DirectSends(
        configuration=parts.configuration,
        topics=parts.topics,
        store=parts.store,
        stats=parts.stats,
        store_host=parts.store_host,
        answer=lambda *_: b"",
    )


def direct_pulls_of(parts: BrokerParts) -> DirectPulls:
    """They know no filter."""
    return DirectPulls(
        topics=parts.topics,
        groups=parts.groups,
        offsets=parts.offsets,
        stats=parts.stats,
        store=parts.store,
        filter_of=lambda _: None,
    )
