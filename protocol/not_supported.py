"""The reply to a request without a handler, on either side of a connection."""

from trimq.protocol.codes import NOT_SUPPORTED, ResponseCode
from trimq.protocol.command import RemotingCommand


def not_supported(command: RemotingCommand) -> RemotingCommand:
    """The reply to a request code without a handler. It names the feature if the code is one of RocketMQ's."""
    feature = NOT_SUPPORTED.get(command.code)
    text = f"{feature} ({command.code}) are not supported" if feature else f" request type {command.code} not supported"
    return command.reply(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, text)
