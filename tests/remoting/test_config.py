import enum
import stat
from dataclasses import dataclass
from pathlib import Path

import pytest

from trimq.remoting.config.configuration import (
    Configuration,
    LogConfig,
    NettyServerConfig,
    Schema,
    option,
    parse_changes,
)
from trimq.remoting.config.documentation import render_conf
from trimq.remoting.config.options import camel_case, options_of
from trimq.remoting.config.properties import ConfigError
from trimq.remoting.config.state_file import replace_file


class Colour(enum.StrEnum):
    RED = "RED"
    BLUE = "BLUE"


@dataclass(frozen=True)
class Section:
    """How it looks."""

    top_speed: int = option(10, "How fast.", unit="km/h", minimum=1, maximum=100, dynamic=True)
    low_speed: int = option(1, "How slow.", minimum=0, dynamic=True)
    colour: Colour = option(Colour.RED, "Which colour.")
    lights_on: bool = option(False, "Lights.", dynamic=True)
    owner_ip1: str | None = option(None, "Whose.", key="ownerIP1", unset="none", dynamic=True)
    plates: str = option("AA", "Plates.", check=lambda text: "" if len(text) == 2 else "two letters")

    def problem(self) -> tuple[str, str] | None:
        return ("lowSpeed", "at most topSpeed") if self.low_speed > self.top_speed else None


SCHEMA = Schema(
    program="car",
    sections=(Section,),
    inert={"ashTray": "smoking is not allowed"},
    unsupported={"autoPilot": "not yet", "parkAssist": "not yet"},
    harmless={"parkAssist": "false"},
    protected=frozenset({"plates"}),
)


def configured(text: str, tmp_path: Path) -> Configuration:
    path = tmp_path / "car.conf"
    path.write_text(text)
    configuration = Configuration(SCHEMA)
    configuration.load_file(path)
    configuration.check()
    return configuration


def test_defaults_hold_where_the_file_says_nothing(tmp_path: Path) -> None:
    section = configured("topSpeed = 42\nlightsOn=TRUE\ncolour=blue\n", tmp_path).section(Section)
    assert section == Section(top_speed=42, lights_on=True, colour=Colour.BLUE)


def test_every_value_says_where_it_came_from(tmp_path: Path) -> None:
    configuration = configured("# c\ntopSpeed=42\n", tmp_path)
    configuration.apply("colour", "BLUE", "--colour")
    rows = {row.key: row for row in configuration.effective()}
    assert rows["topSpeed"].value == "42"
    assert rows["topSpeed"].source == f"{tmp_path}/car.conf:2"
    assert rows["colour"].source == "--colour"
    assert rows["lightsOn"].source == "default"
    assert rows["ownerIP1"].value == ""
    assert rows["topSpeed"].meaning == "How fast. (unit: km/h; changes apply live)"
    assert rows["ownerIP1"].meaning == "Whose. Empty: none. (changes apply live)"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("topSpeed=fast", "a whole number from 1 to 100 (km/h)"),
        ("topSpeed=0", "a whole number from 1 to 100 (km/h)"),
        ("topSpeed=101", "a whole number from 1 to 100 (km/h)"),
        ("topSpeed=", "a whole number from 1 to 100 (km/h)"),
        ("lowSpeed=-1", "a whole number of at least 0"),
        ("lightsOn=yes", "true or false"),
        ("colour=green", "one of RED, BLUE"),
        ("plates=A", "two letters"),
        ("lowSpeed=11", "at most topSpeed"),
    ],
)
def test_a_bad_value_names_file_line_key_and_what_was_expected(line: str, expected: str, tmp_path: Path) -> None:
    key, _, value = line.partition("=")
    with pytest.raises(ConfigError) as caught:
        configured("\n" + line, tmp_path)
    assert str(caught.value) == f"{tmp_path}/car.conf:2: {key}={value}: expected {expected}"


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Configuration(SCHEMA).load_file(tmp_path / "nothing")


def test_an_optional_value_may_be_empty(tmp_path: Path) -> None:
    assert configured("ownerIP1=me\nownerIP1=\n", tmp_path).section(Section).owner_ip1 is None


def test_strange_keys_leave_a_word_each(tmp_path: Path) -> None:
    text = "topSped=1\nTOPSPEED=1\nqwertz=1\nashTray=2\nautoPilot=true\nparkAssist=false\nlowSpeed=1\nlowSpeed=2\n"
    configuration = configured(text, tmp_path)
    where = f"{tmp_path}/car.conf"
    assert configuration.warnings == [
        f"{where}:1: unknown key topSped (did you mean topSpeed?); ignored",
        f"{where}:2: unknown key TOPSPEED (did you mean topSpeed?); ignored",
        f"{where}:3: unknown key qwertz; ignored",
        f"{where}:5: autoPilot is not supported: not yet",
        f"{where}:8: lowSpeed is already set in line 7; the last value is used",
    ]
    assert configuration.notes == [f"{where}:4: ashTray has no effect: smoking is not allowed"]
    assert configuration.section(Section).low_speed == 2


def test_changes_apply_live_where_that_is_possible() -> None:
    configuration = Configuration(SCHEMA)
    heard: list[frozenset[str]] = []
    configuration.listeners.append(heard.append)
    changes = {"topSpeed": "50", "lightsOn": "false", "who": "knows"}
    assert configuration.check_change(changes) == []
    assert configuration.change(changes) == {"topSpeed": "50"}
    assert configuration.section(Section).top_speed == 50
    assert configuration.source("topSpeed") == "changed at run time"
    assert heard == [frozenset({"topSpeed"})]
    assert configuration.counter == 1
    assert configuration.change(changes) == {}
    assert configuration.counter == 1


@pytest.mark.parametrize(
    ("changes", "key", "reason"),
    [
        ({"colour": "BLUE"}, "colour", "takes effect at the next start only"),
        ({"topSpeed": "x"}, "topSpeed", "'x' is not a whole number from 1 to 100"),
        ({"autoPilot": "true"}, "autoPilot", "is not supported: not yet"),
        ({"plates": "BB"}, "plates", "may not be changed by a request"),
        ({"lowSpeed": "60"}, "lowSpeed", "does not fit the other settings: expected at most topSpeed"),
        ({"lightsOn": "true", "lowSpeed": "60"}, "lowSpeed", "does not fit the other settings"),
    ],
)
def test_a_change_is_refused_as_a_whole(changes: dict[str, str], key: str, reason: str) -> None:
    (refusal,) = Configuration(SCHEMA).check_change(changes)
    assert (refusal.key, refusal.protected) == (key, key == "plates")
    assert reason in refusal.reason


def test_keys_can_be_protected_by_configuration() -> None:
    configuration = Configuration(SCHEMA)
    configuration.protect("topSpeed; lightsOn")
    assert [refusal.protected for refusal in configuration.check_change({"lightsOn": "true"})] == [True]


def test_a_value_that_stays_the_same_is_no_change() -> None:
    assert Configuration(SCHEMA).check_change({"colour": "RED"}) == []


def test_the_text_of_all_values_is_sorted() -> None:
    assert Configuration(SCHEMA).properties_text() == (
        "colour=RED\nlightsOn=false\nlowSpeed=1\nownerIP1=\nplates=AA\ntopSpeed=10\n"
    )


def test_a_request_carries_properties() -> None:
    assert parse_changes("a=1\nb = 2\n") == {"a": "1", "b": "2"}


def test_two_sections_may_not_have_the_same_key() -> None:
    with pytest.raises(ValueError, match="two sections have the key topSpeed"):
        Schema(program="x", sections=(Section, Section)).options()


def test_names() -> None:
    assert camel_case("store_path_root_dir") == "storePathRootDir"
    assert [opt.key for opt in options_of(Section)][:2] == ["topSpeed", "lowSpeed"]


def test_the_file_that_explains_itself_is_a_file_of_defaults(tmp_path: Path) -> None:
    text = render_conf(SCHEMA, "Head.")
    assert "# How fast. (unit: km/h; changes apply live)\n#topSpeed=10\n" in text
    assert configured(text, tmp_path).section(Section) == Section()
    lines = [line[1:] for line in text.splitlines() if line.startswith("#") and line[1:2].islower()]
    assert configured("\n".join(lines), tmp_path).section(Section) == Section()


def test_the_sections_of_every_server_are_sound() -> None:
    configuration = Configuration(Schema(program="x", sections=(NettyServerConfig, LogConfig)))
    configuration.check()
    configuration.apply("writeBufferLowWaterMark", "99999999", "-x")
    with pytest.raises(ConfigError, match="at most writeBufferHighWaterMark"):
        configuration.check()
    configuration.apply("logFormat", "json", "-x")
    assert configuration.value("logFormat") == "json"


@dataclass(frozen=True)
class Locked:
    """A section with a secret."""

    door_code: str = option("", "Opens the door.", check=lambda text: "" if text.isdigit() else "digits", secret=True)


def test_a_secret_is_shown_nowhere_and_no_request_changes_it() -> None:
    configuration = Configuration(Schema(program="house", sections=(Locked,)))
    configuration.apply("doorCode", "4711", "house.conf:1")
    assert configuration.section(Locked).door_code == "4711"
    assert configuration.properties_text() == "doorCode=***\n"
    assert [row.value for row in configuration.effective()] == ["***"]
    assert [refusal.protected for refusal in configuration.check_change({"doorCode": "1"})] == [True]
    with pytest.raises(ConfigError, match=r"^house.conf:2: doorCode=\*\*\*: expected digits$"):
        configuration.apply("doorCode", "hunter2", "house.conf:2")


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_a_replaced_file_has_the_permissions_of_the_old_one(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "namesrv.conf"
    path.write_text("tls.server.keyPassword=secret\n")
    path.chmod(mode)
    (tmp_path / "namesrv.conf.tmp").touch(0o666)  # of a write that was cut off
    replace_file(path, b"new")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"new", mode)
    replace_file(tmp_path / "kv.json", b"new")
    assert stat.S_IMODE((tmp_path / "kv.json").stat().st_mode) == 0o644
