"""Errors of the library obstore as those of object_store.py. Their texts say what happened, without any secret."""

import re
from typing import Final

from obstore.exceptions import AlreadyExistsError, PermissionDeniedError, PreconditionError, UnauthenticatedError

from trimq.broker.store.tiered.bucket.object_store import ChangedError
from trimq.remoting.config.properties import without_password

_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>(\w+)</Code>")
_QUERY: Final = re.compile(r"\?\S*")
_QUOTED: Final = re.compile(r'"[^"]*"')
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
_REFUSED: Final = ("401", "403")
_LONGEST: Final = 200


def as_os_error(error: Exception, name: str) -> OSError:
    """What a call at an object of this name raises instead of ``error``."""
    text = str(error)
    if any(sign in text for sign in _NO_BUCKET):
        # Not FileNotFoundError, which says that the object does not exist, and that another one may be written.
        return OSError(f"{name} cannot be reached: the bucket does not exist")
    match error:
        case FileNotFoundError():
            return FileNotFoundError(f"{name} is not in the bucket")
        case AlreadyExistsError():
            return FileExistsError(f"{name} is in the bucket already")
        case PreconditionError():
            return ChangedError(f"{name} was changed meanwhile")
        case _:
            status = _STATUS.search(text)
            reason = _reason(text, status.group(1) if status else "")
            # A listing that is refused has the library's general error.
            if isinstance(error, PermissionDeniedError | UnauthenticatedError) or (
                status and status.group(1) in _REFUSED
            ):
                return PermissionError(f"the object store refuses access to {name}: {reason}")
            return OSError(f"the object store has failed at {name}: {reason}")


def _reason(text: str, status: str) -> str:
    """What the server or the library said, in short: bodies of errors and URLs can have keys and signatures in them."""
    if status:
        code = _CODE.search(text)
        return f"HTTP status {status}{' ' + code.group(1) if code else ''}"
    return _QUOTED.sub('"..."', _QUERY.sub("", without_password(text.partition("\n")[0])))[:_LONGEST]
