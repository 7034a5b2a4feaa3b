"""mqadmin 5.5.0 over TLS with the credentials of tools.yml: users and policies, and the commands of every day.

The commands on users and policies run against brokers of both peers, and must print the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.interop.harness import probe
from tests.interop.harness.drivers import Admin, mqadmin, unique
from tests.interop.harness.security import ADMINISTRATOR, allow, create_user, java_client_options, secured
from tests.interop.harness.servers import Cluster, Peer, chosen_peer, running_cluster
from tests.interop.test_mqadmin import FAILURE, rows
from tests.tls_certificates import Certificates, certificates

__all__ = ["certificates"]

pytestmark = pytest.mark.xdist_group("security admin")

#: With this key, and over TLS, TriMQ's broker tells a Super user the passwords, as Apache's always does.
PASSWORDS = {"authReturnPasswords": "superOverTls"}
PASSWORD = "canary-of-a-user"
CHANGED = "canary-of-a-change"

GET_USER = 3004


@dataclass(frozen=True)
class Side:
    """A cluster with users over TLS, and mqadmin for it as its administrator."""

    cluster: Cluster
    admin: Admin
    directory: Path
    certificates: Certificates

    @property
    def broker(self) -> str:
        return self.cluster.broker.address

    def run(self, command: str, *words: str) -> str:
        """Run a command on the broker; its output without what differs from run to run: addresses, stack traces."""
        printed = self.admin.run(command, "-b", self.broker, *words).replace(self.broker, "BROKER")
        return "\n".join(line.rstrip() for line in printed.splitlines() if not line.startswith(("\tat ", "\t... ")))

    def must(self, command: str, *words: str) -> str:
        printed = self.admin.run(command, *words)
        assert FAILURE not in printed, printed
        return printed


def _side(
    peer: Peer, directory: Path, certificates: Certificates, passwords: Mapping[str, str] = PASSWORDS
) -> Iterator[Side]:
    security = secured(certificates, "enforcing", access_control=True)
    options = java_client_options(certificates, certificates.client)
    properties = passwords if peer == "trimq" else {}
    with (
        running_cluster(directory / "cluster", peer=peer, security=security, properties=properties) as cluster,
        mqadmin(cluster, directory / "mqadmin", options=options, user=ADMINISTRATOR) as admin,
    ):
        yield Side(cluster, admin, directory, certificates)


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[Side]:
    yield from _side(chosen_peer(), tmp_path_factory.mktemp("chosen"), certificates)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[Side]:
    yield from _side("apache", tmp_path_factory.mktemp("original"), certificates)


USERS = [
    ("createUser", "-u", "alice", "-p", PASSWORD),
    ("createUser", "-u", "alice", "-p", PASSWORD),
    ("createUser", "-u", "chief", "-p", PASSWORD, "-t", "Super"),
    ("getUser", "-u", "alice"),
    ("getUser", "-u", "chief"),
    ("getUser", "-u", "missing"),
    ("listUser",),
    ("listUser", "-f", "li"),
    ("listUser", "-f", "missing"),
    ("updateUser", "-u", "alice", "-p", CHANGED),
    ("updateUser", "-u", "alice", "-s", "disable"),
    ("getUser", "-u", "alice"),
    ("updateUser", "-u", "alice", "-s", "enable"),
    ("updateUser", "-u", "alice", "-t", "Super"),
    ("getUser", "-u", "alice"),
    ("updateUser", "-u", "alice", "-t", "Normal"),
    ("updateUser", "-u", "missing", "-p", PASSWORD),
    ("deleteUser", "-u", "chief"),
    ("deleteUser", "-u", "chief"),
    ("getUser", "-u", "chief"),
    ("listUser",),
]

POLICIES = [
    ("createAcl", "-s", "User:alice", "-r", "Topic:a,Group:b", "-a", "Pub,Sub", "-i", "10.0.0.0/8,::1", "-d", "Allow"),
    ("createAcl", "-s", "User:missing", "-r", "Topic:a", "-a", "Pub", "-d", "Allow"),
    ("getAcl", "-s", "User:alice"),
    ("updateAcl", "-s", "User:alice", "-r", "Topic:a", "-a", "Get,Create", "-d", "Deny"),
    ("getAcl", "-s", "User:alice"),
    ("createAcl", "-s", "User:alice", "-r", "Topic:pre*,Topic:*,*", "-a", "all", "-d", "allow"),
    ("getAcl", "-s", "User:alice"),
    ("listAcl",),
    ("listAcl", "-s", "ali"),
    ("listAcl", "-s", "missing"),
    ("listAcl", "-r", "pre"),
    ("listAcl", "-s", "ali", "-r", "Group:b"),
    ("createAcl", "-s", "User:alice", "-r", "Topic:bad", "-a", "Any", "-d", "Allow"),
    ("createAcl", "-s", "User:alice", "-r", "Topic:bad", "-a", "Pub", "-d", "Perhaps"),
    ("deleteAcl", "-s", "User:alice", "-r", "Topic:a"),
    ("deleteAcl", "-s", "User:alice", "-r", "Topic:never"),
    ("getAcl", "-s", "User:alice"),
    ("deleteAcl", "-s", "User:alice"),
    ("getAcl", "-s", "User:alice"),
    ("deleteAcl", "-s", "User:alice"),
    ("getAcl", "-s", "User:missing"),
    ("listAcl",),
    ("createAcl", "-s", "User:alice", "-r", "Topic:a", "-a", "Pub", "-d", "Allow"),
    ("deleteUser", "-u", "alice"),
    ("getAcl", "-s", "User:alice"),
    ("listAcl",),
]


#: Refused by both with the same code; TriMQ's text also says which part is wrong.
REFUSED = [
    ("createAcl", "-s", "User:alice", "-r", "Topic:bad", "-a", "Fly", "-d", "Allow"),
    ("createAcl", "-s", "User:alice", "-r", "Topic:bad", "-a", "Pub", "-i", "1.2.3", "-d", "Allow"),
]


@pytest.mark.timeout(400, func_only=True)  # 90 commands, each with a client of its own that starts and ends
def test_users_and_policies_as_with_the_original(chosen: Side, original: Side) -> None:
    """Each command prints the same: what it did, the tables with users and policies, and the refusals."""
    commands = [*USERS, *POLICIES]
    with ThreadPoolExecutor(2) as beside:
        ours, theirs = beside.map(lambda side: [side.run(*words) for words in commands], (chosen, original))
    printed = zip(commands, ours, theirs, strict=True)
    different = [one for one in printed if one[1] != one[2]]
    assert not different, "\n".join("\n".join(map(str, one)) for one in different)
    for side in (chosen, original):
        create_user(side.broker, "alice", PASSWORD)
    for command, *words in REFUSED:
        assert "CODE: 16  DESC: The " in chosen.run(command, *words)
        assert "CODE: 16  DESC: The " in original.run(command, *words)


def test_a_type_that_is_neither_super_nor_normal(chosen: Side) -> None:
    """Apache's broker makes a Normal user of it, and says nothing."""
    user = unique("odd")
    printed = chosen.run("createUser", "-u", user, "-p", PASSWORD, "-t", "Emperor")
    made = user in chosen.must("listUser", "-b", chosen.broker)
    assert (FAILURE in printed, made) == ((False, True) if chosen_peer() == "apache" else (True, False))


def test_commands_of_every_day(chosen: Side) -> None:
    """Over TLS, and with the credentials of tools.yml at name server and broker."""
    topic = unique("AdminSecure")
    assert [row[:3] for row in rows(chosen.must("clusterList"))] == [["DefaultCluster", "broker-a", "0"]]
    chosen.must("updateTopic", "-c", "DefaultCluster", "-t", topic, "-r", "4", "-w", "4")
    assert topic in chosen.must("topicList").split()
    assert "broker-a" in chosen.must("topicRoute", "-t", topic)
    assert "SEND_OK" in chosen.must("sendMessage", "-t", topic, "-p", "by mqadmin")
    assert sum(int(row[3]) for row in status_rows(chosen, topic)) == 1
    chosen.must("updateSubGroup", "-c", "DefaultCluster", "-g", unique("AdminGroup"))
    chosen.must("deleteTopic", "-c", "DefaultCluster", "-t", topic)
    assert topic not in chosen.must("topicList").split()


def status_rows(side: Side, topic: str) -> list[list[str]]:
    """Broker, queue, smallest and largest offset of each queue."""
    return [row[:4] for row in rows(side.must("topicStatus", "-t", topic)) if row[0] == "broker-a"]


def test_a_whole_cluster(chosen: Side) -> None:
    """With -c the commands go to the brokers that the name server has, and changes hold at once."""
    user, broker = unique("cluster-user"), chosen.broker
    words = ("-c", "DefaultCluster")
    assert f"create user to {broker} success." in chosen.must("createUser", *words, "-u", user, "-p", PASSWORD)
    printed = chosen.must("createAcl", *words, "-s", f"User:{user}", "-r", "Cluster:*", "-a", "Get", "-d", "Allow")
    assert f"create acl to {broker} success." in printed
    assert rows(chosen.must("getUser", *words, "-u", user))[0][0] == user
    assert [row[2] for row in rows(chosen.must("getAcl", *words, "-s", f"User:{user}"))] == ["Cluster:*"]
    assert user in chosen.must("listUser", *words)
    assert f"User:{user}" in chosen.must("listAcl", *words)
    asks = asking(chosen, user, PASSWORD)
    assert asks() == 0
    chosen.must("updateUser", *words, "-u", user, "-p", CHANGED)
    assert (asks(), asking(chosen, user, CHANGED)()) == (16, 0)
    asks = asking(chosen, user, CHANGED)
    chosen.must("updateUser", *words, "-u", user, "-s", "disable")
    assert asks() == 16
    chosen.must("updateUser", *words, "-u", user, "-s", "enable")
    assert asks() == 0
    chosen.must("deleteAcl", *words, "-s", f"User:{user}", "-r", "Cluster:*")
    assert asks() == 16
    chosen.must("createAcl", *words, "-s", f"User:{user}", "-r", "Cluster:*", "-a", "Get", "-d", "Allow")
    assert asks() == 0
    chosen.must("deleteUser", *words, "-u", user)
    assert asks() == 16


def test_users_and_policies_are_copied(
    chosen: Side, original: Side, tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> None:
    """copyUser and copyAcl to a broker of the same kind and to Apache's: the copy signs with the same password."""
    copied, stays = (create_user(chosen.broker, unique(name), PASSWORD).access_key for name in ("copied", "stays"))
    for user in (copied, stays):
        allow(chosen.broker, user, "Cluster:DefaultCluster", ["Get"])
    allow(chosen.broker, copied, "Topic:a", ["Pub", "Sub"], "Deny")
    directory = tmp_path_factory.mktemp("second")
    with contextmanager(_side)(chosen_peer(), directory, certificates, passwords={}) as second:
        for target in (second, original):
            between = ("-f", chosen.broker, "-t", target.broker)
            chosen.must("updateUser", "-b", chosen.broker, "-u", copied, "-p", PASSWORD)
            chosen.must("copyUser", *between, "-u", copied)
            assert asking(target, copied, PASSWORD)() == 16, "it has no policies yet"
            chosen.must("copyAcl", *between, "-s", f"User:{copied}")
            assert asking(target, copied, PASSWORD)() == 0
            chosen.must("updateUser", "-b", chosen.broker, "-u", copied, "-p", CHANGED)
            chosen.must("copyUser", *between, "-u", copied)
            assert (asking(target, copied, PASSWORD)(), asking(target, copied, CHANGED)()) == (16, 0)
            assert target.run("getAcl", "-s", f"User:{copied}") == chosen.run("getAcl", "-s", f"User:{copied}")
            assert stays not in target.must("listUser", "-b", target.broker)
        # The second broker returns no passwords: nothing can be copied from it.
        if second.cluster.broker.peer == "trimq":
            create_user(second.broker, "hidden", PASSWORD)
            printed = chosen.admin.run("copyUser", "-f", second.broker, "-t", chosen.broker, "-u", "hidden")
            assert "hidden" not in chosen.must("listUser", "-b", chosen.broker), printed


def asking(side: Side, user: str, password: str) -> Callable[[], int]:
    """A function that asks the broker as a user whether there is a user, and returns the code of the reply."""
    context = side.cluster.broker.security.access.context
    access = probe.Access(context, probe.Credentials(user, password))
    return lambda: probe.call(side.broker, GET_USER, {"username": user}, access=access).code


def test_users_who_may_not(chosen: Side) -> None:
    """mqadmin as a user without policies, and with a wrong secret key, shows the broker's refusal."""
    user = create_user(chosen.broker, unique("stranger"), PASSWORD)
    options = java_client_options(chosen.certificates, chosen.certificates.client)
    wrong = probe.Credentials(ADMINISTRATOR.access_key, "wrong")
    for name, who, text in (("policies", user, "has no permission"), ("wrong", wrong, "check signature failed")):
        directory = chosen.directory / f"mqadmin-{name}"
        with mqadmin(chosen.cluster, directory, options=options, user=who) as admin:
            printed = admin.run("createUser", "-b", chosen.broker, "-u", unique("never"), "-p", PASSWORD)
        assert (FAILURE in printed, "CODE: 16" in printed, text in printed) == (True, True, True), printed
    assert "never" not in chosen.must("listUser", "-b", chosen.broker)


def test_a_user_who_may_change_others_is_not_above_a_super_user(chosen: Side) -> None:
    user = create_user(chosen.broker, unique("deputy"), PASSWORD)
    allow(chosen.broker, user.access_key, "Cluster:DefaultCluster", ["Update", "Get"])
    options = java_client_options(chosen.certificates, chosen.certificates.client)
    with mqadmin(chosen.cluster, chosen.directory / "mqadmin-deputy", options=options, user=user) as admin:
        made = unique("made")
        assert "success" in admin.run("createUser", "-b", chosen.broker, "-u", made, "-p", PASSWORD)
        for words in (
            ("createUser", "-u", unique("never"), "-p", PASSWORD, "-t", "Super"),
            ("updateUser", "-u", made, "-t", "Super"),
            ("updateUser", "-u", ADMINISTRATOR.access_key, "-p", PASSWORD),
            ("deleteUser", "-u", ADMINISTRATOR.access_key),
        ):
            printed = admin.run(words[0], "-b", chosen.broker, *words[1:])
            assert FAILURE in printed, words
            assert "by super user" in printed, printed
    assert made in chosen.must("listUser", "-b", chosen.broker)


def test_replies_leave_passwords_out(
    chosen: Side, tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> None:
    """TriMQ's default, and on a plain connection always: Apache's broker tells each password."""
    if chosen_peer() == "apache":
        pytest.skip("Apache's broker tells passwords")
    directory = tmp_path_factory.mktemp("plain")
    security = secured(access_control=True)
    with (
        running_cluster(directory / "cluster", security=security, properties=PASSWORDS) as cluster,
        mqadmin(cluster, directory / "mqadmin", user=ADMINISTRATOR) as admin,
    ):
        create_user(cluster.broker.address, "alice", PASSWORD)
        printed = admin.run("listUser", "-b", cluster.broker.address)
        assert {row[0]: row[1] for row in rows(printed)} == dict.fromkeys(
            ("administrator", "alice", "inner-client"), "null"
        )
        reply = probe.ask(cluster.broker.address, GET_USER, {"username": "alice"})
        assert "password" not in reply.json()
