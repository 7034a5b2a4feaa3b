"""The order in which a server's configuration is made of its sources."""

from collections.abc import Mapping
from pathlib import Path

from trimq.remoting.config.configuration import Configuration, Schema
from trimq.remoting.config.environment import apply_environment

Flags = Mapping[str, tuple[str, str]]
"""Values of the command line by key, each with the name of its flag."""


def load(
    schema: Schema, file: str | Path | None, flags: Flags | None, environment: Mapping[str, str] | None
) -> Configuration:
    """Load a configuration from a file, the environment, flags and the schema's further sources. Later ones override.

    The keys that ``configBlackList`` names are protected. Raises ConfigError for the first invalid value.
    """
    configuration = Configuration(schema)
    if file is not None:
        configuration.load_file(file)
    apply_environment(configuration, environment or {})
    for key, (value, flag) in (flags or {}).items():
        configuration.apply(key, value, flag)
    for apply_more in schema.more:
        apply_more(configuration)
    configuration.check()
    configuration.protect(configuration.value("configBlackList"))
    return configuration
