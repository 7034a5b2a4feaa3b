"""A real object store: versitygw, which speaks S3 and keeps objects as files."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tests.interop.harness import partners
from tests.interop.harness.drivers import unique
from tests.interop.harness.processes import Process, ended_afterwards
from tests.interop.harness.waiting import wait_until
from tests.ports import free_port

ACCESS_KEY = "trimq"
SECRET_KEY = "an-unguessable-secret"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
"""The environment of a process that may use the server."""

_OPERATION = re.compile(r" s3_(\w+) (\S+) ")


@dataclass
class ObjectServer:
    """The running server. ``endpoint``: its URL."""

    endpoint: str
    directory: Path
    process: Process

    @property
    def port(self) -> int:
        return urlsplit(self.endpoint).port or 0

    def create_bucket(self) -> str:
        """Make a bucket with a name that no other test has."""
        name = unique("bucket").replace("_", "-")
        self.files(name).mkdir(parents=True)
        return name

    def delete_bucket(self, name: str) -> None:
        shutil.rmtree(self.files(name))

    def files(self, bucket: str) -> Path:
        """The directory with a bucket's objects."""
        return self.directory / "data" / bucket

    def start(self, secret: str = SECRET_KEY) -> None:
        """Start it, again after it was killed; returns when it accepts connections.

        With another ``secret`` it refuses the credentials of the tests.
        """
        self.process.environment["ROOT_SECRET_KEY"] = secret
        self.process.start()
        wait_until(self._accepts, "start of versitygw", 60)

    def _accepts(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def requests(self, last: str) -> list[tuple[str, str]]:
        """Operations and names of objects of all requests, when that for the object ``last`` is among them."""

        def logged() -> list[tuple[str, str]]:
            log = self.directory / "access.log"
            found = _OPERATION.findall(log.read_text(encoding="utf-8")) if log.exists() else []
            return found if any(name == last for _, name in found) else []

        return wait_until(logged, f"a request for {last}")


@contextmanager
def running_object_server(directory: Path) -> Iterator[ObjectServer]:
    """Run versitygw on a loopback address."""
    program, port = partners.versitygw(), free_port()
    (directory / "data").mkdir()
    process = Process(
        "versitygw",
        [
            str(program),
            *("--port", f"127.0.0.1:{port}", "--keep-alive", "--virtual-domain", f"localhost:{port}"),
            *("--access-log", str(directory / "access.log"), "posix", str(directory / "data")),
        ],
        directory,
        {"ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY},
    )
    server = ObjectServer(f"http://127.0.0.1:{port}", directory, process)
    with ended_afterwards(process):
        server.start()
        yield server
