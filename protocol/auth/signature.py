"""The signature of a request, as every official client makes it, for ACL 1.0 and 2.0 alike.

``Signature = base64(HMAC-SHA1(secret, values of the ext fields in the order of their keys + body))``. It covers the
values and the body, not the names of the fields, the request code or a time: see docs/security.md for what that means.

Source: RocketMQ's AclUtils, AclClientRPCHook and DefaultAuthenticationContextBuilder.
"""

import base64
import hashlib
import hmac
from collections.abc import Mapping
from typing import Any, Final

ACCESS_KEY: Final = "AccessKey"
SECURITY_TOKEN: Final = "SecurityToken"  # noqa: S105 - the name of a field
SIGNATURE: Final = "Signature"
_IDENTITY: Final = frozenset({ACCESS_KEY, SECURITY_TOKEN, SIGNATURE})
UNIQUE_KEY_QUERY: Final = "_UNIQUE_KEY_QUERY"
LAST_UNSIGNED_QUERY: Final = 393
"""V4_9_3: clients up to this version add ``_UNIQUE_KEY_QUERY`` after they have signed."""


def content(fields: Mapping[str, str], body: bytes | bytearray | memoryview, version: int) -> bytes:
    """The bytes that are signed.

    ``fields`` are all ext fields as text, a Signature among them is left out; ``body`` is the body as sent (compressed,
    or joined to a batch), empty if there is none; ``version`` is the one in the request's header.

    >>> content({"topic": "T", "AccessKey": "me", "Signature": "x"}, b"hello", 505)
    b'meThello'
    """
    keys = sorted(fields) if all(map(str.isascii, fields)) else sorted(fields, key=_java_order)
    left_out = (SIGNATURE, UNIQUE_KEY_QUERY) if version <= LAST_UNSIGNED_QUERY else (SIGNATURE,)
    text = "".join([fields[key] for key in keys if key not in left_out])
    try:
        head = text.encode()
    except UnicodeEncodeError:
        # Java puts two halves of a pair together, even if they come from two values, and writes ? for a lone half.
        head = _utf16(text).decode("utf-16-le", "surrogatepass").encode("utf-8", "replace")
    return head + body if body else head


def sign(secret: str, fields: Mapping[str, str], body: bytes | bytearray | memoryview, version: int) -> str:
    """The value of the field Signature: 28 characters. Parameters as for ``content``.

    >>> sign("secret", {"AccessKey": "me"}, b"", 505)
    'KS3YlfExjjAdnLiwiIeeNX5KG7k='
    """
    return text_of(hmac.digest(secret_bytes(secret), content(fields, body, version), hashlib.sha1))


def without_signature(fields: Mapping[str, str]) -> dict[str, str]:
    """The ext fields of a request that is passed on to another, without what its sender has signed it with.

    Who gets a signature with the values under it could send them again: as another request too, since the signature
    does not cover the code.

    >>> without_signature({"clientId": "c", "AccessKey": "me", "Signature": "x"})
    {'clientId': 'c'}
    """
    return {name: value for name, value in fields.items() if name not in _IDENTITY}


def text_of(digest: bytes) -> str:
    """A digest (20 bytes) as it is sent: base64."""
    return base64.b64encode(digest).decode()


def is_same(signature: str | None, digest: bytes) -> bool:
    """Whether ``signature`` is the text of ``digest``. Takes the same time whichever byte differs."""
    given = (signature or "").encode("utf-8", "replace")
    return hmac.compare_digest(base64.b64encode(digest), given)


def is_valid(
    secret: str, signature: str | None, fields: Mapping[str, str], body: bytes | bytearray | memoryview, version: int
) -> bool:
    """Whether ``signature`` is the one that ``sign`` makes. False for None and for any text that is not base64."""
    return is_same(signature, hmac.digest(secret_bytes(secret), content(fields, body, version), hashlib.sha1))


def mac_of(secret: bytes) -> Any:
    """An HMAC with a secret, before any content: a copy of it, for each request, costs half as much as a new one."""
    return hmac.new(secret, digestmod=hashlib.sha1)


def secret_bytes(secret: str) -> bytes:
    """A secret as the key of an HMAC."""
    return secret.encode("utf-8", "replace")


def _java_order(key: str) -> bytes:
    return key.encode("utf-16-be", "surrogatepass")


def _utf16(text: str) -> bytes:
    return text.encode("utf-16-le", "surrogatepass")
