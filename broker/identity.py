"""How a broker is named to clients (RocketMQ's BrokerIdentity)."""

from dataclasses import dataclass

from trimq.protocol.body import MessageQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerIdentity:
    """``broker_name`` is part of the names of its queues; ``address`` is the one that clients connect to."""

    broker_name: str
    address: str

    def queue(self, topic: str, queue_id: int) -> MessageQueue:
        """A queue of this broker, as clients name it."""
        return MessageQueue(topic=topic, broker_name=self.broker_name, queue_id=queue_id)
