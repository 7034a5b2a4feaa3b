"""A broker with TLS and users, as documented: its image has what encrypts the passwords of users."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docker.daemon import ADDRESS, MAKE_SECONDS, Docker, job
from tests.docs.commands import ALL
from tests.interop.harness.waiting import wait_until
from trimq.client import ClientOptions, Credentials, Message, SendStatus, Tls
from trimq.client.errors import RocketMQError
from trimq.client.sync import Producer

pytestmark = [pytest.mark.partners, pytest.mark.timeout(700, func_only=True)]

OUTSIDE = f"{ADDRESS}:9876"


@dataclass(frozen=True)
class Guarded:
    """The broker, and the folder with the keys on this machine."""

    docker: Docker
    keys: Path

    def in_broker(self, *command: str) -> str:
        return self.docker.run("docker", "exec", self.docker.container("broker"), *command)

    def secrets(self) -> dict[str, str]:
        """The passwords of all users by name."""
        admin, inner = (json.loads((self.keys / f"{name}.json").read_text()) for name in ("admin", "inner"))
        return {
            "admin": admin["password"],
            "inner": inner["secretKey"],
            "shop": (self.keys / "shop").read_text().strip(),
        }

    def producer(self, user: str, secret: str) -> Producer:
        options = ClientOptions(tls=Tls(self.keys / "ca.pem"), credentials=Credentials(user, secret))
        return Producer("shop", namesrv=OUTSIDE, options=options)


@pytest.fixture
def guarded(image: Docker, tmp_path: Path) -> Iterator[Guarded]:
    keys = tmp_path / "keys"
    keys.mkdir()
    certificates = ALL["security certificates"].replace("DNS:mq1.example.org", f"DNS:broker,IP:{ADDRESS}")
    subprocess.run(["sh", "-euc", certificates], cwd=keys, check=True, capture_output=True)
    users = ("docker-compose", "-f", "docker/docker-compose.yml", "-f", "docker/docker-compose.users.yml")
    replaced = {" keys/": f" {keys}/", ">keys/": f">{keys}/", "<keys/": f"<{keys}/", "-C keys": f"-C {keys}"}
    try:
        replaced["localhost:10911"] = f"{ADDRESS}:10911"
        image.type_in("security docker", tmp_path, timeout=MAKE_SECONDS, replaced=replaced)
        yield Guarded(image, keys)
    finally:
        print(image.run(*users, "--profile", "single", "logs", "--tail=60"))
        image.run(*users, "--profile", "single", "down", "-v")


def sends(producer: Producer) -> bool:
    try:
        return producer.send(Message("orders", b"1 book")).status is SendStatus.SEND_OK
    except RocketMQError as error:
        if "NO_PERMISSION" not in str(error):
            raise
        return False


def test_users_of_the_page(guarded: Guarded) -> None:
    secrets = guarded.secrets()
    with guarded.producer("shop", secrets["shop"]) as producer:
        wait_until(lambda: sends(producer), "the name server follows the users of its broker")
        with pytest.raises(RocketMQError, match="User:shop has no permission to access Topic:others"):
            producer.send(Message("others", b"1 book"))
    with guarded.producer("shop", "wrong") as producer, pytest.raises(RocketMQError, match="check signature failed"):
        producer.send(Message("orders", b"2 books"))
    with pytest.raises(AssertionError, match="UnreachableError"):
        job("send", OUTSIDE, "orders", 1)  # neither TLS nor a user
    # The broker has no password in clear, and the administrator's is not needed any more.
    store = guarded.in_broker("cat", "/var/lib/trimq/store/config/auth.json")
    log = guarded.docker.run("docker", "logs", guarded.docker.container("broker"))
    assert {name: name in store for name in secrets} == dict.fromkeys(secrets, True)
    assert [name for name, secret in secrets.items() if secret in store or secret in log] == []
    assert sorted(guarded.in_broker("ls", "/etc/trimq").split()) == [
        "auth.key",
        "ca.pem",
        "inner.json",
        "server.key",
        "server.pem",
    ]
    assert guarded.in_broker("stat", "-c", "%a %U", "/etc/trimq", "/etc/trimq/auth.key").splitlines() == [
        "700 trimq",
        "600 trimq",
    ]
