"""Administration of users and policies: 3001 to 3010 (RocketMQ's AdminBrokerProcessor), and the file of both (13010).

They are served while authentication is on only: otherwise anybody could make an administrator for the time when it is.
A reply to a change is sent after the change is on disk. Replies have no passwords, see authReturnPasswords.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from trimq.protocol.auth.auth_file import SEAL
from trimq.protocol.auth.body import decode_acl, decode_user_change, encode_acl, encode_user
from trimq.protocol.auth.model import Acl, PolicyType, Resource, User, UserChange, checked_username
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.auth import (
    AclRequestHeader,
    DeleteAclRequestHeader,
    ListAclsRequestHeader,
    ListUsersRequestHeader,
    UserRequestHeader,
)
from trimq.remoting.auth.access import is_encrypted
from trimq.remoting.auth.auth_store import AuthStore, AuthStoreError
from trimq.remoting.auth.config import AuthConfig, ReturnPasswords
from trimq.remoting.auth.users import Users
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import Handler, Outcome
from trimq.remoting.server.large_reply import in_slices

_T = TypeVar("_T")

OFF = "users and policies are served while authenticationEnabled=true only"


class AuthAdminProcessor:
    """Creates, changes, shows and deletes users and policies."""

    def __init__(self, *, configuration: Configuration, users: Users | None) -> None:
        """``users`` is None if authentication is off."""
        self._configuration = configuration
        self._users = users
        self._changed: Callable[[], None] = lambda: None

    def register(self, table: HandlerTable) -> None:
        """Register the handlers of this family."""
        self._changed = table.gate.changed
        handlers: dict[RequestCode, Handler] = {
            RequestCode.AUTH_CREATE_USER: self.create_user,
            RequestCode.AUTH_UPDATE_USER: self.update_user,
            RequestCode.AUTH_DELETE_USER: self.delete_user,
            RequestCode.AUTH_GET_USER: self.get_user,
            RequestCode.AUTH_LIST_USER: self.list_users,
            RequestCode.AUTH_CREATE_ACL: self.write_acl,
            RequestCode.AUTH_UPDATE_ACL: self.write_acl,
            RequestCode.AUTH_DELETE_ACL: self.delete_acl,
            RequestCode.AUTH_GET_ACL: self.get_acl,
            RequestCode.AUTH_LIST_ACL: self.list_acls,
            RequestCode.AUTH_GET_FILE: self.get_file,
        }
        for code, handler in handlers.items():
            table.register(code, handler)

    # users

    async def create_user(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """AUTH_CREATE_USER (3001). The header's name counts, not the body's."""
        auth, by = self._asked(command)
        username, change = self._user_change(command)
        await self._change(auth, auth.create_user(username, change, by))
        return command.reply()

    async def update_user(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """AUTH_UPDATE_USER (3002): changes what the body gives."""
        auth, by = self._asked(command)
        username, change = self._user_change(command)
        await self._change(auth, auth.update_user(username, change, by))
        return command.reply()

    async def delete_user(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """AUTH_DELETE_USER (3003), with the policies. Succeeds if there is no such user."""
        auth, by = self._asked(command)
        username = checked_username(command.header(UserRequestHeader).username)
        await self._change(auth, auth.delete_user(username, by))
        return command.reply()

    def get_user(self, connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """AUTH_GET_USER (3004). No body if there is no such user."""
        auth, by = self._asked(command)
        user = auth.user(checked_username(command.header(UserRequestHeader).username))
        if user is None:
            return command.reply()
        return command.reply(body=encode_user(user, with_password=self._shows_passwords(connection, by)))

    def list_users(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """AUTH_LIST_USER (3005): the users with the filter's text in their name. No body if there are none."""
        auth, by = self._asked(command)
        with_password = self._shows_passwords(connection, by)
        found = auth.list_users(command.header(ListUsersRequestHeader).filter or "")
        return in_slices(
            connection, command, _array(found, lambda user: encode_user(user, with_password=with_password))
        )

    @staticmethod
    def _user_change(command: RemotingCommand) -> tuple[str, UserChange]:
        username = checked_username(command.header(UserRequestHeader).username)
        return username, decode_user_change(command.body)

    # policies

    async def write_acl(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """AUTH_CREATE_ACL (3006), AUTH_UPDATE_ACL (3007): both add entries, or replace those of the same resource."""
        auth, by = self._asked(command)
        acl = decode_acl(command.body, command.header(AclRequestHeader).subject)
        await self._change(auth, auth.write_acl(acl, by))
        return command.reply()

    async def delete_acl(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """AUTH_DELETE_ACL (3008): all policies of the subject, or the entry of a resource."""
        auth, by = self._asked(command)
        header = command.header(DeleteAclRequestHeader)
        policy_type = PolicyType.of(header.policy_type) if header.policy_type else PolicyType.CUSTOM
        if policy_type is None:
            raise RemotingError(ResponseCode.INVALID_PARAMETER, "The policyType is illegal; expected Custom or Default")
        resource = Resource.parse(header.resource) if header.resource and header.resource.strip() else None
        await self._change(auth, auth.delete_acl(header.subject or "", policy_type, resource, by))
        return command.reply()

    def get_acl(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """AUTH_GET_ACL (3009). No body if the user has no policies."""
        auth, _ = self._asked(command)
        acl = auth.get_acl(command.header(AclRequestHeader).subject or "")
        return command.reply(body=b"" if acl is None else encode_acl(acl))

    def list_acls(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """AUTH_LIST_ACL (3010): the policies of subjects with one filter's text, about resources with the other's."""
        auth, _ = self._asked(command)
        header = command.header(ListAclsRequestHeader)
        text = header.resource_filter or ""
        found = auth.list_acls(header.subject_filter or "")
        return in_slices(connection, command, _array(found, lambda acl: _encoded(acl, text)))

    def get_file(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """AUTH_GET_FILE (13010, TriMQ's own): the file of users and policies, encrypted and sealed, for a Super.

        So it may be sent on a plain connection, and who reads or changes it there learns no secret and changes nothing.
        No body if the field ``seal`` names what the broker has.
        """
        auth, by = self._asked(command)
        if not by.is_super:
            raise RemotingError(ResponseCode.NO_PERMISSION, "the file of users is for super users")
        try:
            data, seal = auth.sealed()
        except AuthStoreError as error:
            raise RemotingError(ResponseCode.NO_PERMISSION, str(error)) from None
        if command.ext_fields().get(SEAL) == seal:
            return command.reply()
        return in_slices(connection, command, iter([data]))

    # common

    def _asked(self, command: RemotingCommand) -> tuple[AuthStore, User]:
        """The store, and who asks. Raises RemotingError(NO_PERMISSION)."""
        if self._users is None:
            raise RemotingError(ResponseCode.NO_PERMISSION, OFF)
        by = self._users.access.user(command)
        if by is None:
            raise RemotingError(
                ResponseCode.NO_PERMISSION, "users and policies are shown and changed for users only: sign the request"
            )
        return self._users.store, by

    async def _change(self, auth: AuthStore, change: Awaitable[None]) -> None:
        """Make a change. Pulls that are held are checked again."""
        before = auth.generation
        try:
            await change
        finally:
            if auth.generation != before:
                self._changed()

    def _shows_passwords(self, connection: Connection, by: User) -> bool:
        how = self._configuration.section(AuthConfig).auth_return_passwords
        return how is ReturnPasswords.SUPER_OVER_TLS and by.is_super and is_encrypted(connection)


def _encoded(acl: Acl, text: str) -> bytes:
    kept = acl.about(text) if text else acl
    return b"" if kept is None else encode_acl(kept)


def _array(items: Iterable[_T], encode: Callable[[_T], bytes]) -> Iterator[bytes]:
    """The text of an array in pieces, without the items that have none; no text at all if none has."""
    lead = b"["
    for item in items:
        text = encode(item)
        yield lead + text if text else b""
        if text:
            lead = b","
    if lead == b",":
        yield b"]"
