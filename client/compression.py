"""Compression of message bodies: zlib (always available), lz4 frames and zstd (with the ``compression`` extra).

The message's sysFlag has bit 0 set for a compressed body, and the method in bits 8 to 10 (RocketMQ's CompressionType).
Old clients set only bit 0 and use zlib.
"""

import zlib
from typing import Final, Literal, TypeAlias

from trimq.client.errors import UsageError
from trimq.protocol import sysflag

Compression: TypeAlias = Literal["zlib", "lz4", "zstd"]
"""Names of the compression methods for a body."""

_FLAGS: Final[dict[str, int]] = {
    "zlib": sysflag.COMPRESSED | sysflag.COMPRESSION_ZLIB,
    "lz4": sysflag.COMPRESSED | sysflag.COMPRESSION_LZ4,
    "zstd": sysflag.COMPRESSED | sysflag.COMPRESSION_ZSTD,
}


def compress(body: bytes, how: Compression, level: int = 5) -> tuple[bytes, int]:
    """The compressed body, and the sysFlag bits that mark the method. ``level`` applies to zlib and zstd.

    Raises UsageError if ``how`` is unknown or its library is not installed.

    >>> data, flags = compress(b"a" * 1000, "zlib")
    >>> len(data) < 50, hex(flags)
    (True, '0x301')
    """
    if how == "zlib":
        return zlib.compress(body, level), _FLAGS[how]
    try:
        if how == "lz4":
            import lz4.frame  # type: ignore[import-untyped] # noqa: PLC0415 - an optional dependency

            return lz4.frame.compress(body), _FLAGS[how]
        if how == "zstd":
            import zstandard  # noqa: PLC0415 - an optional dependency

            return zstandard.ZstdCompressor(level=level).compress(body), _FLAGS[how]
    except ImportError:
        raise _missing(how) from None
    raise UsageError(f"compression {how!r} is none of {', '.join(_FLAGS)}")


def decompress(body: bytes, sys_flag: int) -> bytes:
    """The decompressed body; ``body`` itself if ``sys_flag`` does not mark it as compressed.

    Raises UsageError if the library is not installed, and ValueError if the bytes cannot be decompressed.

    >>> decompress(*compress(b"hello", "zlib"))
    b'hello'
    """
    if not sys_flag & sysflag.COMPRESSED:
        return body
    kind = sys_flag & sysflag.COMPRESSION_MASK
    try:
        if kind == sysflag.COMPRESSION_LZ4:
            import lz4.frame  # noqa: PLC0415 - an optional dependency

            plain: bytes = lz4.frame.decompress(body)
            return plain
        if kind == sysflag.COMPRESSION_ZSTD:
            return _from_zstd(body)
        return zlib.decompress(body)  # also for old clients, which set no method
    except ImportError:
        raise _missing("lz4" if kind == sysflag.COMPRESSION_LZ4 else "zstd") from None
    except (zlib.error, RuntimeError) as error:
        raise ValueError(f"the compressed body cannot be read: {error}") from None


def _from_zstd(body: bytes) -> bytes:
    import zstandard  # noqa: PLC0415 - an optional dependency

    # Java's stream writer does not put the content size into the frame, and the one-shot call requires it.
    stream = zstandard.ZstdDecompressor().decompressobj()
    try:
        plain = stream.decompress(body)
    except zstandard.ZstdError as error:
        raise RuntimeError(str(error)) from None
    if not stream.eof:
        raise RuntimeError("the frame is incomplete")
    return plain


def _missing(how: str) -> UsageError:
    return UsageError(f"{how} needs a library that is not installed: pip install 'trimq[compression]'")
