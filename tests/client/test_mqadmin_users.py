"""mqadmin's commands for users and policies, and the SDK, against a broker that authenticates and authorizes."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import CliRunner, Result

from tests.canary import CANARY, permit
from tests.client.scripted import ScriptedBroker, scripted_broker
from tests.interop.harness.processes import ended_afterwards
from tests.interop.harness.servers import Broker, NameServer
from tests.interop.harness.waiting import POLL_INTERVAL
from tests.remoting.auth.stores import made_super
from trimq.client import (
    Admin,
    ClientOptions,
    Consumer,
    Credentials,
    CredentialsError,
    Message,
    NoPermissionError,
    NotStoredError,
    Producer,
)
from trimq.client.mqadmin import main
from trimq.client.mqadmin.users import first_found
from trimq.protocol.auth.auth_file import AUTH_FILE, encode
from trimq.protocol.auth.model import UserChange
from trimq.protocol.body import BrokerData, ClusterInfo, encode_json
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.remoting.auth.secrets import KeyRing, make_key_file, read_key_file

pytestmark = pytest.mark.timeout(90)

ROOT, ROOT_SECRET = "root", f"{CANARY}of-root"
SECRET = f"{CANARY}of-a-user"
RUNNER = CliRunner()


class Secured:
    """A name server, and a broker on which only ``ROOT`` may do anything at first."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        permit(directory / "broker" / "*.conf")
        permit(directory / "store" / "config" / "auth.json*")  # allowSecretsInClear
        self.name_server = NameServer("trimq", directory / "namesrv")
        stack.enter_context(ended_afterwards(self.name_server.process))
        self.name_server.start()
        self.broker = Broker(
            "trimq",
            directory / "broker",
            [self.name_server],
            store=directory / "store",
            properties={
                "authenticationEnabled": "true",
                "authorizationEnabled": "true",
                "initAuthenticationUser": json.dumps({"username": ROOT, "password": ROOT_SECRET}),
                "allowSecretsInClear": "true",
                "allowAdminOverPlain": "true",
            },
        )
        stack.enter_context(ended_afterwards(self.broker.process))
        self.broker.start()
        self.environment = {
            "TRIMQ_ACCESS_KEY": ROOT,
            "TRIMQ_SECRET_KEY": ROOT_SECRET,
            "NAMESRV_ADDR": self.name_server.address,
        }

    def run(self, *words: str, text: str | None = None) -> Result:
        return RUNNER.invoke(main, words, env=self.environment, input=text)

    def said(self, *words: str, text: str | None = None) -> str:
        result = self.run(*words, text=text)
        assert result.exit_code == 0, result.output
        assert SECRET not in result.output
        assert ROOT_SECRET not in result.output
        return result.output

    def answered(self, *words: str) -> Any:
        return json.loads(self.said(*words, "--json"))

    @property
    def at(self) -> tuple[str, str]:
        return "-b", self.broker.address


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with ExitStack() as stack:
        yield Secured(tmp_path_factory.mktemp("secured"), stack)


@pytest.fixture
def user(secured: Secured, name: str) -> str:
    secured.said("createUser", *secured.at, "-u", name, "-p", SECRET)
    return name


def options(user: str, secret: str = SECRET) -> ClientOptions:
    return ClientOptions(credentials=Credentials(user, secret))


# -- users -----------------------------------------------------------------------------------------------------------


def test_the_life_of_a_user(secured: Secured, name: str) -> None:
    at = (*secured.at, "-u", name)
    text = secured.said("createUser", *at, "-p", "-", "-t", "Normal", text=f"{SECRET}\n")
    assert text == f"create user to {secured.broker.address} success.\n"
    assert secured.answered("getUser", *at) == [
        {"UserName": name, "Password": "", "UserType": "Normal", "UserStatus": "enable"}
    ]
    assert secured.answered("updateUser", *at, "-s", "disable") == [secured.broker.address]
    secured.said("updateUser", *at, "-t", "super")
    assert secured.said("getUser", *at).split() == [
        "#UserName", "Password", "UserType", "UserStatus", name, "Super", "disable",
    ]  # fmt: skip
    assert {ROOT, name} <= {row["UserName"] for row in secured.answered("listUser", *secured.at)}
    assert [row["UserName"] for row in secured.answered("listUser", *secured.at, "-f", name)] == [name]
    secured.said("deleteUser", *at)
    assert secured.answered("getUser", *at) == []


def test_a_cluster_has_users_on_each_broker(secured: Secured, name: str) -> None:
    at = ("-c", "DefaultCluster", "-u", name)
    assert secured.answered("createUser", *at, "-p", SECRET) == [secured.broker.address]
    assert secured.answered("getUser", *at)[0]["UserName"] == name
    assert name in [row["UserName"] for row in secured.answered("listUser", "-c", "DefaultCluster")]


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("createUser", "-b", "BROKER", "-u", "root", "-p", SECRET), 1, "The user is existed"),
        (("updateUser", "-b", "BROKER", "-u", "absent", "-p", SECRET), 1, "The user is not exist"),
        (("createUser", "-u", "a", "-p", SECRET), 2, "either -b"),
        (("createUser", "-b", "BROKER", "-u", "a"), 2, "give -p"),
        (("createUser", "-b", "BROKER", "-u", "a", "-p", "-"), 2, "no password in its first line"),
        (("createUser", "-b", "BROKER", "-u", "a", "-p", SECRET * 100), 2, ""),
        (("updateUser", "-b", "BROKER", "-u", "root"), 2, "at least one of -p, -t and -s"),
        (("createAcl", "-b", "BROKER", "-s", "root", "-r", "Topic:T", "-a", "Pub", "-d", "Allow"), 2, "subject type"),
        (("createAcl", "-b", "BROKER", "-s", "User:u", "-r", "Topic:T", "-a", "Fly", "-d", "Allow"), 2, "is no action"),
        (("createAcl", "-b", "BROKER", "-s", "User:u", "-r", "House:T", "-a", "Pub", "-d", "Allow"), 2, ""),
        (("createAcl", "-b", "BROKER", "-s", "User:absent", "-r", "*", "-a", "Pub", "-d", "Allow"), 1, "is not exist"),
        (("explainAccess", "-b", "BROKER", "-s", "User:u", "-r", "Topic:T", "-a", ","), 2, "at least one action"),
        (
            ("explainAccess", "-b", "BROKER", "-s", "User:u", "-r", "Topic:T", "-a", "Pub", "-i", "x"),
            2,
            "an IP address",
        ),
        (("migrateAuth", "-b", "BROKER"), 2, "give -f, -d or both"),
        (("migrateAuth", "-b", "BROKER", "-f", "/absent.yml"), 2, "cannot be read"),
        (("migrateAuth", "-f", "/absent.yml"), 2, "either -b"),
    ],
)
def test_what_is_refused_says_why_and_shows_no_secret(
    secured: Secured, words: tuple[str, ...], code: int, text: str
) -> None:
    result = secured.run(*(secured.broker.address if word == "BROKER" else word for word in words))
    assert result.exit_code == code, result.output
    assert text in result.output
    assert SECRET not in result.output


def test_a_person_is_asked_for_the_password(secured: Secured, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # guards the way that leaves no secret in the history of a shell
    monkeypatch.setattr("trimq.client.mqadmin.users.at_terminal", lambda: True)
    secured.said("createUser", *secured.at, "-u", name, text=f"{SECRET}\n{SECRET}\n")
    anyio.run(_list_as, secured, name, SECRET)


async def _list_as(secured: Secured, user: str, secret: str) -> None:
    async with Admin(secured.name_server.address, options=options(user, secret)) as admin:
        with pytest.raises(NoPermissionError, match="no matched policies") as caught:
            await admin.users(secured.broker.address)
        assert not isinstance(caught.value, CredentialsError)


# -- policies --------------------------------------------------------------------------------------------------------


def test_the_life_of_a_policy(secured: Secured, user: str) -> None:
    at, subject = secured.at, ("-s", f"User:{user}")
    granted = ("-r", f"Topic:{user}, Group:g*", "-a", "Pub,sub", "-i", "10.0.0.0/8,::1", "-d", "allow")
    secured.said("createAcl", *at, *subject, *granted)
    secured.said("updateAcl", *at, *subject, "-r", "Group:g*", "-a", "All", "-d", "Deny")
    rows = [
        {
            "Subject": f"User:{user}",
            "PolicyType": "Custom",
            "Resource": f"Topic:{user}",
            "Actions": ["Pub", "Sub"],
            "SourceIp": ["10.0.0.0/8", "::1"],
            "Decision": "Allow",
        },
        {
            "Subject": f"User:{user}",
            "PolicyType": "Custom",
            "Resource": "Group:g*",
            "Actions": ["All"],
            "SourceIp": [],
            "Decision": "Deny",
        },
    ]
    assert secured.answered("getAcl", *at, *subject) == rows
    assert secured.answered("listAcl", *at, "-s", user) == rows
    assert secured.answered("listAcl", "-c", "DefaultCluster", "-r", f"Topic:{user}") == rows[:1]
    table = secured.said("getAcl", "-c", "DefaultCluster", *subject)
    assert "Pub, Sub  10.0.0.0/8, ::1  Allow" in table
    assert secured.answered("deleteAcl", *at, *subject, "-r", "Group:g*") == [secured.broker.address]
    assert secured.answered("getAcl", *at, *subject) == rows[:1]
    secured.said("deleteAcl", *at, *subject)
    assert secured.answered("getAcl", *at, *subject) == []


def test_a_retry_topic_is_explained_as_the_group_that_it_stands_for(secured: Secured, user: str) -> None:
    at, subject = secured.at, ("-s", f"User:{user}")
    secured.said("createAcl", *at, *subject, "-r", f"Group:{user}", "-a", "Sub", "-d", "Allow")
    found, _ = secured.answered("explainAccess", *at, *subject, "-r", f"Topic:%RETRY%{user}", "-a", "Pub")
    assert (found["Resource"], found["Actions"], found["Allowed"]) == (f"Group:{user}", "Sub", True)


def test_who_decides_is_explained(secured: Secured, user: str) -> None:
    at, subject = secured.at, ("-s", f"User:{user}")
    wanted = ("-r", f"Topic:{user}", "-a", "Pub")

    def explained(*more: str, who: tuple[str, ...] = subject) -> Any:
        return secured.answered("explainAccess", *at, *who, *wanted, *more)

    found, entries = explained()
    assert (found["Allowed"], entries) == (False, [])
    assert "no matched policies" in found["Reason"]
    secured.said("createAcl", *at, *subject, "-r", "Topic:*", "-a", "Pub", "-i", "10.0.0.0/8", "-d", "Allow")
    secured.said("createAcl", *at, *subject, "-r", f"Topic:{user}", "-a", "Sub", "-d", "Deny")
    found, entries = explained("-i", "10.1.2.3")
    assert found["Allowed"]
    assert [(entry["Resource"], entry["Matches"], entry["Decides"]) for entry in entries] == [
        (f"Topic:{user}", False, False),
        ("Topic:*", True, True),
    ]
    assert "no obstacle" in entries[0]["Why"]
    assert not explained("-i", "11.1.2.3")[0]["Allowed"]
    assert not explained()[0]["Allowed"]
    assert "address that is not given" in explained()[0]["Reason"]
    assert "no policy is looked at" in explained(who=("-s", f"User:{ROOT}"))["Reason"]
    assert "there is no User:absent" in explained(who=("-s", "User:absent"))["Reason"]
    assert "decides: Allow" in secured.said("explainAccess", *at, *subject, *wanted, "-i", "10.1.2.3")
    secured.said("updateUser", *at, "-u", user, "-s", "disable")
    assert "is disabled" in explained()[0]["Reason"]


def test_policies_decide_about_the_sdk(secured: Secured, user: str) -> None:
    # guards the whole: signed by the SDK, verified by the broker, granted by mqadmin, while the programs run
    at, subject = secured.at, ("-s", f"User:{user}")
    secured.said("updateTopic", *at, "-t", user)

    def grant(resources: str, actions: str) -> None:
        secured.said("createAcl", *at, *subject, "-r", resources, "-a", actions, "-d", "Allow")

    async def main() -> None:
        namesrv = secured.name_server.address
        with pytest.raises(CredentialsError, match="The server does not know the user"):
            async with Consumer(user, user, namesrv=namesrv, options=options(user, "wrong")):
                pass
        async with Producer(user, namesrv=namesrv, options=options(user)) as producer:
            with pytest.raises(
                NoPermissionError, match=f"no permission to access Topic:{user} from .* The request was SEND_MESSAGE_V2"
            ):
                await producer.send(Message(user, b"1"))
            await anyio.to_thread.run_sync(grant, f"Topic:{user}", "Pub,Sub,Get")
            await producer.send(Message(user, b"1"))
        async with Consumer(user, user, namesrv=namesrv, options=options(user), start="first") as consumer:
            while not consumer.client.denied:  # noqa: ASYNC110 - of another process
                await anyio.sleep(POLL_INTERVAL)
            await anyio.to_thread.run_sync(grant, f"Group:{user}", "Sub")
            message = await anext(consumer)
            async with message.process():
                assert message.body == b"1"

    async def bounded() -> None:
        with anyio.fail_after(60):
            await main()

    anyio.run(bounded, backend="trio")


# -- credentials of mqadmin ------------------------------------------------------------------------------------------


def listed(secured: Secured, *before: str, **environment: str | None) -> Result:
    env = {"TRIMQ_ACCESS_KEY": None, "TRIMQ_SECRET_KEY": None, "ROCKETMQ_HOME": None, "TRIMQ_CREDENTIALS": None}
    return RUNNER.invoke(main, [*before, "listUser", *secured.at], env={**env, **environment})


def write(path: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    permit(path)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return path


def test_credentials_come_from_the_environment_or_a_file(secured: Secured, tmp_path: Path) -> None:
    tools = f"# of Apache's mqadmin\n---\naccessKey: {ROOT}\nsecretKey: '{ROOT_SECRET}' # quoted\nother: thing\n"
    path = write(tmp_path / "conf" / "tools.yml", tools)
    assert "username cannot be null" in listed(secured).output
    for result in (
        listed(secured, ROCKETMQ_HOME=str(tmp_path)),
        listed(secured, TRIMQ_CREDENTIALS=str(path)),
        listed(secured, "--credentials", str(path)),
        listed(secured, "--access-key", ROOT, TRIMQ_SECRET_KEY=ROOT_SECRET),
        listed(secured, "--access-key", ROOT, TRIMQ_SECRET_KEY=ROOT_SECRET, TRIMQ_CREDENTIALS="/absent"),
    ):
        assert result.exit_code == 0, result.output
        assert "Warning" not in result.output
    path.chmod(0o640)
    result = listed(secured, "--credentials", str(path))
    assert result.exit_code == 0
    assert f"chmod 600 {path}" in result.output
    assert ROOT_SECRET not in result.output
    assert listed(secured, ROCKETMQ_HOME=str(tmp_path / "elsewhere")).exit_code == 1  # no file: no credentials


def test_a_wrong_secret_says_so(secured: Secured) -> None:
    result = listed(secured, "--access-key", ROOT, TRIMQ_SECRET_KEY="wrong")
    assert result.exit_code == 1
    assert "their secret key is not the user's password" in result.output


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("accessKey: root\n", "secretKey missing"),
        ("", "accessKey and secretKey missing"),
        (f"secretKey:{SECRET}\n", "line 1: expected KEY: VALUE"),
        (f"accessKey: a\nsecretKey: '{SECRET}\n", "line 2: expected a text in '"),
        (f'accessKey: a\nsecretKey: "{SECRET}" x\n', 'line 2: expected a text in "'),
        (f"\xff{SECRET}".encode("latin-1"), "not UTF-8"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_without_showing_it(
    secured: Secured, tmp_path: Path, content: str | bytes, text: str
) -> None:
    path = write(tmp_path / "credentials", content)
    result = listed(secured, "--credentials", str(path))
    assert result.exit_code == 2
    assert text in result.output
    assert str(path) in result.output
    assert SECRET not in result.output


def test_credentials_that_are_not_there_are_refused(secured: Secured, tmp_path: Path) -> None:
    result = listed(secured, "--credentials", str(tmp_path / "absent"))
    assert (result.exit_code, "cannot be read" in result.output) == (2, True)
    result = listed(secured, "--access-key", "root")
    assert (result.exit_code, "TRIMQ_SECRET_KEY" in result.output) == (2, True)


# -- copies, and users of RocketMQ 4 ---------------------------------------------------------------------------------


def test_accounts_of_rocketmq_4_are_taken_over(secured: Secured, name: str, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    plain = write(
        tmp_path / "plain_acl.yml",
        f"globalWhiteRemoteAddresses: [10.0.0.*]\naccounts:\n- accessKey: {name}\n  secretKey: {SECRET}\n"
        f"  topicPerms: [{name}=PUB|SUB]\n  defaultGroupPerm: SUB\n- accessKey: {ROOT}\n  secretKey: {SECRET}\n",
    )
    directory = tmp_path / "acl"
    write(directory / "more.yml", f"accounts:\n- accessKey: {name}2\n  secretKey: {SECRET}\n  admin: true\n")
    words = ("migrateAuth", "-f", str(plain), "-d", str(directory))
    text = secured.said(*words, "--dry-run")
    assert "10.0.0.*" in text
    assert text.count("would be made") == 3
    assert secured.answered("listUser", *secured.at, "-f", name) == []
    text = secured.said(*words, *secured.at)
    assert "exists: not changed" in text
    rows = {row["UserName"]: row["UserType"] for row in secured.answered("listUser", *secured.at, "-f", name)}
    assert rows == {name: "Normal", f"{name}2": "Super"}
    acl = secured.answered("getAcl", *secured.at, "-s", f"User:{name}")
    assert [(row["PolicyType"], row["Resource"], row["Actions"]) for row in acl] == [
        ("Custom", f"Topic:{name}", ["Pub", "Sub"]),
        ("Default", "Group:*", ["Sub"]),
    ]


def test_users_are_not_copied_without_their_passwords(secured: Secured, user: str) -> None:
    result = secured.run("copyUser", "-f", secured.broker.address, "-t", "127.0.0.1:1", "-u", f"{user},absent")
    assert result.exit_code == 2
    assert "authReturnPasswords=superOverTls" in result.output
    assert f"of {user}, so" in result.output


def with_copies(check: Callable[[ScriptedBroker, ScriptedBroker], None]) -> None:
    """Run ``check`` in a thread, with a broker that has users and policies, and one with the user old and its own."""

    def having(broker: ScriptedBroker, users: list[dict[str, str]], subjects: list[str]) -> None:
        def acl(subject: str) -> dict[str, Any]:
            entry = {"resource": "Topic:T", "actions": ["Pub"], "decision": "Allow"}
            return {"subject": subject, "policies": [{"policyType": "Custom", "entries": [entry]}]}

        def one(command: RemotingCommand) -> RemotingCommand:
            name = command.ext_fields()["username"]
            found = [user for user in users if user["username"] == name]
            return command.reply(body=json.dumps(found[0]).encode() if found else b"")

        def acl_of(command: RemotingCommand) -> RemotingCommand:
            subject = command.ext_fields()["subject"]
            return command.reply(body=json.dumps(acl(subject)).encode() if subject in subjects else b"")

        broker.answers |= {
            RequestCode.AUTH_GET_USER: one,
            RequestCode.AUTH_LIST_USER: lambda command: command.reply(body=json.dumps(users).encode()),
            RequestCode.AUTH_GET_ACL: acl_of,
            RequestCode.AUTH_LIST_ACL: lambda command: command.reply(
                body=json.dumps([acl(s) for s in subjects]).encode()
            ),
        }

    async def main() -> None:
        async with scripted_broker() as source, scripted_broker() as target:
            old = {"username": "old", "password": SECRET, "userType": "Normal", "userStatus": "disable"}
            new = {"username": "new", "password": SECRET, "userType": "Super", "userStatus": "enable"}
            having(source, [old, new], ["User:old", "User:new"])
            having(target, [{"username": "old", "userType": "Normal", "userStatus": "enable"}], ["User:old"])
            await anyio.to_thread.run_sync(check, source, target)

    anyio.run(main)


def changes(broker: ScriptedBroker) -> list[tuple[int, Any]]:
    codes = {3001, 3002, 3006, 3007}
    return [(command.code, json.loads(bytes(command.body))) for _, command in broker.seen if command.code in codes]


def test_users_are_copied_with_their_passwords() -> None:
    def check(source: ScriptedBroker, target: ScriptedBroker) -> None:
        words = ("-f", source.address, "-t", target.address)
        result = RUNNER.invoke(main, ["copyUser", *words])
        assert result.exit_code == 0, result.output
        assert f"copy user of old from {source.address} to {target.address} success." in result.output
        assert SECRET not in result.output
        assert changes(target) == [
            (3002, {"username": "old", "password": SECRET, "userType": "Normal", "userStatus": "disable"}),
            (3001, {"username": "new", "password": SECRET, "userType": "Super", "userStatus": "enable"}),
        ]
        assert RUNNER.invoke(main, ["copyUser", *words, "-u", "new, absent"]).exit_code == 0
        assert [code for code, _ in changes(target)] == [3002, 3001, 3001]
        shown = RUNNER.invoke(main, ["getUser", "-b", source.address, "-u", "old"]).output
        assert "***" in shown
        assert SECRET not in shown

    with_copies(check)


def test_policies_are_copied() -> None:
    def check(source: ScriptedBroker, target: ScriptedBroker) -> None:
        words = ("-f", source.address, "-t", target.address)
        result = RUNNER.invoke(main, ["copyAcl", *words])
        assert result.exit_code == 0, result.output
        assert [(code, body["subject"]) for code, body in changes(target)] == [(3007, "User:old"), (3006, "User:new")]
        assert RUNNER.invoke(main, ["copyAcl", *words, "-s", "User:new,User:absent"]).exit_code == 0
        assert [code for code, _ in changes(target)] == [3007, 3006, 3006]

    with_copies(check)


def test_changes_go_to_masters_and_slaves_and_lists_come_from_masters() -> None:
    async def main_() -> None:
        async with scripted_broker() as master, scripted_broker() as slave:
            data = BrokerData(cluster="c", broker_name="a", broker_addrs={"0": master.address, "1": slave.address})
            info = encode_json(ClusterInfo(broker_addr_table={"a": data}, cluster_addr_table={"c": ["a"]}))
            master.answers[RequestCode.GET_BROKER_CLUSTER_INFO] = lambda command: command.reply(body=info)
            for words in (
                ["createUser", "-u", "u", "-p", SECRET],
                ["createAcl", "-s", "User:u", "-r", "Topic:T", "-a", "Pub", "-d", "Allow"],
                ["deleteUser", "-u", "u"],
                ["listUser"],
                ["getAcl", "-s", "User:u"],
            ):
                every = [*words, "-c", "c", "-n", master.address]
                result = await anyio.to_thread.run_sync(RUNNER.invoke, main, every)
                assert result.exit_code == 0, result.output
            for broker, codes in ((master, {3001, 3003, 3005, 3006, 3009}), (slave, {3001, 3003, 3006})):
                assert {code for code in broker.counts if code >= 3001} == codes

    anyio.run(main_)


@pytest.mark.anyio
async def test_a_reply_that_is_no_user_is_an_error_of_the_sdk() -> None:
    async with scripted_broker() as broker:
        broker.answers |= {
            RequestCode.AUTH_GET_USER: lambda command: command.reply(body=b"[1]"),
            RequestCode.AUTH_LIST_ACL: lambda command: command.reply(body=b"{"),
        }
        async with Admin(broker.address) as admin:
            with pytest.raises(NotStoredError, match="cannot be decoded"):
                await admin.user(broker.address, "u")
            with pytest.raises(NotStoredError, match="cannot be decoded"):
                await admin.acls(broker.address)
            change = UserChange(password=SECRET)
            assert SECRET not in repr(change)
            await admin.create_user(broker.address, "u", change)


def sealed(version: int, keys: KeyRing) -> bytes:
    record = {"username": "u", "userType": "Super", "userStatus": "enable", "secret": keys.encrypt("u", SECRET)}
    return encode(version, [json.dumps(record).encode()], [], keys)


def with_file(check: Callable[[ScriptedBroker, list[bytes]], None]) -> None:
    """Run ``check`` in a thread, with a broker that sends what is in the list."""

    async def main() -> None:
        async with scripted_broker() as source:
            files: list[bytes] = [b""]
            source.answers |= {RequestCode.AUTH_GET_FILE: lambda command: command.reply(body=files[0])}
            await anyio.to_thread.run_sync(check, source, files)

    anyio.run(main)


def test_the_file_of_users_is_copied(tmp_path: Path) -> None:
    keys = KeyRing([bytes(32)])

    def check(source: ScriptedBroker, files: list[bytes]) -> None:
        def run() -> Result:
            return RUNNER.invoke(main, ["copyAuth", "-b", source.address, "-o", str(tmp_path)])

        target = tmp_path / AUTH_FILE
        files[0] = first = sealed(3, keys)
        result = run()
        assert result.exit_code == 0, result.output
        assert target.read_bytes() == first
        assert target.stat().st_mode & 0o777 == 0o600
        assert "success, version 3." in result.output
        before = target.stat()
        assert "is as" in run().output
        assert target.stat() == before
        files[0] = sealed(2, keys)
        result = run()
        assert result.exit_code == 2
        assert "which is older" in result.output
        assert target.read_bytes() == first
        files[0] = sealed(4, keys)
        target.write_bytes(b"damaged")
        assert run().exit_code == 0
        assert target.read_bytes() == files[0]
        assert [path.name for path in tmp_path.iterdir()] == [AUTH_FILE]

    with_file(check)


def test_the_seal_of_a_copied_file_is_checked_with_a_key_file(tmp_path: Path) -> None:
    path = tmp_path / "auth.key"
    make_key_file(path)
    keys = read_key_file(path)
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / AUTH_FILE

    def check(source: ScriptedBroker, files: list[bytes]) -> None:
        def run(*options: str) -> Result:
            return RUNNER.invoke(main, ["copyAuth", "-b", source.address, "-o", str(tmp_path / "out"), *options])

        good = sealed(3, keys)
        for data, text in (
            (good.replace(b'"u"', b'"v"', 1), "its seal is wrong"),
            (made_super(good, "u"), "it has no seal"),
            (sealed(3, KeyRing([bytes(32)])), "which is not in authKeyFile"),
            (encode(3, [b'{"username":"u","secret":{"clear":"x"}}'], [], None), "cannot be used"),
        ):
            files[0] = data
            result = run("--key-file", str(path))
            assert result.exit_code == 2
            assert text in result.output
            assert not target.exists()
        files[0] = good
        result = run("--key-file", str(path))
        assert result.exit_code == 0, result.output
        assert target.read_bytes() == good
        result = run("--key-file", str(tmp_path / "none"))
        assert result.exit_code == 2
        assert "--key-file" in result.output
        assert "cannot be read" in result.output

    with_file(check)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        encode(1, [b'{"username":"u","secret":{"clear":"x"}}'], [], None),
        b'{"format":1,"secrets":"encrypted","version":1}',
        b'{"format":1,"secrets":"encrypted","version":"x",\n"seal":{}}',
    ],
    ids=["nothing", "no file", "in clear", "no seal", "no version"],
)
def test_a_file_of_users_that_cannot_be_used_replaces_nothing(tmp_path: Path, data: bytes) -> None:
    def check(source: ScriptedBroker, files: list[bytes]) -> None:
        files[0] = data
        result = RUNNER.invoke(main, ["copyAuth", "-b", source.address, "-o", str(tmp_path)])
        assert result.exit_code == 2
        assert "a file that cannot be used" in result.output
        assert list(tmp_path.iterdir()) == []

    with_file(check)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    def check(source: ScriptedBroker, files: list[bytes]) -> None:
        files[0] = sealed(1, KeyRing([bytes(32)]))
        (tmp_path / (AUTH_FILE + ".tmp")).mkdir()
        result = RUNNER.invoke(main, ["copyAuth", "-b", source.address, "-o", str(tmp_path)])
        assert result.exit_code == 2
        assert "cannot be written" in result.output

    with_file(check)


def test_a_file_of_users_that_cannot_be_read(tmp_path: Path) -> None:
    def check(source: ScriptedBroker, files: list[bytes]) -> None:
        files[0] = sealed(1, KeyRing([bytes(32)]))
        (tmp_path / AUTH_FILE).mkdir()
        result = RUNNER.invoke(main, ["copyAuth", "-b", source.address, "-o", str(tmp_path)])
        assert result.exit_code == 2
        assert f"{AUTH_FILE} cannot be read: Is a directory" in result.output

    with_file(check)


def test_what_the_first_master_does_not_have_the_next_one_may_have() -> None:
    """Users are those of each broker: one without a user refuses to show its policies."""
    answers: dict[str, Any] = {"has": "policies", "none": None, "empty": []}

    async def ask(address: str) -> Any:
        if address.startswith("refuses"):
            raise NoPermissionError(address)
        return answers[address]

    def found(*addresses: str) -> Any:
        return anyio.run(first_found, list(addresses), ask)

    assert found("refuses 1", "none", "empty", "has") == "policies"
    assert found("refuses 1", "none") is None
    with pytest.raises(NoPermissionError, match="refuses 1"):
        found("refuses 1", "refuses 2")
    assert found() is None
