"""The section FollowedUsersConfig: how a name server or a controller uses the file of users that a broker writes."""

from dataclasses import dataclass
from typing import Final

from trimq.remoting.auth.config import AuthConfig, Problem
from trimq.remoting.config.configuration import Configuration, option, options_of

NOT_FOLLOWED: Final = (
    "initAuthenticationUser",
    "initAuthenticationUserFile",
    "authReturnPasswords",
    "migrateAuthFromV1Enabled",
)
"""Keys for servers that write the file."""


@dataclass(frozen=True)
class FollowedUsersConfig:
    """How users and policies are read that a broker writes."""

    auth_cluster_name: str = option(
        "DefaultCluster", "The cluster whose policies (Cluster:NAME) decide about requests to this server.", ours=True
    )
    auth_reload_interval_millis: int = option(
        1000, "Time between two looks for a changed file of users or keys.", unit="ms", minimum=100, ours=True
    )


AUTH_KEYS: Final = frozenset(opt.key for section in (AuthConfig, FollowedUsersConfig) for opt in options_of(section))
"""All keys of both sections. No request may change one (Schema.protected)."""


def check_followed_users(configuration: Configuration) -> Problem | None:
    """What a server needs that only reads users; notes the keys without effect (Schema.checks)."""
    config = configuration.section(AuthConfig)
    for key in NOT_FOLLOWED:
        if configuration.source(key) != "default":
            text = "has no effect: users and policies are made at a broker, whose file is read here"
            configuration.notes.append(f"{configuration.source(key)}: {key} {text}")
    if not config.authentication_enabled:
        return None
    if config.auth_config_path is None:
        return "authConfigPath", "the directory of a broker's file of users, or of a copy of it (mqadmin copyAuth)"
    if config.auth_key_file is None and not config.allow_secrets_in_clear:
        return "authKeyFile", "the broker's key file, or allowSecretsInClear=true if its passwords are in clear"
    return None


def auth_settings_of(configuration: Configuration) -> dict[str, tuple[str, str]]:
    """The settings that a server in the same process needs to follow the same users: key -> (value, source).

    They have secrets in them.
    """
    found: dict[str, tuple[str, str]] = {}
    for section in (AuthConfig, FollowedUsersConfig):
        if section not in configuration.schema.sections:
            continue
        value = configuration.section(section)
        found |= {
            opt.key: (opt.text(getattr(value, opt.name)), configuration.source(opt.key))
            for opt in options_of(section)
            if configuration.source(opt.key) != "default" and opt.key not in NOT_FOLLOWED
        }
    return found
