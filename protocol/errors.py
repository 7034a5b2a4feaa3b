"""Errors of the protocol, told apart by what they cost: a broken frame its connection, a bad request an error reply."""

from trimq.protocol.codes import HELP, ResponseCode


class FrameError(Exception):
    """A frame that cannot be trusted: bad length, bad header. The connection it came from has to be closed."""


class RemotingError(Exception):
    """A request that ends in an error reply.

    ``code`` is the response code, ``remark`` the text for the person who reads the reply.
    """

    def __init__(self, code: int, remark: str) -> None:
        super().__init__(code, remark)
        self.code = int(code)
        self.remark = remark

    def __str__(self) -> str:
        return f"{code_name(self.code)} ({self.code}): {self.remark}"


def code_name(code: int) -> str:
    """``TOPIC_NOT_EXIST`` for 17; the digits for a code that is not known."""
    try:
        return ResponseCode(code).name
    except ValueError:
        return str(code)


def help_text(code: int) -> str:
    """What a response code means and what to do about it; empty for a code that is not known."""
    return HELP.get(code, "")
