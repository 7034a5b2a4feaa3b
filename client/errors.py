"""Errors of the SDK: a tree by what the caller should do about them.

::

    RocketMQError
    ├── UsageError            mend the call or the set-up; the same call again fails again
    │   └── TopicNotFoundError
    ├── NotStoredError        nothing was stored or changed: safe to do again, a little later
    │   ├── UnreachableError  no server could be asked
    │   └── ClosedError       the object is closed, or not open yet
    └── PerhapsStoredError    nobody knows whether it happened: doing it again may do it twice

Each carries the server's response code (None where no server answered), its address, and a help text.
"""

from typing import Final

from protocol.codes import ResponseCode
from protocol.errors import code_name, help_text


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
    """No name server has a route for the topic, and it is not created automatically.

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
        ResponseCode.CONSUMER_NOT_ONLINE,
        ResponseCode.NO_MESSAGE,
        ResponseCode.BROADCAST_CONSUMPTION,
        ResponseCode.ILLEGAL_OPERATION,
    }
)
_NOT_STORED: Final = frozenset(
    {
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.SUBSCRIPTION_NOT_EXIST,
        ResponseCode.SUBSCRIPTION_NOT_LATEST,
        ResponseCode.FLOW_CONTROL,
        ResponseCode.GO_AWAY,
    }
)


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
