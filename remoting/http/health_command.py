"""The command ``health``: whether the server of a configuration is ready. For containers without curl."""

import http.client
from typing import Final

import msgspec

from trimq.remoting.config.configuration import Configuration
from trimq.remoting.http.health import Readiness
from trimq.remoting.http.web_config import WebConfig

NOT_SERVED: Final = "health is not served: set healthPort (or metricsExporterType=PROM) in the configuration"


def check(configuration: Configuration, timeout: float) -> tuple[int, list[str]]:
    """The exit code, 0 for ready, else 1, and lines to print: the reasons and notes."""
    address = configuration.section(WebConfig).health_address
    if address is None or not address[1]:
        return 1, [NOT_SERVED]
    host, port = address
    try:
        readiness = ask(host, port, timeout)
    except (OSError, http.client.HTTPException, msgspec.MsgspecError) as error:
        return 1, [f"not ready: no valid answer from {host}:{port}: {error}"]
    notes = [f"{note.code}: {note.text}" for note in readiness.notes]
    if readiness.ready:
        return 0, ["ready", *notes]
    return 1, [f"not ready: {reason.code}: {reason.text}" for reason in readiness.reasons] + notes


def ask(host: str, port: int, timeout: float) -> Readiness:
    """The answer of /readyz. Raises OSError, HTTPException and MsgspecError."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        connection.request("GET", "/readyz")
        return msgspec.json.decode(connection.getresponse().read(), type=Readiness)
    finally:
        connection.close()
