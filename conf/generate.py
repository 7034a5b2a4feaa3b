"""Generates broker.conf, controller.conf and namesrv.conf from the options' help texts; --check reports stale ones."""  # noqa: INP001 - a script in a folder that is no package

import sys
from pathlib import Path

from trimq.broker import config as broker_config
from trimq.controller import config as controller_config
from trimq.namesrv import config as namesrv_config
from trimq.remoting.config.documentation import render_conf

HERE = Path(__file__).resolve().parent
_USE = (
    "The file has RocketMQ's format and key names. It lists each option with its default, commented out: remove the # "
    "of the ones you want to change. Each key can also be set by an environment variable, which overrides the file: "
    "listenPort is TRIMQ_LISTEN_PORT, brokerIP1 is TRIMQ_BROKER_IP1. mqbroker -p, mqnamesrv -p and "
    "mqcontroller -p print the effective values and where each one was set."
)


def wanted() -> dict[Path, str]:
    """The expected text of each file."""
    return {
        HERE / "broker.conf": render_conf(
            broker_config.SCHEMA, f"Options of the broker. Use: mqbroker -c broker.conf. {_USE}"
        ),
        HERE / "controller.conf": render_conf(
            controller_config.SCHEMA, f"Options of a controller. Use: mqcontroller -c controller.conf. {_USE}"
        ),
        HERE / "namesrv.conf": render_conf(
            namesrv_config.SCHEMA, f"Options of the name server. Use: mqnamesrv -c namesrv.conf. {_USE}"
        ),
    }


def main(arguments: list[str]) -> int:
    """Write the files, or compare them with ``--check``. Returns the exit code: 1 if a file is stale."""
    files = wanted()
    if "--check" not in arguments:
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
        return 0
    stale = [path.name for path, text in files.items() if not path.exists() or path.read_text("utf-8") != text]
    if stale:
        sys.stderr.write(f"not current: {', '.join(stale)}; run python conf/generate.py\n")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
