"""Generates a commented configuration file: every option of a schema with its meaning and its default."""

import textwrap
from collections.abc import Mapping

from trimq.remoting.config.configuration import Option, Schema, describe, options_of

_WIDTH = 110


def render_conf(schema: Schema, head: str) -> str:
    """A properties file with each option commented out at its default, section by section."""
    lines = [*_comment(head)]
    for section in schema.sections:
        lines += ["", "#" * 40, *_comment(_summary(section)), "#" * 40]
        for option in options_of(section):
            lines += ["", *_comment(describe(option)), _default_line(option)]
    lines += ["", "#" * 40, *_comment("Keys of RocketMQ that have no effect here"), "#" * 40, ""]
    lines += _groups(schema.inert)
    lines += ["", "#" * 40, *_comment("Keys of RocketMQ whose feature is not implemented"), "#" * 40, ""]
    lines += _groups(schema.unsupported)
    return "\n".join(lines) + "\n"


def _summary(section: type) -> str:
    return (section.__doc__ or "").split("\n\n")[0]


def _default_line(option: Option) -> str:
    if option.shown:
        return f"#{option.key}=   (default: {option.shown})"
    return f"#{option.key}={option.text(option.default)}"


def _groups(keys: Mapping[str, str]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for key, why in keys.items():
        reasons.setdefault(why, []).append(key)
    lines: list[str] = []
    for why, members in reasons.items():
        lines += _comment(why[0].upper() + why[1:] + ":")
        lines += [f"#   {line}" for line in textwrap.wrap(" ".join(sorted(members)), _WIDTH)]
    return lines


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(" ".join(text.split()), _WIDTH)]
