"""TriMQ: Apache RocketMQ's broker, name server and client SDK in Python on trio.

The public names of the SDK can be imported from here. They are loaded on first use, so that ``import trimq.protocol``
does not load the SDK::

    from trimq import Consumer, Message, Producer

In a checkout the packages are folders beside this one, linked into it; in a wheel they are inside it. The import names
are the same in both: ``trimq.client`` and so on.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimq.client import *  # noqa: F403 - exactly the names in trimq.client.__all__


def __getattr__(name: str) -> Any:
    client = import_module("trimq.client")  # ``from trimq import client`` would call this function again
    if name == "__all__":
        return client.__all__
    if name not in client.__all__:
        raise AttributeError(f"module 'trimq' has no attribute {name!r}")
    value = getattr(client, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module("trimq.client").__all__})
