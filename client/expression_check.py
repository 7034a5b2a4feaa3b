"""Asks a broker whether it serves a subscription by an SQL92 expression (RocketMQ's checkClientInBroker).

Otherwise the only sign of a broker that does not would be that no messages arrive. As in RocketMQ's clients one broker
is asked, and none if the topic has no route yet.
"""

from typing import Final

from trimq.client.core import Client
from trimq.client.errors import NoBrokerError, RocketMQError, TopicNotFoundError, UsageError
from trimq.client.subscription import Subscription
from trimq.protocol.body import encode_json
from trimq.protocol.codes import RequestCode, ResponseCode

_SWITCH: Final = "enablePropertyFilter"


async def check_in_broker(client: Client, group: str, subscription: Subscription) -> None:
    """Returns at once for tags.

    Raises UsageError if the broker refuses the expression or filters by tags only, other RocketMQErrors if it cannot be
    asked.
    """
    if not subscription.is_sql:
        return
    try:
        route = await client.routes.get(subscription.topic)
    except (TopicNotFoundError, NoBrokerError):
        return
    body = {"clientId": client.id, "group": group, "namespace": "", "subscriptionData": subscription.data}
    # A broker that has a master at the moment, if there is one; else the error names the first broker.
    name = next((name for name in route.brokers if route.master(name) is not None), next(iter(route.brokers)))
    address = await client.master(route, name)
    try:
        await client.request(address, RequestCode.CHECK_CLIENT_CONFIG, {}, encode_json(body))
    except RocketMQError as error:
        if error.code != ResponseCode.SYSTEM_ERROR:
            raise
        # The only reason for which brokers answer this request so.
        hint = "" if _SWITCH in error.text else f" (set {_SWITCH}=true in its configuration)"
        raise UsageError(error.text + hint, code=error.code, address=error.address) from error
