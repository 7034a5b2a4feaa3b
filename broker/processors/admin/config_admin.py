"""The broker's configuration: changing it (25) and showing it (26)."""

from trimq.broker.services.config_file import ConfigFile
from trimq.broker.services.registration import BrokerOuterAPI
from trimq.broker.services.state_file import StateFileError
from trimq.protocol.body import DataVersion, encode_json
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.remoting.config.configuration import Configuration, parse_changes
from trimq.remoting.config.properties import ConfigError
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handler_table import HandlerTable


class ConfigAdminProcessor:
    """Changes options, in the running broker and for the next start, and shows them."""

    def __init__(
        self,
        *,
        configuration: Configuration,
        config_file: ConfigFile,
        registration: BrokerOuterAPI,
        started_wall_ms: int,
    ) -> None:
        """``started_wall_ms`` is the timestamp of the data version that replies carry."""
        self._configuration = configuration
        self._config_file = config_file
        self._registration = registration
        self._started_wall_ms = started_wall_ms

    def register(self, table: HandlerTable) -> None:
        """Register the handlers of this family."""
        table.register(RequestCode.UPDATE_BROKER_CONFIG, self.update_config)
        table.register(RequestCode.GET_BROKER_CONFIG, self.config)

    async def update_config(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """UPDATE_BROKER_CONFIG (25): apply all changes or none, in the running broker and for the next start.

        NO_PERMISSION for protected keys, INVALID_PARAMETER for invalid values and for keys that need a restart. Unknown
        keys are ignored, as in RocketMQ.
        """
        try:
            changes = parse_changes(bytes(command.body).decode("utf-8", "replace"))
        except ConfigError as error:
            raise RemotingError(ResponseCode.SYSTEM_ERROR, f"the body is not properties text: {error}") from None
        refusals = self._configuration.check_change(changes)
        if refusals:
            text = "nothing was changed: " + "; ".join(f"{refusal.key} {refusal.reason}" for refusal in refusals)
            forbidden = any(refusal.protected for refusal in refusals)
            raise RemotingError(ResponseCode.NO_PERMISSION if forbidden else ResponseCode.INVALID_PARAMETER, text)
        known = {option.key for option in self._configuration.options()}
        # The file first: if it cannot be replaced, the running configuration is unchanged, and the reply says so.
        try:
            await self._config_file.save({key: value for key, value in changes.items() if key in known})
        except StateFileError as error:
            raise RemotingError(ResponseCode.SYSTEM_ERROR, f"nothing was changed: {error}") from None
        if "brokerPermission" in self._configuration.change(changes):
            await self._registration.registered()  # routes carry the permission: reply once the name servers have it
        return command.reply()

    def config(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """GET_BROKER_CONFIG (26): the effective configuration as properties text, sorted."""
        version = DataVersion(counter=self._configuration.counter, timestamp=self._started_wall_ms)
        return command.reply(
            header={"version": encode_json(version).decode()}, body=self._configuration.properties_text().encode()
        )
