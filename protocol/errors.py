"""Protocol errors, distinguished by effect: a broken frame closes the connection, a bad request gets an error reply."""

from trimq.protocol.codes import HELP, ResponseCode


class FrameError(Exception):
    """A malformed frame: invalid length or header. The connection it was received on has to be closed.

    Or a command that cannot be sent: too long for a frame, or with a text or number that its encoding has no form for.
    """


class RemotingError(Exception):
    """A request that ends in an error reply.

    ``code`` is the response code, ``remark`` a text for people.
    """

    def __init__(self, code: int, remark: str) -> None:
        super().__init__(code, remark)
        self.code = int(code)
        self.remark = remark

    def __str__(self) -> str:
        return f"{code_name(self.code)} ({self.code}): {self.remark}"


def code_name(code: int) -> str:
    """``TOPIC_NOT_EXIST`` for 17; the digits of an unknown code."""
    try:
        return ResponseCode(code).name
    except ValueError:
        return str(code)


def help_text(code: int) -> str:
    """The meaning of a response code and what to do about it; empty for an unknown code."""
    return HELP.get(code, "")
