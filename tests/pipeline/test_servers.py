"""Options of the tables for the servers: TLS, and no option that shows a secret."""

import pickle
import socket
import threading
from contextlib import closing
from pathlib import Path

import anyio
import pytest

from tests.client.verifying import SECRET, USER, problem
from trimq.client import Credentials, Tls, UsageError
from trimq.client.message import MessageQueue
from trimq.pipeline.options import OptionError, Options
from trimq.pipeline.topics.direct_connection import DirectConnection
from trimq.pipeline.topics.planning import Range
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


# -- credentials -----------------------------------------------------------------------------------------------------


def credentials_at(path: Path) -> Servers:
    path.write_text(f"accessKey: {USER}\nsecretKey: {SECRET}\n")
    return of(credentialsFile=str(path))


def test_credentials_are_read_by_each_task_and_shown_in_no_plan(tmp_path: Path) -> None:
    # guards Spark's plans, logs and pages: they have the options, and what is sent to executors
    servers = credentials_at(tmp_path / "credentials")
    assert servers.credentials() == Credentials(USER, SECRET)
    assert of().credentials() is None
    assert SECRET not in repr(servers)
    assert SECRET.encode() not in pickle.dumps(servers)
    read = ReadSettings.of(Options(HERE | {"credentialsFile": str(tmp_path / "credentials"), "topics": "T"}))
    assert SECRET.encode() not in pickle.dumps(read)

    async def made() -> Credentials | None:
        return open_client(servers).options.credentials

    assert anyio.run(made) == Credentials(USER, SECRET)
    with pytest.raises(UsageError, match="cannot be read"):
        of(credentialsFile=str(tmp_path / "absent")).credentials()


def test_a_secret_given_as_an_option_is_refused_without_showing_it() -> None:
    with pytest.raises(
        OptionError, match=r"option secretKey = '\*\*\*': expected an option of .*credentialsFile"
    ) as caught:
        ReadSettings.of(Options(HERE | {"secretKey": SECRET, "topics": "T"}))
    assert SECRET not in f"{caught.value!r}{caught.value.value}"
    assert SECRET not in str(pickle.loads(pickle.dumps(caught.value)))


def test_pulls_over_a_connection_of_the_task_are_signed(tmp_path: Path) -> None:
    # guards the fast path of reading, which makes its frames itself
    frames: list[bytes] = []

    def serve() -> None:
        connection, _ = server.accept()
        with connection, connection.makefile("rb") as stream:
            size = int.from_bytes(stream.read(4), "big")
            frames.append(stream.read(size))

    span = Range(MessageQueue(topic="T", broker_name="a", queue_id=0), 0, 100)
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        connection = DirectConnection(address, "g", span, 20, credentials_at(tmp_path / "credentials"))
        assert list(connection.reply_batches()) == []
        thread.join(30)
    assert [problem(frame, {USER: SECRET}) for frame in frames] == [None]
