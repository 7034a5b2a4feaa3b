"""How a table's tasks reach the servers: the options that reading and writing share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trimq.client import Credentials, Tls
from trimq.client.credentials_file import read_credentials
from trimq.client.errors import UsageError
from trimq.client.name_servers import parse_addresses
from trimq.pipeline.options import OptionError, Options

SERVER_OPTIONS: Final = (
    "namesrv",
    "credentialsFile",
    "tls",
    "tlsCaFile",
    "tlsCertFile",
    "tlsKeyFile",
    "tlsKeyPasswordFile",
    "tlsVerify",
    "tlsVerifyHostName",
)
"""There is none for a password or a secret key: Spark shows options, in plans and in its web pages."""
_FILES: Final = ("tlsCaFile", "tlsCertFile", "tlsKeyFile", "tlsKeyPasswordFile")
_NAMESRV: Final = "addresses of name servers: host:port, several separated by semicolons"


@dataclass(frozen=True, slots=True)
class Servers:
    """The name servers, and how to connect to them and to brokers; ``tls`` False: without TLS.

    ``credentials_file`` None: requests are not signed. The driver and each task read the file: no plan has its content.
    """

    namesrv: str
    tls: Tls | bool = False
    credentials_file: str | None = None

    @staticmethod
    def of(options: Options) -> "Servers":
        """The servers of a table. Raises OptionError.

        >>> Servers.of(Options({"namesrv": "127.0.0.1:9876"}))
        Servers(namesrv='127.0.0.1:9876', tls=False, credentials_file=None)
        """
        value = options.required("namesrv", _NAMESRV)
        try:
            addresses = ";".join(parse_addresses(value))
        except UsageError:
            raise OptionError("namesrv", value, _NAMESRV) from None
        return Servers(addresses, _tls(options), options.text("credentialsFile"))

    def credentials(self) -> Credentials | None:
        """What the file has. Blocks. Raises UsageError if it cannot be read, without its content."""
        return None if self.credentials_file is None else read_credentials(Path(self.credentials_file))


def _tls(options: Options) -> Tls | bool:
    given = [name for name in _FILES if options.has(name)]
    if not options.flag("tls", default=False):
        if given:
            raise OptionError(given[0], options.text(given[0]), "to be given with tls = true only")
        return False
    try:
        return Tls(
            ca_file=options.text("tlsCaFile"),
            cert_file=options.text("tlsCertFile"),
            key_file=options.text("tlsKeyFile"),
            key_password_file=options.text("tlsKeyPasswordFile"),
            verify_server=options.flag("tlsVerify", default=True),
            verify_host_name=options.flag("tlsVerifyHostName", default=True),
        )
    except ValueError as error:
        raise OptionError(given[0], options.text(given[0]), f"options that fit together ({error})") from None
