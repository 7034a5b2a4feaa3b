"""Errors of the SDK: a class hierarchy by what the caller should do about them.

::

    RocketMQError
    ├── UsageError            fix the call or the configuration; the same call fails again
    │   ├── TopicNotFoundError
    │   └── NoPermissionError the topic, or a policy for this user, does not permit it
    │       └── CredentialsError the server does not know the user, or the secret key is wrong
    ├── NotStoredError        nothing was stored or changed: safe to retry, a little later
    │   ├── UnreachableError  no server could be reached
    │   │   └── NoBrokerError no broker is registered at the name servers: all are down, or not started yet
    │   └── ClosedError       the object is closed, or not open yet
    └── PerhapsStoredError    the outcome is unknown: a retry may store or change it twice
        ├── NoReplyError      a request was sent, and no reply came in time; also a TimeoutError
        └── NotDeliveredError a reply did not reach the client that waits for it

Each error carries the server's response code (None if no server answered), the server's address, and a help text.

The error of a send describes all its attempts together: after one attempt that may have stored the message, a later
refusal changes nothing, and the send fails with PerhapsStoredError. A server that is down is never a UsageError.
"""

import re
from typing import Final

from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.errors import code_name, help_text


class RocketMQError(Exception):
    """Base class of all errors that the SDK raises on purpose.

    ``code`` is the response code, None if no server answered; ``address`` is the server's ``ip:port``, None if no
    server is concerned; ``help`` explains the code and what to do about it.

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
        """The meaning of the code and what to do about it; empty if there is no code.

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
    """The call cannot succeed as it is. Fix it, or the topic's, group's or broker's configuration. Nothing was stored.

    >>> issubclass(UsageError, RocketMQError)
    True
    """


class TopicNotFoundError(UsageError):
    """Brokers are registered, none of them has the topic, and it is not created automatically.

    Name servers forget the topics of a broker that is down. While other brokers are registered, a topic of that broker
    which this client has not seen before cannot be distinguished from one that does not exist, and raises this error.
    If no broker is registered, NoBrokerError is raised instead.

    >>> issubclass(TopicNotFoundError, UsageError)
    True
    """


class NoPermissionError(UsageError):
    """The topic, group or broker does not permit the operation, or no policy grants it to this user.

    The text names the user and the resource, as the server does, and what to do. Another broker of the same topic may
    permit it: users, policies and permissions are those of each broker. So a producer tries another one, if there is
    one.

    >>> error = error_for(16, "User:me has no permission to access Topic:T from 10.0.0.1, no matched policies.", None)
    >>> error.text.partition("policies. ")[2]
    'Grant it with mqadmin createAcl; mqadmin explainAccess shows which policy decides.'
    """


class CredentialsError(NoPermissionError):
    """The server does not accept who sent the request: no user is named, it is not known, or the secret key is wrong.

    >>> error = error_for(16, "check signature failed.", "127.0.0.1:10911")
    >>> isinstance(error, CredentialsError), error.text.startswith("check signature failed. The server does not know")
    (True, True)
    """


class NotStoredError(RocketMQError):
    """Certainly not stored: the request was not sent, or the server answered that it did nothing. Safe to retry.

    >>> isinstance(error_for(2, "busy", "127.0.0.1:10911"), NotStoredError)
    True
    """


class UnreachableError(NotStoredError):
    """No connection, so no request was sent. The server may be down, or its address wrong.

    >>> str(UnreachableError("connection refused", address="127.0.0.1:1"))
    'connection refused [from 127.0.0.1:1]'
    """


class NoBrokerError(UnreachableError):
    """The name servers answer, but no broker is registered at them, so it is unknown whether the topic exists.

    The brokers are down or not started yet, or the name servers have just started.

    >>> issubclass(NoBrokerError, NotStoredError)
    True
    """


class ClosedError(NotStoredError):
    """The object is not open: use it inside its ``async with`` block.

    >>> issubclass(ClosedError, NotStoredError)
    True
    """


class PerhapsStoredError(RocketMQError):
    """The request was sent and no definite answer came back. A retry may store or change it twice.

    A message keeps its ``message_id`` over the attempts of one send, so a consumer can recognize duplicates by it.

    >>> isinstance(error_for(1, "NullPointerException", "127.0.0.1:10911"), PerhapsStoredError)
    True
    """


class NoReplyError(PerhapsStoredError, TimeoutError):
    """A request was sent, and no reply came within its ``ttl``. A consumer may still process the request.

    >>> issubclass(NoReplyError, TimeoutError)
    True
    """


class NotDeliveredError(PerhapsStoredError):
    """A broker could not give a reply to the client that asked: the client has gone, or does not answer the broker.

    No client waits for the reply any more, or can get it. It may be stored in the cluster's topic of replies.

    >>> issubclass(NotDeliveredError, PerhapsStoredError)
    True
    """


_USAGE: Final = frozenset(
    {
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
        ResponseCode.MESSAGE_ILLEGAL,
        ResponseCode.VERSION_NOT_SUPPORTED,
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.TOPIC_EXIST_ALREADY,
        ResponseCode.ILLEGAL_OPERATION,
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
        ResponseCode.CONTROLLER_INVALID_REQUEST,
        ResponseCode.CONTROLLER_BROKER_METADATA_NOT_EXIST,
        ResponseCode.CONTROLLER_INVALID_CLEAN_BROKER_METADATA,
        ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED,
    }
)
"""Refusals that are permanent until the call or a configuration changes."""
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
        ResponseCode.CONTROLLER_MASTER_NOT_AVAILABLE,
        ResponseCode.CONTROLLER_NOT_LEADER,
        ResponseCode.CONTROLLER_MASTER_STILL_EXIST,
        ResponseCode.CONTROLLER_ELECT_MASTER_FAILED,
    }
)
"""Temporary refusals. A code in neither set leaves the outcome open: brokers answer SYSTEM_ERROR both before and after
they have stored; 10, 11 and 12 mean stored; after CONSUME_MSG_TIMEOUT (207) a consumer has the message; 4 and 200 to
202 are ambiguous."""


_WHO: Final = (
    (
        re.compile(r"username cannot be null|No accessKey is configured"),
        (
            "This server wants to know who asks: give credentials (SDK: ClientOptions(credentials=Credentials("
            "access_key, secret_key)); mqadmin: conf/tools.yml or --credentials)."
        ),
    ),
    (
        re.compile(r"[Cc]heck signature failed|User:\S* is not found|No acl config for"),
        (
            "The server does not know the user of the credentials, or their secret key is not the user's password. "
            "Users are those of each broker: mqadmin getUser shows whether this one has it."
        ),
    ),
    (re.compile(r"User:\S* is disabled"), "Enable the user with mqadmin updateUser -s enable."),
    (
        re.compile(r"your clock is \d+ s "),
        (
            "Set the clock of this machine or of the server's (NTP); Credentials(..., replay_protection=False) signs "
            "without a time, where the server accepts that."
        ),
    ),
    (
        re.compile(r"\(authRequireReplayProtection\)"),
        "Use credentials with replay_protection=True, which is the default.",
    ),
)
"""Texts by which brokers refuse to accept a user (RocketMQ's ACL 2.0 and 1.0), and what to do."""
_WHAT: Final = re.compile(r"has no permission to access|No default permission for")
"""Texts by which they refuse what an accepted user wants."""
_ADVICE: Final = "Grant it with mqadmin createAcl; mqadmin explainAccess shows which policy decides."


def _refusal(text: str, address: str | None, request: int | None) -> NoPermissionError:
    """The error for code 16. Servers do not say which action they miss; the request code says it."""
    for pattern, advice in _WHO:
        if pattern.search(text):
            return CredentialsError(f"{text} {advice}", code=ResponseCode.NO_PERMISSION, address=address)
    if _WHAT.search(text):
        asked = "" if request is None else f" The request was {request_name(request)}."
        text = f"{text}{asked} {_ADVICE}"
    return NoPermissionError(text, code=ResponseCode.NO_PERMISSION, address=address)


def copied(error: RocketMQError) -> RocketMQError:
    """A copy of an error that several callers share: each raises its own instance, with the shared one as its cause."""
    own = type(error)(error.text, code=error.code, address=error.address)
    own.__cause__ = error
    return own


def request_name(code: int) -> str:
    """A request code for people.

    >>> request_name(31), request_name(99)
    ('GET_MIN_OFFSET (31)', '99')
    """
    return f"{RequestCode(code).name} ({int(code)})" if code in _REQUESTS else str(code)


_REQUESTS: Final = frozenset(int(code) for code in RequestCode)


def error_for(code: int, remark: str | None, address: str | None, request: int | None = None) -> RocketMQError:
    """The error for a reply whose code is not success; a code that is not listed gives PerhapsStoredError.

    ``request`` is the code of the request, for the text of a NoPermissionError.

    >>> type(error_for(17, "topic[x] not exist", "127.0.0.1:10911")).__name__
    'TopicNotFoundError'
    """
    text = remark or help_text(code) or f"the server answered with code {code}"
    kind: type[RocketMQError] = PerhapsStoredError
    if code == ResponseCode.NO_PERMISSION:
        return _refusal(text, address, request)
    if code == ResponseCode.TOPIC_NOT_EXIST:
        kind = TopicNotFoundError
    elif code in _USAGE:
        kind = UsageError
    elif code in _NOT_STORED:
        kind = NotStoredError
    return kind(text, code=code, address=address)
