"""The section AuthConfig: RocketMQ's keys of authentication and authorization, and TriMQ's own."""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from trimq.protocol import lenient_json
from trimq.protocol.auth.model import User, UserType, checked_secret, checked_username
from trimq.protocol.errors import RemotingError
from trimq.remoting.auth.replay_guard import WINDOW_SECONDS
from trimq.remoting.config.configuration import Configuration, option
from trimq.remoting.config.private_file import private_file

_AUTHENTICATION: Final = "org.apache.rocketmq.auth.authentication"
_AUTHORIZATION: Final = "org.apache.rocketmq.auth.authorization"
_STATEFUL: Final = (
    f"{_AUTHENTICATION}.strategy.StatefulAuthenticationStrategy",
    f"{_AUTHORIZATION}.strategy.StatefulAuthorizationStrategy",
)
_MOST_BYTES: Final = 64 * 1024
"""Of a file with a user."""

Problem = tuple[str, str]
"""A key and the expectation of its value."""


class ReturnPasswords(enum.StrEnum):
    """Whether the replies to 3004 and 3005 have passwords."""

    NEVER = "never"
    SUPER_OVER_TLS = "superOverTls"


def _one_of(*names: str) -> Callable[[str], str]:
    def problem(text: str) -> str:
        return "" if text in names else f"one of {', '.join(names)}: TriMQ has its own classes, and only these do fit"

    return problem


def _codes_problem(text: str) -> str:
    for part in _parts(text):
        if not (part.isascii() and part.isdigit()) or len(part) > 10:
            return "request codes, numbers separated by commas"
    return ""


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


class _UserText:
    """JSON with a name and a secret, under the names that RocketMQ uses in a key."""

    def __init__(self, name: str, secret: str) -> None:
        self._name = name
        self._secret = secret
        self.expected = f'JSON: {{"{name}":"...","{secret}":"..."}}'

    def problem(self, text: str) -> str:
        """What was expected; empty for a valid text."""
        try:
            self.read(text)
        except ValueError:
            return self.expected
        return ""

    def read(self, text: str) -> User:
        """The user, a Super. Raises ValueError, without the secret."""
        try:
            fields = dict(lenient_json.loads(text))
            name, secret = checked_username(fields.get(self._name)), checked_secret(fields.get(self._secret))
        except (ValueError, TypeError, RecursionError, RemotingError):
            raise ValueError(self.expected) from None
        return User(name, secret, UserType.SUPER)


_INITIAL: Final = _UserText("username", "password")
_INNER: Final = _UserText("accessKey", "secretKey")


def read_private_file(path: str) -> str:
    """The text of a file that only its owner can read. Blocks. Raises ValueError with what was expected."""
    try:
        with private_file(path) as file:
            data = file.read(_MOST_BYTES)
    except OSError as error:
        raise ValueError(f"a file that can be read ({error.strerror})") from None
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError("a file with UTF-8 text") from None


@dataclass(frozen=True)
class AuthConfig:
    """Authentication and authorization (RocketMQ's AuthConfig). All of it is off by default, as in RocketMQ."""

    authentication_enabled: bool = option(
        False, "Every request has to be signed by a user. Otherwise anybody who reaches the port is administrator."
    )
    authorization_enabled: bool = option(
        False, "Users may do what their policies allow. Needs authenticationEnabled=true."
    )
    authentication_provider: str = option(
        f"{_AUTHENTICATION}.provider.DefaultAuthenticationProvider",
        "Accepted for RocketMQ's files; without effect.",
        check=_one_of(f"{_AUTHENTICATION}.provider.DefaultAuthenticationProvider"),
    )
    authentication_metadata_provider: str | None = option(
        None,
        "Accepted for RocketMQ's files; without effect: users are always in a file of this broker.",
        check=_one_of(f"{_AUTHENTICATION}.provider.LocalAuthenticationMetadataProvider"),
        unset="the same",
    )
    authentication_strategy: str = option(
        f"{_AUTHENTICATION}.strategy.StatelessAuthenticationStrategy",
        "Accepted for RocketMQ's files; without effect: the signature of every request is checked.",
        check=_one_of(f"{_AUTHENTICATION}.strategy.StatelessAuthenticationStrategy", _STATEFUL[0]),
    )
    authentication_whitelist: str = option(
        "", "Request codes, separated by commas, that need no signature, and so no permission.", check=_codes_problem
    )
    authorization_provider: str = option(
        f"{_AUTHORIZATION}.provider.DefaultAuthorizationProvider",
        "Accepted for RocketMQ's files; without effect.",
        check=_one_of(f"{_AUTHORIZATION}.provider.DefaultAuthorizationProvider"),
    )
    authorization_metadata_provider: str | None = option(
        None,
        "Accepted for RocketMQ's files; without effect: policies are always in a file of this broker.",
        check=_one_of(f"{_AUTHORIZATION}.provider.LocalAuthorizationMetadataProvider"),
        unset="the same",
    )
    authorization_strategy: str = option(
        f"{_AUTHORIZATION}.strategy.StatelessAuthorizationStrategy",
        "Accepted for RocketMQ's files; without effect: a change of users or policies applies to the next request.",
        check=_one_of(f"{_AUTHORIZATION}.strategy.StatelessAuthorizationStrategy", _STATEFUL[1]),
    )
    authorization_whitelist: str = option(
        "", "Request codes, separated by commas, that any user may send.", check=_codes_problem
    )
    init_authentication_user: str | None = option(
        None,
        f"The first administrator, as {_INITIAL.expected}. Made a Super at the first start only, while there are no "
        "users.",
        check=_INITIAL.problem,
        unset="none",
        secret=True,
    )
    init_authentication_user_file: str | None = option(
        None,
        "A file with the value of initAuthenticationUser, which only its owner can read.",
        unset="none",
        ours=True,
    )
    inner_client_authentication_credentials: str | None = option(
        None,
        f"Signs what this broker sends to others, as {_INNER.expected}. It is made a Super if there is no such user.",
        check=_INNER.problem,
        unset="the broker's own requests are not signed",
        secret=True,
    )
    inner_client_authentication_credentials_file: str | None = option(
        None,
        "A file with the value of innerClientAuthenticationCredentials, which only its owner can read.",
        unset="none",
        ours=True,
    )
    auth_config_path: str | None = option(
        None,
        "Directory of the file of users and policies. Name servers and controllers need it.",
        unset="config in storePathRootDir",
    )
    auth_key_file: str | None = option(
        None,
        "File with the keys that encrypt passwords at rest, outside the store (needs trimq[security]).",
        unset="none: passwords are stored only with allowSecretsInClear=true",
        ours=True,
    )
    allow_secrets_in_clear: bool = option(
        False, "Passwords may be stored unencrypted, in a file that only its owner can read.", ours=True
    )
    auth_return_passwords: ReturnPasswords = option(
        ReturnPasswords.NEVER,
        "Whether 3004 and 3005 return passwords. RocketMQ's copyUser, and its proxy, need superOverTls: to a Super, on "
        "a TLS connection.",
        ours=True,
    )
    allow_admin_over_plain: bool = option(
        False,
        "Serve requests of administrators on connections without TLS although authentication is on. Who reads such a "
        "request can send it again. There is no exception for the loopback.",
        ours=True,
    )
    auth_require_replay_protection: str = option(
        "",
        "Users, separated by commas, whose requests are served only with the stamp of TriMQ's SDK and mqadmin, which "
        "makes recorded requests useless; superUsers and all stand for those.",
        ours=True,
    )
    auth_replay_window_seconds: int = option(
        WINDOW_SECONDS,
        "How old a stamped request may be, and by how much clocks of clients may differ from the broker's.",
        check=lambda seconds: "" if 1 <= seconds <= 3600 else "1 to 3600 seconds",
        ours=True,
    )
    migrate_auth_from_v1_enabled: bool = option(
        False,
        "At each start, take over the users of RocketMQ 4's conf/plain_acl.yml and conf/acl/*.yml in ROCKETMQ_HOME, as "
        "far as they are not known yet.",
    )
    acl_enable: bool = option(
        False,
        "RocketMQ 4's access control, which RocketMQ 5.3.3 and later ignore. Refused here.",
        check=lambda on: (
            "false: this key does nothing any more. Use authenticationEnabled and authorizationEnabled; mqadmin "
            "migrateAuth takes over plain_acl.yml"
            if on
            else ""
        ),
    )

    def problem(self) -> Problem | None:
        """A key whose value conflicts with other keys, and the expected value; None if there is no conflict. Blocks."""
        if self.authorization_enabled and not self.authentication_enabled:
            return (
                "authorizationEnabled",
                "false, or authenticationEnabled=true too: without signatures anybody can say to be any user",
            )
        for key, value, file, text in (
            ("initAuthenticationUserFile", self.init_authentication_user, self.init_authentication_user_file, _INITIAL),
            (
                "innerClientAuthenticationCredentialsFile",
                self.inner_client_authentication_credentials,
                self.inner_client_authentication_credentials_file,
                _INNER,
            ),
        ):
            if value and file:
                return key, f"empty, since {key.removesuffix('File')} is set too"
            if file:
                try:
                    text.read(read_private_file(file))
                except ValueError as error:
                    return key, str(error)
        return None

    @property
    def summary(self) -> str:
        """Who may do what, as one sentence for people."""
        if not self.authentication_enabled:
            return "open: anybody who reaches the port is administrator (docs/security.md)"
        rule = (
            "policies decide what its user may do"
            if self.authorization_enabled
            else "each user may do everything (authorizationEnabled=false)"
        )
        exempt = [
            f"{key}={value}"
            for key, value in (
                ("authenticationWhitelist", self.authentication_whitelist),
                ("authorizationWhitelist", self.authorization_whitelist),
            )
            if value.strip()
        ]
        return f"every request has to be signed, and {rule}" + (f"; except {', '.join(exempt)}" if exempt else "")

    @property
    def whitelisted(self) -> frozenset[int]:
        """The codes that need no signature."""
        return frozenset(map(int, _parts(self.authentication_whitelist)))

    @property
    def needless(self) -> frozenset[int]:
        """The codes that need no policy."""
        return frozenset(map(int, _parts(self.authorization_whitelist)))

    @property
    def replay_protected(self) -> frozenset[str]:
        """The users whose requests need a stamp, see ReplayGuard."""
        return frozenset(_parts(self.auth_require_replay_protection))

    def initial_user(self) -> User | None:
        """The administrator to make at the first start. Blocks. Raises ValueError, see ``problem``."""
        return _given(_INITIAL, self.init_authentication_user, self.init_authentication_user_file)

    @property
    def has_inner_user(self) -> bool:
        """Whether what the broker sends is signed."""
        return bool(self.inner_client_authentication_credentials or self.inner_client_authentication_credentials_file)

    def inner_user(self) -> User | None:
        """The user that signs what this broker sends. Blocks. Raises ValueError, see ``problem``."""
        return _given(
            _INNER, self.inner_client_authentication_credentials, self.inner_client_authentication_credentials_file
        )


def _given(kind: _UserText, value: str | None, file: str | None) -> User | None:
    text = read_private_file(file) if file else value
    return kind.read(text) if text else None


AUTH_INERT: Final[dict[str, str]] = dict.fromkeys(
    (
        "userCacheMaxNum",
        "userCacheExpiredSecond",
        "userCacheRefreshSecond",
        "aclCacheMaxNum",
        "aclCacheExpiredSecond",
        "aclCacheRefreshSecond",
        "statefulAuthenticationCacheMaxNum",
        "statefulAuthenticationCacheExpiredSecond",
        "statefulAuthorizationCacheMaxNum",
        "statefulAuthorizationCacheExpiredSecond",
    ),
    "users and policies are all in memory, and every signature is checked",
)


def note_strategies(configuration: Configuration) -> Problem | None:
    """A check of the schema that finds no problems: it notes that the stateful strategies are not stateful here."""
    config = configuration.section(AuthConfig)
    for key, value in (
        ("authenticationStrategy", config.authentication_strategy),
        ("authorizationStrategy", config.authorization_strategy),
    ):
        if value in _STATEFUL:
            text = "has no effect: every signature is checked, and changes apply to the next request"
            configuration.notes.append(f"{configuration.source(key)}: {key} {text}")
    return None
