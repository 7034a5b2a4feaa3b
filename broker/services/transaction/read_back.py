"""Finds at the start which halves are pending."""

from trimq.broker.services.offsets import NOT_FOUND, ConsumerOffsetManager
from trimq.broker.services.transaction.service import TransactionalMessageService
from trimq.broker.store.message_store import MessageStore
from trimq.protocol.topic_rules import TRANS_HALF_TOPIC
from trimq.protocol.transaction import GROUP, QUEUE


async def read_back(transactions: TransactionalMessageService, store: MessageStore, offsets: ConsumerOffsetManager) -> None:
    """Fill the table of halves."""
    low, high = store.min_offset(TRANS_HALF_TOPIC, QUEUE), store.max_offset(TRANS_HALF_TOPIC, QUEUE)
    first = offsets.query(GROUP, TRANS_HALF_TOPIC, QUEUE)
    first = low if first == NOT_FOUND else min(max(first, low), high)
    transactions.halves.restart(first, high)
    transactions.check_again = high
