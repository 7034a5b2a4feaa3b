"""EtcdKv: etcd through its HTTP/JSON gateway, with httpx.

Keys and values are base64, 64-bit numbers are text. Source: etcd's rpc.proto, as the gateway maps it.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Final, cast

import httpx
import structlog
import trio

from trimq.controller.kv import Compare, Delete, Entry, KvError, Lease, Put, Snapshot

_log = structlog.get_logger("controller")

_CONNECT: Final = 0.5
_ANSWER: Final = 1.5
_LONGEST_LINE: Final = 1 << 20
_SILENCE: Final = 30.0
"""A watch that brings nothing for this many seconds is begun again, in case its connection is dead."""

_NOT_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class _LeaseNotFoundError(KvError):
    """A lease has ended. Nothing was done."""

    def __init__(self, text: str) -> None:
        super().__init__(text, sent=False)


@contextmanager
def _understood() -> Iterator[None]:
    """Raise KvError if an answer has not the fields that etcd's have."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise KvError(f"etcd answers what is not known: {type(error).__name__} {error}", sent=False) from error


def _text(value: str) -> str:
    return b64encode(value.encode()).decode()


def _plain(value: str) -> str:
    return b64decode(value).decode()


def _end(prefix: str) -> str:
    """The first key behind all that begin with ``prefix``, which ends with an ASCII character."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


class EtcdKv:
    """One cluster of etcd, at several endpoints: what the first one does not answer is asked of the next."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        """``endpoints``: http://host:port."""
        self._endpoints = list(endpoints)
        timeout = httpx.Timeout(_ANSWER, connect=_CONNECT)
        self._client = httpx.AsyncClient(timeout=timeout, trust_env=False)
        self._watches: dict[str, set[trio.CancelScope]] = {}

    async def _post(self, path: str, body: dict[str, Any], *, again: bool = True) -> dict[str, Any]:
        """Ask the endpoints in turn. ``again``: it may be done twice, so it may be asked of all. Raises KvError."""
        failure = "no endpoint"
        # A copy: other tasks change the order meanwhile, and each task has to ask every endpoint.
        for endpoint in tuple(self._endpoints):
            try:
                reply = await self._client.post(f"{endpoint}{path}", json=body)
                found = reply.json()
                if reply.status_code == httpx.codes.OK and isinstance(found, dict):
                    return found
                failure = f"{endpoint} answers {reply.status_code}: {reply.text[:200]}"
                if reply.status_code == httpx.codes.NOT_FOUND:
                    raise _LeaseNotFoundError(failure)
                sent = reply.status_code != httpx.codes.BAD_REQUEST
            except (httpx.HTTPError, ValueError) as error:
                failure = f"{endpoint}: {type(error).__name__} {error}".strip()
                sent = not isinstance(error, _NOT_SENT)
            self._leave(endpoint)
            if sent and not again:
                raise KvError(f"etcd does not answer: {failure}", sent=True)
        raise KvError(f"etcd does not answer: {failure}", sent=False)

    def _leave(self, endpoint: str) -> None:
        """Ask another endpoint first from now on, and end the watches of this one: it may be frozen or cut off."""
        for scope in tuple(self._watches.get(endpoint, ())):
            scope.cancel()
        if self._endpoints[0] == endpoint:
            self._endpoints.append(self._endpoints.pop(0))

    async def grant(self, ttl_ms: int) -> Lease:
        """See Kv. etcd counts whole seconds, and has a minimum of its own."""
        found = await self._post("/v3/lease/grant", {"TTL": str(-(-ttl_ms // 1000))})
        with _understood():
            return Lease(int(found["ID"]), int(found["TTL"]) * 1000)

    async def keep(self, lease: int) -> int:
        """See Kv.

        A member that led and was cut off renews leases that the new leader ends. So the answer counts only if, in a
        read that needs the majority, no other member has been elected since.
        """
        kept = await self._post("/v3/lease/keepalive", {"ID": str(lease)})
        with _understood():
            result = kept["result"]
            ttl_ms = int(result.get("TTL", 0)) * 1000
        if not ttl_ms:
            return 0
        read = await self._post("/v3/kv/range", {"key": _text("/"), "count_only": True})
        with _understood():
            if read["header"]["raft_term"] != result["header"]["raft_term"]:
                raise KvError("etcd has just elected another leader", sent=False)
        return ttl_ms

    async def range(self, prefix: str) -> Snapshot:
        """See Kv."""
        found = await self._post("/v3/kv/range", {"key": _text(prefix), "range_end": _text(_end(prefix))})
        with _understood():
            return Snapshot(
                int(found["header"]["revision"]),
                {
                    _plain(row["key"]): Entry(
                        _plain(row.get("value", "")), int(row["mod_revision"]), int(row.get("lease", 0))
                    )
                    for row in found.get("kvs", [])
                },
            )

    async def txn(self, compares: Sequence[Compare], changes: Sequence[Put | Delete]) -> bool:
        """See Kv. It is asked of one endpoint only, once it may have been done."""
        body = {
            "compare": [_condition(*compare) for compare in compares],
            "success": [_change(change) for change in changes],
        }
        try:
            found = await self._post("/v3/kv/txn", body, again=False)
        except _LeaseNotFoundError:
            return False
        return bool(found.get("succeeded", False))

    async def watch(self, prefix: str, revision: int, deleted: Callable[[str], None]) -> None:
        """See Kv. Returns when the stream ends, or is silent for long: the caller reads all again, and watches on."""
        request = {
            "create_request": {
                "key": _text(prefix),
                "range_end": _text(_end(prefix)),
                "start_revision": str(revision + 1),
                "filters": ["NOPUT"],
            }
        }
        endpoint = self._endpoints[0]
        watches = self._watches.setdefault(endpoint, set())
        with trio.CancelScope() as scope:
            watches.add(scope)
            try:
                await self._watch(endpoint, request, deleted)
            finally:
                watches.discard(scope)

    async def _watch(self, endpoint: str, request: dict[str, Any], deleted: Callable[[str], None]) -> None:
        timeout = httpx.Timeout(_ANSWER, connect=_CONNECT, read=_SILENCE)
        try:
            async with (
                self._client.stream("POST", f"{endpoint}/v3/watch", json=request, timeout=timeout) as reply,
                aclosing(cast("AsyncGenerator[bytes, None]", reply.aiter_bytes())) as chunks,
            ):
                buffer = b""
                async for chunk in chunks:
                    *lines, buffer = (buffer + chunk).split(b"\n")
                    if len(buffer) > _LONGEST_LINE:
                        raise KvError("etcd sends a line without an end", sent=False)
                    for line in filter(None, lines):
                        result = json.loads(line).get("result", {})
                        if result.get("canceled"):  # what was watched from is compacted, for example
                            return
                        for event in result.get("events", []):
                            if event.get("type") == "DELETE":
                                deleted(_plain(event["kv"]["key"]))
        except httpx.ReadTimeout:
            return
        except (httpx.HTTPError, AttributeError, KeyError, TypeError, ValueError) as error:
            self._leave(endpoint)
            raise KvError(f"etcd ends a watch: {endpoint}: {type(error).__name__} {error}", sent=False) from error

    async def run(self) -> None:
        """There is nothing to do in between."""

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def _condition(key: str, revision: int) -> dict[str, Any]:
    if not revision:
        return {"key": _text(key), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
    return {"key": _text(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}


def _change(change: Put | Delete) -> dict[str, Any]:
    if isinstance(change, Delete):
        return {"request_delete_range": {"key": _text(change.key)}}
    put = {"key": _text(change.key), "value": _text(change.value)}
    if change.lease:
        put["lease"] = str(change.lease)
    return {"request_put": put}
