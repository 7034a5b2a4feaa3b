"""A minimal HTTP client for tests in the server's event loop; no library hides the bytes that the server sent."""

from typing import NamedTuple

import trio


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: str


async def get(address: tuple[str, int], path: str, method: str = "GET") -> Answer:
    async with await trio.open_tcp_stream(*address) as stream:
        await stream.send_all(f"{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n".encode())
        data = b"".join([chunk async for chunk in stream])
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = b"".join(_chunks(body))
    return Answer(int(status.split()[1]), headers, body.decode())


def _chunks(data: bytes) -> list[bytes]:
    chunks = []
    while data:
        size, _, data = data.partition(b"\r\n")
        chunks.append(data[: int(size, 16)])
        data = data[int(size, 16) + 2 :]
    return chunks
