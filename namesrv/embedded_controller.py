"""The controller in the name server's process (enableControllerInNamesrv)."""

from trimq.controller import server
from trimq.controller.config import load_controller
from trimq.namesrv.start_error import StartError
from trimq.remoting.config.configuration import ConfigError
from trimq.remoting.config.sources import Flags
from trimq.remoting.network import Network
from trimq.remoting.runtime.clock import Clock


def bind_controller(
    file: str, bind_address: str, shared: Flags, clock: Clock, network: Network
) -> server.ControllerManager:
    """A controller with the configuration of ``file``; if that is empty, its defaults, ``bind_address`` and ``shared``.

    ``shared`` are the name server's settings of TLS, users and limits of clients. It serves once it runs. Environment
    variables do not count: they are the name server's. Raises StartError.
    """
    flags = {} if file else {**shared, "bindAddress": (bind_address, "the name server")}
    try:
        found = server.ControllerManager(load_controller(file or None, flags), clock, network)
        found.bind()
    except (server.StartError, ConfigError) as error:
        raise StartError(f"the controller in this process: {error}") from error
    return found
