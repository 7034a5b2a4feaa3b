"""Options of mqadmin for TLS, before the command: ``mqadmin --tls --tls-ca ca.pem topicList``.

Their variables are those of the servers' keys, so that one environment serves both. There is no option for a password:
other users of the machine see command lines.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import click

if TYPE_CHECKING:
    from trimq.remoting.tls.client_contexts import Tls

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
    """Adds the options; ``function`` passes their values to ``keep``."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def keep(context: click.Context, options: dict[str, Any]) -> None:
    """Remember the options' values for the command. Raises click.UsageError if they do not fit together."""
    files = [options[name] for name in ("tls_ca", "tls_cert", "tls_key", "tls_key_password_file")]
    if not (any(files) if options["tls"] is None else options["tls"]):
        return
    from trimq.remoting.tls.client_contexts import Tls  # noqa: PLC0415 - only with TLS

    try:
        context.meta[_META] = Tls(
            ca_file=options["tls_ca"],
            cert_file=options["tls_cert"],
            key_file=options["tls_key"],
            key_password=os.environ.get(_PASSWORD, "") if options["tls_cert"] else "",
            key_password_file=options["tls_key_password_file"],
            verify_server=options["tls_verify"],
            verify_host_name=options["tls_verify_host_name"],
        )
    except ValueError as error:
        raise click.UsageError(f"TLS: {error}") from None


def kept() -> "Tls | bool":
    """How the running command connects; False: without TLS."""
    tls: Tls | bool = click.get_current_context().meta.get(_META, False)
    return tls
