"""Saves changes of the configuration made at run time, for the next start.

With ``-c FILE`` that file is edited in place: changed values stay in their lines, comments and order are preserved, and
new keys are appended. Without ``-c`` the changes go to ``config/broker.properties`` in the store, which every start
without ``-c`` reads.
"""

from collections.abc import Mapping

import trio

from trimq.broker.config import MessageStoreConfig, saved_changes_path
from trimq.broker.services.state_file import StateFileError, replace_file
from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.durable_files import read_whole
from trimq.remoting.config import properties
from trimq.remoting.config.configuration import Configuration


class ConfigFile:
    """The file that a configuration's changes are written to."""

    def __init__(self, configuration: Configuration, disk: Disk) -> None:
        self._disk = disk
        root = configuration.section(MessageStoreConfig).root
        self.path = (configuration.file or saved_changes_path(root)).absolute()
        self._lock = trio.Lock()

    async def save(self, changes: Mapping[str, str]) -> None:
        """Write changed keys. Raises StateFileError: the file is unchanged then, and the caller must not apply them."""
        # Reading and replacing are one step under the lock: two changes at the same time would lose one of them.
        async with self._lock:
            try:
                data = await self._disk.run(read_whole, self._disk, str(self.path))
                text = properties.replace_values(properties.decode(data or b""), changes)
                with trio.CancelScope(shield=True):
                    await self._disk.run(replace_file, self._disk, str(self.path), text.encode())
            except OSError as error:
                raise StateFileError(f"{self.path} cannot be written: {error.strerror}") from error
