"""Errors of the library obstore as those of object_store.py. Their texts say what happened, without any secret."""

from obstore.exceptions import AlreadyExistsError, PermissionDeniedError, PreconditionError, UnauthenticatedError

from trimq.broker.store.tiered.bucket.object_store import ChangedError
from trimq.protocol.bucket_access import is_no_bucket, is_refused, reason_of


def as_os_error(error: Exception, name: str) -> OSError:
    """What a call at an object of this name raises instead of ``error``."""
    text = str(error)
    if is_no_bucket(text):
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
            reason = reason_of(text)
            # A listing that is refused has the library's general error.
            if isinstance(error, PermissionDeniedError | UnauthenticatedError) or is_refused(text):
                return PermissionError(f"the object store refuses access to {name}: {reason}")
            return OSError(f"the object store has failed at {name}: {reason}")
