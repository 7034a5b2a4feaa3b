"""RunTimeChanges: what a request changes of a running server's configuration, and of its file."""

from collections.abc import Callable
from pathlib import Path

import trio

from trimq.protocol.codes import ResponseCode
from trimq.protocol.errors import RemotingError
from trimq.remoting.config.configuration import Configuration, parse_changes
from trimq.remoting.config.properties import ConfigError, decode, replace_values
from trimq.remoting.config.state_file import replace_file


class RunTimeChanges:
    """Makes changes one after the other. They are written to the file that was read; without one to ``store_path``."""

    def __init__(self, configuration: Configuration, store_path: Callable[[], str]) -> None:
        self._configuration = configuration
        self._store_path = store_path
        self._saving = trio.Lock()

    @staticmethod
    def parsed(body: bytes | memoryview) -> dict[str, str]:
        """The changes in the body of a request. Raises RemotingError."""
        try:
            return parse_changes(bytes(body).decode("utf-8", "replace"))
        except ConfigError as error:
            raise RemotingError(ResponseCode.INVALID_PARAMETER, str(error)) from error

    async def make(self, changes: dict[str, str]) -> dict[str, str]:
        """Make all changes or none. Returns the keys whose values differ now. Raises RemotingError.

        Unknown keys are skipped, as in RocketMQ.
        """
        configuration = self._configuration
        async with self._saving:
            # Checked under the lock, and written before they are applied: a change that is refused or cannot be
            # written must have no effect.
            self._check(changes)
            known = {option.key for option in configuration.options()}
            new = {key: text for key, text in changes.items() if key in known and configuration.value(key) != text}
            if not new:
                return {}
            path = configuration.file or Path(self._store_path())
            try:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(_save, path, new)
            except OSError as error:
                text = f"the change could not be written to {error.filename or path}: {error.strerror}"
                raise RemotingError(ResponseCode.SYSTEM_ERROR, text) from error
            return configuration.change(new)

    def _check(self, changes: dict[str, str]) -> None:
        refusals = self._configuration.check_change(changes)
        if refusals:
            protected = any(refusal.protected for refusal in refusals)
            raise RemotingError(
                ResponseCode.NO_PERMISSION if protected else ResponseCode.INVALID_PARAMETER,
                "; ".join(f"{refusal.key} {refusal.reason}" for refusal in refusals),
            )


def _save(path: Path, changes: dict[str, str]) -> None:
    text = decode(path.read_bytes()) if path.exists() else ""
    replace_file(path, replace_values(text, changes).encode())
