"""The section UserLimitsConfig: what each user may do."""

from dataclasses import dataclass

from trimq.remoting.auth.config import AuthConfig, Problem
from trimq.remoting.config.configuration import Configuration, option, options_of


@dataclass(frozen=True)
class UserLimitsConfig:
    """What each user may do on this broker. All limits need authenticationEnabled=true. 0: no limit."""

    max_connections_per_user: int = option(
        0,
        "The most open connections on which requests of one user have come; on further ones, requests of that user are "
        "answered with SYSTEM_BUSY. 0: no limit.",
        minimum=0,
        ours=True,
    )
    max_requests_per_second_per_user: int = option(
        0,
        "The most requests in a second of one user; further ones are answered with SYSTEM_BUSY. 0: no limit.",
        minimum=0,
        ours=True,
    )
    max_bytes_in_flight_per_user: int = option(
        0,
        "The most bytes of bodies of one user's requests that are not answered yet; further requests with a body are "
        "answered with SYSTEM_BUSY. Held pulls and replies do not count; one request alone may be longer. 0: no limit.",
        unit="bytes",
        minimum=0,
        ours=True,
    )

    @property
    def is_on(self) -> bool:
        """Whether there is any limit."""
        return self != UserLimitsConfig()


USER_LIMITS_KEYS = frozenset(opt.key for opt in options_of(UserLimitsConfig))
"""All keys of the section. No request may change one (Schema.protected)."""


def check_user_limits(configuration: Configuration) -> Problem | None:
    """A limit without authentication, by which users are known (Schema.checks)."""
    if configuration.section(AuthConfig).authentication_enabled:
        return None
    config = configuration.section(UserLimitsConfig)
    for opt in options_of(UserLimitsConfig):
        if getattr(config, opt.name):
            return opt.key, "0, or authenticationEnabled=true: without signatures users are not known"
    return None
