"""The table of properties has every name that Apache's MessageConst has."""

import re
import shutil
import subprocess
import tomllib

import pytest

from tests.interop.harness import partners
from trimq.protocol import generate_properties

pytestmark = pytest.mark.partners

_CONSTANT = re.compile(r'static final java\.lang\.String (\w+) = "(.*)";')


def test_no_name_is_missing() -> None:
    (jar,) = partners.apache_servers().glob("rocketmq-common-*.jar")
    javap = shutil.which("javap")
    assert javap is not None, "a JDK has javap"
    command = [javap, "-constants", "-cp", str(jar), "org.apache.rocketmq.common.message.MessageConst"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    constants = dict(_CONSTANT.findall(text))
    table = tomllib.loads((generate_properties.HERE / "properties.toml").read_text(encoding="utf-8"))
    others = table["not_properties"]
    assert others == {name: constants[name] for name in others}
    names = {entry["name"] for entry in table["property"].values()}
    apaches = {value for name, value in constants.items() if name not in others}
    assert len(apaches) > 60, text
    assert apaches - names == set(), "names that the table does not have"
    # Only clients of ONS have the first one; only this broker writes the second one.
    assert names - apaches == {"__STARTDELIVERTIME", "TRAN_RESUMED_OFFSET"}
