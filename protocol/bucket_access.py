"""How a bucket is reached, and what the texts of failed requests say: rules for the library obstore, without it."""

import re
from typing import Any, Final

ENDPOINT: Final = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[A-Za-z0-9._~/-]*)?")
"""The URL of an object store, without a user or a password."""
PREFIX: Final = re.compile(r"[A-Za-z0-9=_-][A-Za-z0-9.=_-]*(/[A-Za-z0-9=_-][A-Za-z0-9.=_-]*)*|")
"""What the names of all objects may begin with."""

_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>(\w+)</Code>")
_USER: Final = re.compile(r"(?<=://)\S*@")
_QUERY: Final = re.compile(r"\?\S*")
_QUOTED: Final = re.compile(r'"[^"]*"')
_REFUSED: Final = ("401", "403")
_LONGEST: Final = 200


def store_config(kind: str, name: str, *, endpoint: str, region: str, path_style: bool) -> dict[str, Any]:
    """The configuration of obstore's S3Store (``kind`` s3), GCSStore (gs) or AzureStore (az) for a bucket."""
    if kind == "gs":
        return {"base_url": endpoint} if endpoint else {}
    if kind == "az":
        return {"endpoint": endpoint} if endpoint else {}
    # The environment could switch conditional requests off, without which two brokers could own one bucket.
    config: dict[str, Any] = {"conditional_put": "etag", "virtual_hosted_style_request": not path_style}
    if endpoint:
        scheme, _, host = endpoint.partition("://")
        config["endpoint"] = endpoint if path_style else f"{scheme}://{name}.{host}"
    if region:
        config["region"] = region
    return config


def without_user(text: str) -> str:
    """The text with *** instead of the user and the password of a URL.

    >>> without_user("s3://key:secret@bucket")
    's3://***@bucket'
    """
    return _USER.sub("***@", text)


def is_no_bucket(text: str) -> bool:
    """Whether the text of an error says that there is no such bucket: obstore takes that for a missing object."""
    return any(sign in text for sign in _NO_BUCKET)


def is_refused(text: str) -> bool:
    """Whether the text of an error has the status of a request that is not allowed: obstore does not always say so."""
    status = _STATUS.search(text)
    return status is not None and status[1] in _REFUSED


def reason_of(text: str) -> str:
    """What the server or the library said, in short: bodies of errors and URLs can have keys and signatures in them."""
    status = _STATUS.search(text)
    if status:
        code = _CODE.search(text)
        return f"HTTP status {status[1]}{' ' + code[1] if code else ''}"
    return _QUOTED.sub('"..."', _QUERY.sub("", without_user(text.partition("\n")[0])))[:_LONGEST]
