"""Base of all typed headers: attributes in snake_case, wire names in RocketMQ's camelCase, bounded integers."""

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

I32: TypeAlias = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
"""A Java int."""
I64: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""A Java long."""


class Header(Struct, kw_only=True, rename="camel", gc=False):
    """Base of the typed headers. A field without a default is mandatory on the wire."""


class Empty(Header):
    """A header without fields."""
