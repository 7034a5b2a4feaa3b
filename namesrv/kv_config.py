"""KVConfigManager: small settings by namespace and key, stored in a file (RocketMQ's KVConfigManager, kvConfig.json).

The file is ``{"configTable":{namespace:{key:value}}}``. A change becomes visible when the new file has replaced the old
one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import trio

from trimq.protocol import lenient_json
from trimq.protocol.body import encode_json
from trimq.remoting.config.properties import ConfigError
from trimq.remoting.config.state_file import replace_file

NAMESPACE_ORDER_TOPIC_CONFIG: Final = "ORDER_TOPIC_CONFIG"
"""Namespace of topic to orderTopicConf (``broker:queues;broker:queues``)."""


class KVConfigManager:
    """The table and its file. Readers see only values that are on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._table: dict[str, dict[str, str]] = {}
        self._lock = trio.Lock()

    def load(self) -> None:
        """Read the file; a missing file is an empty table. Raises ConfigError if it cannot be read or parsed."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(str(self._path), "", "", f"the file cannot be read: {error.strerror}") from error
        try:
            table = lenient_json.loads(data)["configTable"]
            self._table = {
                namespace: {key: str(value) for key, value in entries.items()} for namespace, entries in table.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(str(self._path), "", "", f"this is not a KV configuration file: {error!r}") from error

    def get(self, namespace: str, key: str) -> str | None:
        """A value, or None."""
        return self._table.get(namespace, {}).get(key)

    def namespace(self, namespace: str) -> Mapping[str, str] | None:
        """All keys of a namespace; None for a namespace that was never written."""
        return self._table.get(namespace)

    async def put(self, namespace: str, key: str, value: str) -> None:
        """Set a value; returns when it is on disk.

        Raises OSError if the file cannot be written; the table is unchanged then.
        """
        async with self._lock:
            await self._replace({**self._table, namespace: {**self._table.get(namespace, {}), key: value}})

    async def delete(self, namespace: str, key: str) -> None:
        """Delete a key if it exists; its namespace stays. Raises OSError as ``put`` does."""
        async with self._lock:
            entries = dict(self._table.get(namespace, {}))
            if entries.pop(key, None) is not None:
                await self._replace({**self._table, namespace: entries})

    async def _replace(self, table: dict[str, dict[str, str]]) -> None:
        data = encode_json({"configTable": table})
        # Shielded: the thread cannot be interrupted, and a cancelled wait would leave the file ahead of the table.
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(replace_file, self._path, data)
        self._table = table
