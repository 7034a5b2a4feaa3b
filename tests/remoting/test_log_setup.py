"""Log lines, JSON lines, rotation."""

import json
from pathlib import Path

import pytest
import structlog

from trimq.broker.config import load_broker
from trimq.namesrv.config import load_namesrv
from trimq.remoting.config.configuration import LogConfig, LogFormat, LogLevel
from trimq.remoting.program import open_log
from trimq.remoting.runtime.log_setup import RotatingFile, configure, set_level


def test_console_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogConfig())
    log = structlog.get_logger()
    log.info("topic_created", topic="Orders", remark='says "no"\nand more', empty="")
    log.debug("unseen")
    line = capsys.readouterr().err
    assert line.endswith('info    topic_created topic=Orders remark="says \\"no\\"\\nand more" empty=""\n')
    assert line.count("\n") == 1


def test_level_changes_while_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogConfig())
    log = structlog.get_logger("a_module")
    set_level(LogLevel.ERROR)
    log.warning("unseen")
    set_level(LogLevel.DEBUG)
    log.debug("seen")
    assert capsys.readouterr().err.count("seen") == 1


def test_exception_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogConfig())
    try:
        int("broken")
    except ValueError:
        structlog.get_logger().exception("handler_failed")
    text = capsys.readouterr().err
    assert "handler_failed" in text
    assert "ValueError: invalid" in text


def test_json_line_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "broker.log"
    close = configure(LogConfig(log_format=LogFormat.JSON, log_file=str(path), log_level=LogLevel.WARNING))
    structlog.get_logger().warning("slow", ms=7, peer=Path("/x"))
    structlog.get_logger().info("unseen")
    close()
    (line,) = path.read_text().splitlines()
    event = json.loads(line)
    assert event.pop("timestamp").endswith("Z")
    assert event == {"event": "slow", "ms": 7, "peer": "/x", "level": "warning"}


@pytest.mark.parametrize("form", LogFormat)
def test_text_that_has_no_utf_8_form_is_escaped(tmp_path: Path, form: LogFormat) -> None:
    """Else a line would be lost, or the code that logs would fail."""
    path = tmp_path / "log"
    close = configure(LogConfig(log_format=form, log_file=str(path)))
    structlog.get_logger().error("failed", exc_info=ValueError("x\ud800"), group="\ud800x", path=Path("/p"))
    close()
    text = path.read_text()
    assert "\\ud800x" in text
    assert "ValueError: x\\ud800" in text
    assert "/p" in text
    if form is LogFormat.JSON:
        assert json.loads(text)["group"] == "\ud800x"


def test_rotation(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = RotatingFile(path, 10, 2)
    for letter in "abcd":
        file.write(letter * 7 + "\n")
    file.close()
    assert [p.read_text() for p in sorted(tmp_path.iterdir())] == ["ddddddd\n", "ccccccc\n", "bbbbbbb\n"]


def test_no_backups(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "log", 10, 0)
    file.write("a" * 9 + "\n")
    file.write("b" * 9 + "\n")
    file.close()
    assert [p.read_text() for p in tmp_path.iterdir()] == ["b" * 9 + "\n"]


def test_the_log_of_a_program_follows_its_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    """This holds for the name server and for the broker."""
    for load in (load_broker, load_namesrv):
        configuration = load(flags={"noSuchKey": ("1", "test")})
        close = open_log("program", configuration)
        try:
            structlog.get_logger().info("before")
            configuration.change({"logLevel": "ERROR"})
            structlog.get_logger().info("after")
        finally:
            close()
        captured = capsys.readouterr()
        written = captured.out + captured.err
        assert "before" in written
        assert "after" not in written
        assert "program: warning: test: unknown key noSuchKey" in captured.err
