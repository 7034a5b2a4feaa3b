"""Options of mqadmin for TLS, before the command: ``mqadmin --tls --tls-ca ca.pem topicList``.

Their variables are those of the servers' keys, so that one environment serves both. There is no option for a password:
other users of the machine see command lines.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from trimq.client import Tls

_META: Final = "trimq.tls"
_PASSWORD: Final = "TRIMQ_TLS_CLIENT_KEY_PASSWORD"  # noqa: S105 - the name of a variable

_Function: TypeAlias = Callable[..., Any]

_OPTIONS: Final = (
    click.option(
        "--tls/--no-tls",
        "tls",
        default=None,
        envvar="TRIMQ_TLS_ENABLE",
        help="Connect with TLS. Default: if another option of TLS is given.",
    ),
    click.option(
        "--tls-ca",
        metavar="FILE",
        envvar="TRIMQ_TLS_CLIENT_TRUST_CERT_PATH",
        help="CA certificates of the servers, in PEM. Default: those of the system.",
    ),
    click.option(
        "--tls-cert", metavar="FILE", envvar="TRIMQ_TLS_CLIENT_CERT_PATH", help="Certificate of this client, in PEM."
    ),
    click.option(
        "--tls-key", metavar="FILE", envvar="TRIMQ_TLS_CLIENT_KEY_PATH", help="Its key, in PEM. Default: --tls-cert."
    ),
    click.option(
        "--tls-key-password-file",
        metavar="FILE",
        envvar="TRIMQ_TLS_CLIENT_KEY_PASSWORD_FILE",
        help=f"File with the key's password, which only its owner can read. Or the variable {_PASSWORD}.",
    ),
    click.option(
        "--tls-verify/--tls-no-verify",
        default=True,
        envvar="TRIMQ_TLS_CLIENT_AUTH_SERVER",
        help="Verify the servers' certificates. Without that, anything can be read and changed on the way.",
    ),
    click.option(
        "--tls-verify-host-name/--tls-no-verify-host-name",
        default=True,
        envvar="TRIMQ_TLS_CLIENT_VERIFY_HOST_NAME",
        help="Verify that a certificate is for the server's host.",
    ),
)


def tls_options(function: _Function) -> _Function:
    """Adds the options; ``function`` passes their values to ``keep`` or ``take_tls``."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def take_tls(options: dict[str, Any]) -> "Tls | bool":
    """What the options say, which are removed from ``options``; False: without TLS.

    Raises click.UsageError if they do not fit together.
    """
    wanted, verify, verify_host_name = (options.pop(name) for name in ("tls", "tls_verify", "tls_verify_host_name"))
    ca, cert, key, password_file = (
        options.pop(name) for name in ("tls_ca", "tls_cert", "tls_key", "tls_key_password_file")
    )
    if wanted is None:
        wanted = any((ca, cert, key, password_file)) or any(map(_is_given, ("tls_verify", "tls_verify_host_name")))
    if not wanted:
        return False
    from trimq.client import Tls  # noqa: PLC0415 - only with TLS

    try:
        return Tls(
            ca_file=ca,
            cert_file=cert,
            key_file=key,
            key_password=os.environ.get(_PASSWORD, "") if cert else "",
            key_password_file=password_file,
            verify_server=verify,
            verify_host_name=verify_host_name,
        )
    except ValueError as error:
        raise click.UsageError(f"TLS: {error}") from None


def _is_given(name: str) -> bool:
    """Whether the command line has the option. A variable may be there for the servers of this environment only."""
    context = click.get_current_context(silent=True)
    return context is not None and context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def keep(context: click.Context, options: dict[str, Any]) -> None:
    """Remember what the options say for the command. Raises click.UsageError if they do not fit together."""
    context.meta[_META] = take_tls(options)


def kept() -> "Tls | bool":
    """How the running command connects; False: without TLS."""
    tls: Tls | bool = click.get_current_context().meta.get(_META, False)
    return tls
