"""TriMQ: Apache RocketMQ's broker, name server and client SDK in Python on trio.

The names of the SDK are here too, imported when they are first used, so that ``import trimq.protocol`` loads none of
it::

    from trimq import Consumer, Message, Producer

In a checkout the folders are beside this one and linked into it; in a wheel they are inside it. The import name is the
same, ``trimq.client`` and so on.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimq.client import *  # noqa: F403 - what trimq.client.__all__ names, and nothing else


def __getattr__(name: str) -> Any:
    client = import_module("trimq.client")  # a from-import would ask here for the name "client"
    if name == "__all__":
        return client.__all__
    if name not in client.__all__:
        raise AttributeError(f"module 'trimq' has no attribute {name!r}")
    value = getattr(client, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module("trimq.client").__all__})
