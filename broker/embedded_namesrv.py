"""The name server in the broker's process (embeddedNamesrvPort)."""

from typing import Final

from trimq.broker import addresses
from trimq.broker.auth.open_access import auth_directory
from trimq.broker.config import BrokerConfig, MessageStoreConfig
from trimq.broker.start_error import StartError
from trimq.namesrv import controller as namesrv
from trimq.namesrv.config import load_namesrv
from trimq.protocol.codes import RequestCode
from trimq.remoting.auth.config import AuthConfig
from trimq.remoting.auth.followed_config import auth_settings_of
from trimq.remoting.config.client_limits import limits_of
from trimq.remoting.config.configuration import ConfigError, Configuration, NettyServerConfig
from trimq.remoting.network import Network
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.tls.config import settings_of

NO_INNER_USER: Final = (
    "authenticationEnabled=true counts there too, and this broker could not register: set "
    'innerClientAuthenticationCredentialsFile to a file with {"accessKey":"...","secretKey":"..."}, made a user then'
)


def bind_namesrv(configuration: Configuration, clock: Clock, network: Network) -> tuple[namesrv.NamesrvController, str]:
    """A name server whose files are beside the broker's, and the address at which this process connects to it.

    The broker does not verify the name server's certificate, so it is the address of the bound socket: at the broker's
    advertised one, another server could answer. It serves once it runs. Raises StartError.
    """
    broker, server = configuration.section(BrokerConfig), configuration.section(NettyServerConfig)
    directory = configuration.section(MessageStoreConfig).config_path
    flags = settings_of(configuration) | auth_settings_of(configuration)
    settings = limits_of(configuration) | {
        "listenPort": str(broker.embedded_namesrv_port),
        "namedListenPorts": broker.embedded_namesrv_named_listen_ports,
        "bindAddress": server.bind_address,
        "kvConfigPath": str(directory / "kvConfig.json"),
        "configStorePath": str(directory / "namesrv.properties"),
    }
    auth = configuration.section(AuthConfig)
    if auth.authentication_enabled:
        if not auth.has_inner_user and RequestCode.REGISTER_BROKER not in auth.whitelisted:
            raise StartError(f"the name server in this process: {NO_INNER_USER}")
        # The broker's users, whose file is there when its ports are bound.
        settings["authConfigPath"] = auth_directory(configuration)
        settings["authClusterName"] = broker.broker_cluster_name
    try:
        found = namesrv.NamesrvController(
            load_namesrv(flags=flags | {key: (value, "embedded") for key, value in settings.items()}), clock, network
        )
        address = addresses.join(*addresses.reachable(found.bind()))
    except (namesrv.StartError, ConfigError) as error:
        raise StartError(
            f"the name server in this process: {error}. If one runs at that address already, pass it with -n"
        ) from error
    return found, address
