"""Errors of the SDK: a tree by what the caller should do about them.

::

    RocketMQError
    ├── UsageError            mend the call or the set-up; the same call again fails again
    │   └── TopicNotFoundError
    ├── NotStoredError        nothing was stored or changed: safe to do again, a little later
    │   ├── UnreachableError  no server could be asked
    │   │   └── NoBrokerError the name servers know no broker at all: they are away, or not there yet
    │   └── ClosedError       the object is closed, or not open yet
    └── PerhapsStoredError    nobody knows whether it happened: doing it again may do it twice

Each carries the server's response code (None where no server answered), its address, and a help text.

What an error says of a whole send is what is true of all its attempts: after one that may have worked, a later refusal
changes nothing, and the send fails with PerhapsStoredError. A server that is away never makes a UsageError.
"""

from typing import Final

from trimq.protocol.codes import ResponseCode
from trimq.protocol.errors import code_name, help_text


class RocketMQError(Exception):
    """Base of all errors that the SDK raises on purpose.

    ``code`` is the response code or None, ``address`` the server's ``ip:port`` or None, ``help`` says what the code
    means and what to do.

    >>> error = RocketMQError("no such topic", code=17, address="127.0.0.1:10911")
    >>> error.code, error.address
    (17, '127.0.0.1:10911')
    >>> str(error)
    'no such topic [TOPIC_NOT_EXIST (17) from 127.0.0.1:10911]'
    """

    def __init__(self, text: str, *, code: int | None = None, address: str | None = None) -> None:
        super().__init__(text)
        self.text = text
        self.code = code
        self.address = address

    @property
    def help(self) -> str:
        """What the code means and what to do about it; empty where no server answered.

        >>> UsageError("?", code=26).help.startswith("The consumer group does not exist.")
        True
        """
        return "" if self.code is None else help_text(self.code)

    def __str__(self) -> str:
        parts = []
        if self.code is not None:
            parts.append(f"{code_name(self.code)} ({self.code})")
        if self.address is not None:
            parts.append(f"from {self.address}")
        return f"{self.text} [{' '.join(parts)}]" if parts else self.text


class UsageError(RocketMQError):
    """The call cannot succeed as it is: mend it, or the topic's, group's or broker's set-up. Nothing was stored.

    >>> issubclass(UsageError, RocketMQError)
    True
    """


class TopicNotFoundError(UsageError):
    """There are brokers, and none has the topic; it is not created automatically either.

    Name servers forget the topics of a broker that is away. With other brokers there, a topic that this client has
    never seen cannot be told from one that does not exist: it is not found. With none there it is a NoBrokerError.

    >>> issubclass(TopicNotFoundError, UsageError)
    True
    """


class NotStoredError(RocketMQError):
    """Certainly not stored: the request was not sent, or the server said that it did nothing. Safe to do again.

    >>> isinstance(error_for(2, "busy", "127.0.0.1:10911"), NotStoredError)
    True
    """


class UnreachableError(NotStoredError):
    """No connection, so nothing was asked. Servers may be down, or the addresses wrong.

    >>> str(UnreachableError("connection refused", address="127.0.0.1:1"))
    'connection refused [from 127.0.0.1:1]'
    """


class NoBrokerError(UnreachableError):
    """The name servers answer, and no broker is registered at them: whether the topic exists cannot be said.

    The brokers are away, or have not come yet, or the name servers have just started.

    >>> issubclass(NoBrokerError, NotStoredError)
    True
    """


class ClosedError(NotStoredError):
    """The object is not open: use it inside its ``async with`` block.

    >>> issubclass(ClosedError, NotStoredError)
    True
    """


class PerhapsStoredError(RocketMQError):
    """The request went out and no clear answer came back. Doing it again may do it twice.

    A message keeps its id over such a repetition, so a consumer can tell.

    >>> isinstance(error_for(1, "NullPointerException", "127.0.0.1:10911"), PerhapsStoredError)
    True
    """


_USAGE: Final = frozenset(
    {
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
        ResponseCode.MESSAGE_ILLEGAL,
        ResponseCode.VERSION_NOT_SUPPORTED,
        ResponseCode.NO_PERMISSION,
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.TOPIC_EXIST_ALREADY,
        ResponseCode.QUERY_NOT_FOUND,
        ResponseCode.SUBSCRIPTION_PARSE_FAILED,
        ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
        ResponseCode.INVALID_PARAMETER,
        ResponseCode.TRANSACTION_STATE_GROUP_WRONG,
        ResponseCode.NO_BUYER_ID,
        ResponseCode.NOT_IN_CURRENT_UNIT,
        ResponseCode.CONSUMER_NOT_ONLINE,
        ResponseCode.NO_MESSAGE,
        ResponseCode.BROADCAST_CONSUMPTION,
        ResponseCode.ILLEGAL_OPERATION,
        ResponseCode.USER_NOT_EXIST,
        ResponseCode.POLICY_NOT_EXIST,
    }
)
"""Refusals that stay, until somebody mends something."""
_NOT_STORED: Final = frozenset(
    {
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.PULL_NOT_FOUND,
        ResponseCode.PULL_RETRY_IMMEDIATELY,
        ResponseCode.PULL_OFFSET_MOVED,
        ResponseCode.SUBSCRIPTION_NOT_EXIST,
        ResponseCode.SUBSCRIPTION_NOT_LATEST,
        ResponseCode.FILTER_DATA_NOT_EXIST,
        ResponseCode.FILTER_DATA_NOT_LATEST,
        ResponseCode.POLLING_FULL,
        ResponseCode.POLLING_TIMEOUT,
        ResponseCode.BROKER_NOT_EXIST,
        ResponseCode.BROKER_DISPATCH_NOT_COMPLETE,
        ResponseCode.FLOW_CONTROL,
        ResponseCode.NOT_LEADER_FOR_QUEUE,
        ResponseCode.GO_AWAY,
    }
)
"""Refusals that pass. What is in neither set may have happened: SYSTEM_ERROR comes before and after storing; 10, 11 and
12 mean stored; CONSUME_MSG_TIMEOUT (207): a consumer has the message; 4 and 200 to 202 say nothing certain."""


def again(error: RocketMQError) -> RocketMQError:
    """The same error for one more caller: each raises an instance of its own."""
    own = type(error)(error.text, code=error.code, address=error.address)
    own.__cause__ = error
    return own


def error_for(code: int, remark: str | None, address: str | None) -> RocketMQError:
    """The error for a reply whose code is not success.

    >>> type(error_for(17, "topic[x] not exist", "127.0.0.1:10911")).__name__
    'TopicNotFoundError'
    """
    text = remark or help_text(code) or f"the server answered with code {code}"
    kind: type[RocketMQError] = PerhapsStoredError
    if code == ResponseCode.TOPIC_NOT_EXIST:
        kind = TopicNotFoundError
    elif code in _USAGE:
        kind = UsageError
    elif code in _NOT_STORED:
        kind = NotStoredError
    return kind(text, code=code, address=address)
