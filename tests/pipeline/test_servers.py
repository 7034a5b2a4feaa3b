"""Options of the tables for the servers: TLS, and no option that shows a secret."""

import pickle

import anyio
import pytest

from trimq.client import Tls
from trimq.pipeline.options import OptionError, Options
from trimq.pipeline.topics.servers import SERVER_OPTIONS, Servers
from trimq.pipeline.topics.session import open_client
from trimq.pipeline.topics.settings import READ_OPTIONS, ReadSettings

HERE = {"namesrv": "127.0.0.1:9876"}


def of(**given: str) -> Servers:
    return Servers.of(Options(HERE | given))


def test_without_tls() -> None:
    assert of() == Servers("127.0.0.1:9876")
    assert of(tls="false").tls is False


def test_all_options() -> None:
    servers = of(
        tls="true",
        tlsCaFile="/ca",
        tlsCertFile="/cert",
        tlsKeyFile="/key",
        tlsKeyPasswordFile="/password",
        tlsVerify="false",
        tlsVerifyHostName="no",
    )
    wanted = Tls("/ca", "/cert", "/key", key_password_file="/password", verify_server=False, verify_host_name=False)
    assert servers.tls == wanted
    assert pickle.loads(pickle.dumps(servers)) == servers  # they go to the executors


def test_tls_verifies_by_default() -> None:
    assert of(tls="true").tls == Tls()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tls": "maybe"}, "option tls = 'maybe': expected true or false"),
        ({"tlsCaFile": "/ca"}, "option tlsCaFile = '/ca': expected to be given with tls = true only"),
        ({"tls": "true", "tlsKeyFile": "/key"}, "option tlsKeyFile = '/key': expected options that fit together"),
        ({"namesrv": ""}, "option namesrv is not given: expected addresses of name servers"),
        ({"namesrv": "a:b"}, "option namesrv = 'a:b': expected addresses of name servers"),
    ],
)
def test_options_that_are_refused(given: dict[str, str], text: str) -> None:
    with pytest.raises(OptionError, match=f"^{text}"):
        of(**given)


def test_readers_have_the_options() -> None:
    given = Options(HERE | {"tls": "true", "topics": "T"})
    assert ReadSettings.of(given).servers.tls == Tls()
    assert set(SERVER_OPTIONS) <= set(READ_OPTIONS)
    assert not [name for name in SERVER_OPTIONS if name.lower().endswith("password")]


@pytest.mark.parametrize("tls", ["true", "false"])
def test_the_client_of_a_task(tls: str) -> None:
    async def made() -> bool | Tls:
        return open_client(of(tls=tls)).options.tls

    assert anyio.run(made) == (Tls() if tls == "true" else False)
