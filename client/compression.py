"""Compression of message bodies: zlib (always there), lz4 frames and zstd (the ``compression`` extra).

Which one was used stands in the message's sysFlag: bit 0 says compressed, bits 8 to 10 say how. Old clients write only
bit 0 and mean zlib (RocketMQ's CompressionType).
"""

import zlib
from typing import Final, Literal, TypeAlias

from trimq.client.errors import UsageError
from trimq.protocol import sysflag

Compression: TypeAlias = Literal["zlib", "lz4", "zstd"]
"""Names of the ways to compress a body."""

_FLAGS: Final[dict[str, int]] = {
    "zlib": sysflag.COMPRESSED | sysflag.COMPRESSION_ZLIB,
    "lz4": sysflag.COMPRESSED | sysflag.COMPRESSION_LZ4,
    "zstd": sysflag.COMPRESSED | sysflag.COMPRESSION_ZSTD,
}


def compress(body: bytes, how: Compression, level: int = 5) -> tuple[bytes, int]:
    """The compressed body, and the sysFlag bits that tell of it.

    Raises UsageError where the library for ``how`` is not installed.

    >>> data, flags = compress(b"a" * 1000, "zlib")
    >>> len(data) < 50, hex(flags)
    (True, '0x301')
    """
    if how == "zlib":
        return zlib.compress(body, level), _FLAGS[how]
    try:
        if how == "lz4":
            import lz4.frame  # type: ignore[import-untyped] # noqa: PLC0415 - an extra, wanted by few

            return lz4.frame.compress(body), _FLAGS[how]
        if how == "zstd":
            import zstandard  # noqa: PLC0415 - an extra, wanted by few

            return zstandard.ZstdCompressor(level=level).compress(body), _FLAGS[how]
    except ImportError:
        raise _missing(how) from None
    raise UsageError(f"compression {how!r} is none of {', '.join(_FLAGS)}")


def decompress(body: bytes, sys_flag: int) -> bytes:
    """The body as it was before compression; ``body`` itself where ``sys_flag`` does not say that it is compressed.

    Raises UsageError where the library is not installed, ValueError where the bytes are not what the flag says.

    >>> decompress(*compress(b"hello", "zlib"))
    b'hello'
    """
    if not sys_flag & sysflag.COMPRESSED:
        return body
    kind = sys_flag & sysflag.COMPRESSION_MASK
    try:
        if kind == sysflag.COMPRESSION_LZ4:
            import lz4.frame  # noqa: PLC0415 - an extra, wanted by few

            plain: bytes = lz4.frame.decompress(body)
            return plain
        if kind == sysflag.COMPRESSION_ZSTD:
            return _from_zstd(body)
        return zlib.decompress(body)
    except ImportError:
        raise _missing("lz4" if kind == sysflag.COMPRESSION_LZ4 else "zstd") from None
    except (zlib.error, RuntimeError) as error:
        raise ValueError(f"the compressed body cannot be read: {error}") from None


def _from_zstd(body: bytes) -> bytes:
    import zstandard  # noqa: PLC0415 - an extra, wanted by few

    # Java's stream writer leaves the size out of the frame, so the one-shot call does not do.
    stream = zstandard.ZstdDecompressor().decompressobj()
    try:
        plain = stream.decompress(body)
    except zstandard.ZstdError as error:
        raise RuntimeError(str(error)) from None
    if not stream.eof:
        raise RuntimeError("it ends too early")
    return plain


def _missing(how: str) -> UsageError:
    return UsageError(f"{how} needs a library that is not installed: pip install 'trimq[compression]'")
