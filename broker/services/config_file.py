"""Changes of the configuration at run time, kept for the next start.

With ``-c FILE`` the file itself is changed: the value in its line, comments and order as they were, new keys at the
end. Without one the changes go to ``config/broker.properties`` in the store, which is read at every start without
``-c``.
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
        """Write changed keys. Raises StateFileError; then the file is as it was, and the change must not be made."""
        async with self._lock:
            try:
                data = await self._disk.run(read_whole, self._disk, str(self.path))
                text = properties.replace_values(properties.decode(data or b""), changes)
                with trio.CancelScope(shield=True):
                    await self._disk.run(replace_file, self._disk, str(self.path), text.encode())
            except OSError as error:
                raise StateFileError(f"{self.path} cannot be written: {error.strerror}") from error
