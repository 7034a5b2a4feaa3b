"""The tool that lists the places in the code through which a request passes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.paths import ROOT, decides_dispatch, reads_property_text, static


def test_the_code_has_one_of_each() -> None:
    found = static(ROOT)
    appends = ["broker/store/log/commit_log.py:append", "broker/store/log/commit_log.py:append_data"]
    assert found["appends"] == appends  # what is put, and what a slave gets from its master
    assert found["dispatches"] == ["broker/store/dispatch/dispatcher.py:dispatch"]
    assert found["rules of dispatch"] == ["protocol/dispatch_rules.py"]
    readers = set(found["readers of property text"])
    assert not [path for path in readers if path.startswith("broker/")]
    assert readers == {"protocol/property_text.py"}


def test_others_are_found(tmp_path: Path) -> None:
    store = tmp_path / "broker" / "store"
    store.mkdir(parents=True)
    store.joinpath("short.py").write_text(
        "def put(log, file):\n    file.buffer[1:2] = b''\n    file.wrote = 2\n    log.last_store_timestamp = 3\n"
        "def hand_out(self):\n    self.position = 1\n    self.last_record = 0\n"
        "def rolled(self):\n    self.position = 1\n    self.last_record = 0\n"
    )
    store.joinpath("again.py").write_text(
        "def queued(found):\n    return found.sys_flag & 0xC != sysflag.TRANSACTION_PREPARED\n"
    )
    for folder in ("broker/processors", "broker/services", "broker/tools", "protocol"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "protocol" / "reader.py").write_text("def read(text):\n    return text.split('\\x02')\n")
    assert static(tmp_path) == {
        "appends": ["broker/store/short.py:put"],
        "dispatches": ["broker/store/short.py:hand_out"],
        "rules of dispatch": ["broker/store/again.py"],
        "readers of property text": ["protocol/reader.py"],
    }


@pytest.mark.parametrize(
    ("text", "reads"),
    [
        ("text.split('\\x02')", True),
        ("re.compile('a\\x01')", True),
        ("from trimq.protocol.property_text import NAME_END\ntext.find(NAME_END)", True),
        ("name + '\\x01' + value + '\\x02'", False),
        ("f'{name}\\x01{value}\\x02'", False),
        ("'nothing'", False),
    ],
)
def test_to_write_is_not_to_read(text: str, reads: bool) -> None:
    assert reads_property_text(text) is reads


@pytest.mark.parametrize(
    ("text", "decides"),
    [
        ("found.sys_flag & TRANSACTION_MASK in (TRANSACTION_PREPARED, TRANSACTION_ROLLBACK)", True),
        ("kind == sysflag.TRANSACTION_ROLLBACK", True),
        ("flags & 0xC", True),
        ("tags_code(property_of(found.properties, 'TAGS'))", True),
        ("hashing.tags_code(properties.get(TAGS))", True),
        ("IN_QUEUE[found.sys_flag & KIND]", False),
        ("unit_tags_code(found.topic, found.properties, 0, delays)", False),
        ("TRANSACTION_PREPARED: Final = 4", False),
        ("tags_code('*')", False),
        ("number & 4", False),
    ],
)
def test_to_ask_for_the_rules_is_not_to_decide(text: str, decides: bool) -> None:
    assert decides_dispatch(text) is decides


@pytest.mark.slow
def test_it_runs_a_broker() -> None:
    command = [sys.executable, "-m", "tools.paths", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True, cwd=ROOT)
    paths = json.loads(done.stdout.splitlines()[-1])["paths"]
    for kinds in paths.values():
        assert all(kinds.values())
        sends = [kind for kind in kinds if kind.startswith(("send", "batch"))]
        assert len(sends) == 5
        for kind in sends:
            appends = kinds[kind]["broker/store/log/commit_log.py"]["CommitLog.append"]
            # Without the native extension each send of a round is appended separately.
            assert appends == 1 or (kind == "sends of a round" and appends <= 64)
            assert kinds[kind]["broker/store/dispatch/dispatcher.py"]["StoreDispatcher.dispatch"] == appends
            assert kinds[kind]["broker/store/durability/write_path.py"]
        assert "broker/processors/send/send_fast_path.py" in kinds["send, JSON"]
        assert "broker/processors/send/send_fast_path.py" not in kinds["send, binary"]
