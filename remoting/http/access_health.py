"""Notes of the health about who may do what."""

from collections.abc import Iterator
from typing import Final

from trimq.remoting.auth.config import AuthConfig
from trimq.remoting.auth.followed_users import FollowedUsers
from trimq.remoting.http.health import Reason

ACCESS: Final = "access"
USERS_NOT_READ: Final = "access_users_not_read"


def access_notes(config: AuthConfig, followed: FollowedUsers | None = None) -> Iterator[Reason]:
    """Who may do what: "open" while requests need no signature; and whether followed users are those of their file."""
    yield Reason(ACCESS, config.summary)
    if followed is not None and followed.failure:
        yield Reason(USERS_NOT_READ, f"users and policies are as they were before: {followed.failure}")
