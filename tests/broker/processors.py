"""Processors made of a broker's parts, as its composition root makes them."""

from trimq.broker.parts import BrokerParts
from trimq.broker.processors.pull.pull_direct import DirectPulls
from trimq.broker.processors.send.send import SendMessageProcessor
from trimq.broker.processors.send.send_back import SendBackProcessor
from trimq.broker.processors.send.send_checks import SendChecks
from trimq.broker.processors.send.send_direct import DirectSends


def checks_of(parts: BrokerParts) -> SendChecks:
    return SendChecks(
        configuration=parts.configuration,
        topics=parts.topics,
        groups=parts.groups,
        locks=parts.locks,
        clock=parts.clock,
    )


def sends_of(parts: BrokerParts) -> SendMessageProcessor:
    return SendMessageProcessor(
        configuration=parts.configuration,
        topics=parts.topics,
        store=parts.store,
        stats=parts.stats,
        checks=checks_of(parts),
        unique_ids=parts.unique_ids,
        store_host=parts.store_host,
    )


def back_of(parts: BrokerParts) -> SendBackProcessor:
    return SendBackProcessor(
        configuration=parts.configuration,
        topics=parts.topics,
        groups=parts.groups,
        store=parts.store,
        stats=parts.stats,
        checks=checks_of(parts),
        store_host=parts.store_host,
    )


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
