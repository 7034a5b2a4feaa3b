"""Configuration by environment variables, for containers. Names follow one rule: listenPort is TRIMQ_LISTEN_PORT.

A variable overrides the configuration file, a command line flag overrides a variable. An empty variable is not set.
"""

import difflib
import functools
import re
from collections.abc import Mapping
from typing import Final

from trimq.remoting.config.configuration import Configuration
from trimq.remoting.config.properties import ConfigError

PREFIX: Final = "TRIMQ_"
_BOUNDARY: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_NO_OPTIONS: Final = frozenset({"TRIMQ_HOME", "TRIMQ_NATIVE"})
"""Variables that are no options: of `make run`, and of protocol/native.py, which is imported before they are read."""


@functools.cache
def variable_of(key: str) -> str:
    """``brokerIP1`` -> ``TRIMQ_BROKER_IP1``, ``tls.enable`` -> ``TRIMQ_TLS_ENABLE``."""
    return PREFIX + _BOUNDARY.sub("_", key).replace(".", "_").upper()


def apply_environment(configuration: Configuration, environment: Mapping[str, str]) -> None:
    """Apply all variables that start with TRIMQ_. An unknown one is a warning; an invalid value raises ConfigError."""
    schema = configuration.schema
    options = {variable_of(option.key): option.key for option in configuration.options()}
    keys = {variable_of(key): key for key in (*schema.inert, *schema.unsupported)} | options
    native = environment.get("TRIMQ_NATIVE", "").strip()
    if native not in {"", "on", "off"}:
        raise ConfigError("environment", "TRIMQ_NATIVE", native, "on or off")
    for name in sorted(environment):
        value = environment[name]
        if not name.startswith(PREFIX) or name in _NO_OPTIONS or not value.strip():
            continue
        key = keys.get(name)
        if key is not None:
            configuration.apply(key, value, name)
            continue
        near = difflib.get_close_matches(name, options, 1, 0.7)
        hint = f" (did you mean {near[0]}?)" if near else ""
        configuration.warnings.append(f"unknown variable {name}{hint}; ignored")
