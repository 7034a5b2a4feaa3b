"""Errors between two peers before there is a reply. Each states whether the request may have arrived."""


class RemotingTransportError(Exception):
    """No reply, because of a failure between the peers (RocketMQ's RemotingException).

    ``lasting`` is the text without what changes from one attempt to the next, such as a time. ``address`` is the
    peer. ``written`` is whether the request was passed to the operating system. If it is False, the peer has
    certainly not received it, and sending it again, to any peer, cannot have an effect twice.
    """

    def __init__(self, address: str, text: str, *, written: bool) -> None:
        super().__init__(text)
        self.lasting = text
        self.address = address
        self.written = written


class RemotingConnectError(RemotingTransportError):
    """No connection to ``address``; ``cause`` is the operating system's error (RemotingConnectException)."""

    def __init__(self, address: str, cause: OSError, detail: str = "") -> None:
        reason = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
        text = f"cannot connect to {address}: {reason}"
        super().__init__(address, text + detail, written=False)
        self.lasting = text
        self.cause = cause


class RemotingSendError(RemotingTransportError):
    """The connection ended before the reply had come (RemotingSendRequestException)."""

    def __init__(self, address: str, reason: str, *, written: bool) -> None:
        known = "it may have arrived" if written else "it was not sent"
        super().__init__(address, f"request to {address}: {reason}; {known}", written=written)
        self.reason = reason


class RemotingTimeoutError(RemotingTransportError):
    """No reply within ``timeout`` seconds (RemotingTimeoutException)."""

    def __init__(self, address: str, code: int, timeout: float, *, written: bool) -> None:
        known = "it was sent" if written else "it was not sent"
        super().__init__(
            address, f"no reply from {address} to request {code} within {timeout:g} s; {known}", written=written
        )
        self.code = code
        self.timeout = timeout
