"""Administration of users and their policies (RocketMQ's ACL 2.0)."""

from collections.abc import Callable
from typing import TypeVar

from msgspec import Struct

from trimq.client.admin.base import AdminBase
from trimq.client.errors import NotStoredError, UsageError
from trimq.protocol.auth.body import (
    decode_acl,
    decode_acls,
    decode_user,
    decode_users,
    encode_acl,
    encode_user_change,
)
from trimq.protocol.auth.model import Acl, PolicyType, User, UserChange
from trimq.protocol.codes import RequestCode
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.auth import (
    AclRequestHeader,
    DeleteAclRequestHeader,
    ListAclsRequestHeader,
    ListUsersRequestHeader,
    UserRequestHeader,
)

T = TypeVar("T")


class UserAdmin(AdminBase):
    """Users and policies. They are those of one broker: a cluster has them on each of its brokers, masters and slaves.

    The types are those of ``trimq.protocol.auth.model``. Names and policies are checked by the broker, which refuses
    with NoPermissionError (16), as RocketMQ does: for a name that exists, for one that does not, and so on.
    """

    async def create_user(self, address: str, username: str, change: UserChange) -> None:
        """Creates a user; ``change`` must have a password. The default is a Normal user that is enabled.

        >>> async def example(admin: "Admin", password: str) -> None:
        ...     await admin.create_user("127.0.0.1:10911", "orders-service", UserChange(password=password))
        """
        await self._change_user(address, RequestCode.AUTH_CREATE_USER, username, change)

    async def update_user(self, address: str, username: str, change: UserChange) -> None:
        """Changes what is given in ``change``: password, type, or whether the user is enabled.

        >>> async def example(admin: "Admin") -> None:
        ...     change = UserChange(user_status=UserStatus.DISABLE)
        ...     await admin.update_user("127.0.0.1:10911", "orders-service", change)
        """
        await self._change_user(address, RequestCode.AUTH_UPDATE_USER, username, change)

    async def _change_user(self, address: str, code: int, username: str, change: UserChange) -> None:
        body = encode_user_change(username, change)
        await self.client.request(address, code, UserRequestHeader(username=username), body)

    async def delete_user(self, address: str, username: str) -> None:
        """Deletes a user with its policies. Nothing happens if there is none.

        >>> async def example(admin: "Admin") -> None:
        ...     await admin.delete_user("127.0.0.1:10911", "orders-service")
        """
        await self.client.request(address, RequestCode.AUTH_DELETE_USER, UserRequestHeader(username=username))

    async def user(self, address: str, username: str) -> User | None:
        """A user; None if there is none. Its password is empty unless the broker returns passwords.

        >>> async def example(admin: "Admin") -> bool:
        ...     user = await admin.user("127.0.0.1:10911", "orders-service")
        ...     return user is not None and user.is_enabled
        """
        header = UserRequestHeader(username=username)
        return await self._asked(address, RequestCode.AUTH_GET_USER, header, decode_user)

    async def users(self, address: str, part: str | None = None) -> list[User]:
        """All users, or those with ``part`` in their names. For passwords see ``user``.

        >>> async def example(admin: "Admin") -> list[str]:
        ...     return [user.username for user in await admin.users("127.0.0.1:10911")]
        """
        header = ListUsersRequestHeader(filter=part)
        return await self._asked(address, RequestCode.AUTH_LIST_USER, header, decode_users)

    async def create_acl(self, address: str, acl: Acl) -> None:
        """Adds the entries of ``acl`` to the policies of its subject: one for the same resource is replaced.

        >>> async def example(admin: "Admin") -> None:
        ...     entry = PolicyEntry(Resource.topic("Orders"), (Action.PUB,), Decision.ALLOW)
        ...     acl = Acl("User:orders-service", (Policy(PolicyType.CUSTOM, (entry,)),))
        ...     await admin.create_acl("127.0.0.1:10911", acl)
        """
        await self._change_acl(address, RequestCode.AUTH_CREATE_ACL, acl)

    async def update_acl(self, address: str, acl: Acl) -> None:
        """As ``create_acl``, for a subject that has policies.

        >>> async def example(admin: "Admin", acl: Acl) -> None:
        ...     await admin.update_acl("127.0.0.1:10911", acl)
        """
        await self._change_acl(address, RequestCode.AUTH_UPDATE_ACL, acl)

    async def _change_acl(self, address: str, code: int, acl: Acl) -> None:
        await self.client.request(address, code, AclRequestHeader(subject=acl.subject), encode_acl(acl))

    async def delete_acl(
        self, address: str, subject: str, resource: str | None = None, policy_type: PolicyType | None = None
    ) -> None:
        """Deletes the policies of a subject, or the entry for one resource. ``policy_type`` None means Custom.

        >>> async def example(admin: "Admin") -> None:
        ...     await admin.delete_acl("127.0.0.1:10911", "User:orders-service", "Topic:Orders")
        """
        header = DeleteAclRequestHeader(
            subject=subject, resource=resource, policy_type=None if policy_type is None else policy_type.value
        )
        await self.client.request(address, RequestCode.AUTH_DELETE_ACL, header)

    async def acl(self, address: str, subject: str) -> Acl | None:
        """The policies of a subject; None if it has none. Raises NoPermissionError if there is no such user.

        >>> async def example(admin: "Admin") -> bool:
        ...     return await admin.acl("127.0.0.1:10911", "User:orders-service") is not None
        """
        header = AclRequestHeader(subject=subject)
        return await self._asked(
            address, RequestCode.AUTH_GET_ACL, header, lambda body: decode_acl(body, subject) if body else None
        )

    async def acls(self, address: str, subject: str | None = None, resource: str | None = None) -> list[Acl]:
        """The policies of all subjects with ``subject`` in their names, of resources with ``resource`` in theirs.

        >>> async def example(admin: "Admin") -> list[str]:
        ...     return [acl.subject for acl in await admin.acls("127.0.0.1:10911", resource="Topic:Orders")]
        """
        header = ListAclsRequestHeader(subject_filter=subject, resource_filter=resource)
        return await self._asked(address, RequestCode.AUTH_LIST_ACL, header, decode_acls)

    async def auth_file(self, address: str) -> bytes:
        """The file of users and policies of a TriMQ broker, encrypted with its authKeyFile; only for a Super.

        >>> async def example(admin: "Admin") -> bytes:
        ...     return await admin.auth_file("127.0.0.1:10911")
        """
        return bytes((await self.client.request(address, RequestCode.AUTH_GET_FILE, {})).body)

    async def _asked(self, address: str, code: int, header: Struct, decode: Callable[[bytes], T]) -> T:
        reply = await self.client.request(address, code, header)
        try:
            return decode(bytes(reply.body))
        except RemotingError as error:
            raise NotStoredError(f"the reply cannot be decoded: {error.remark}", address=address) from None


def usable(make: Callable[[], T]) -> T:
    """What ``make`` returns. A RemotingError of it, by which the model refuses a text, becomes a UsageError."""
    try:
        return make()
    except RemotingError as error:
        raise UsageError(error.remark or str(error)) from None
