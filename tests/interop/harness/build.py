"""``python -m tests.interop.harness.build``: fetch and build the programs of partners that most tests use."""

from collections.abc import Callable
from typing import Final

import click

from tests.interop.harness import partners

PROGRAMS: Final[list[Callable[[], object]]] = [
    partners.versitygw,
    partners.apache_servers,
    lambda: partners.java_driver("5.5.0"),
    lambda: partners.java_driver("4.9.8"),
    partners.go_driver,
    partners.node_driver,
]


@click.command()
def main() -> None:
    """Print where each program is. What cannot be built is left to the tests that use it."""
    for program in PROGRAMS:
        try:
            click.echo(program())
        except partners.BuildError as error:
            click.echo(f"not built: {error}")


if __name__ == "__main__":
    main()
