"""Headers of users and policies (3001 to 3010).

As in RocketMQ no field is mandatory for the decoder: the broker checks them.
"""

from trimq.protocol.headers.base import Header


class UserRequestHeader(Header):
    """Only a user's name: 3001 (create), 3002 (update), 3003 (delete) and 3004 (get)."""

    username: str | None = None


class ListUsersRequestHeader(Header):
    """AUTH_LIST_USER (3005). ``filter`` is a part of the users' names; None or empty for all."""

    filter: str | None = None


class AclRequestHeader(Header):
    """Only a subject, ``User:name``: 3006 (create), 3007 (update) and 3009 (get)."""

    subject: str | None = None


class DeleteAclRequestHeader(Header):
    """AUTH_DELETE_ACL (3008). Without ``resource`` all policies of the subject; ``policy_type`` None means Custom."""

    subject: str | None = None
    policy_type: str | None = None
    resource: str | None = None


class ListAclsRequestHeader(Header):
    """AUTH_LIST_ACL (3010). Each filter is a part of the subject's or the resource's text; None or empty for all."""

    subject_filter: str | None = None
    resource_filter: str | None = None
