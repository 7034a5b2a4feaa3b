import pickle

import pytest

from trimq.pipeline.options import OptionError, Options

pytestmark = pytest.mark.one_pyspark


def test_an_error_names_the_option_its_value_and_what_was_expected() -> None:
    with pytest.raises(OptionError, match=r"option minPartitions = 'many': expected a whole number, at least 1"):
        Options({"minPartitions": "many"}).integer("minPartitions", least=1)
    with pytest.raises(OptionError, match=r"option minPartitions = '0': expected a whole number, at least 1"):
        Options({"minPartitions": "0"}).integer("minPartitions", least=1)
    with pytest.raises(OptionError, match=r"option failOnDataLoss = 'perhaps': expected true or false"):
        Options({"failOnDataLoss": "perhaps"}).flag("failOnDataLoss", default=True)
    with pytest.raises(OptionError, match=r"option namesrv is not given: expected addresses"):
        Options({"namesrv": "  "}).required("namesrv", "addresses")
    with pytest.raises(OptionError, match=r"option mode = 'slow': expected fast or careful"):
        Options({"mode": "slow"}).choice("mode", ("fast", "careful"), "fast")
    with pytest.raises(OptionError, match=r"option queues = '\{': expected JSON"):
        Options({"queues": "{"}).json("queues", "JSON")
    with pytest.raises(OptionError, match=r"option b = '2': expected not to be given together with a"):
        Options({"a": "1", "b": "2"}).at_most_one("a", "b")


def test_an_unknown_option_is_refused_and_the_likely_one_named() -> None:
    with pytest.raises(OptionError, match=r"option startingOffset = 'latest': .* did you mean startingOffsets\?"):
        Options({"startingOffset": "latest"}).check_names(["startingOffsets", "topics"], "rocketmq")
    Options({"STARTINGOFFSETS": "x", "path": "y", "checkpointLocation": "z"}).check_names(
        ["startingOffsets"], "rocketmq"
    )


def test_names_are_compared_without_case_and_blanks_are_nothing() -> None:
    options = Options({"TOPICS": " A , B,,A ", "failondataloss": "FALSE", "group": ""})
    assert options.words("topics") == ("A", "B")
    assert options.flag("failOnDataLoss", default=True) is False
    assert not options.has("group")
    assert options.integer("minPartitions") is None
    assert options.choice("mode", ("Fast", "careful"), "Fast") == "Fast"


def test_an_error_survives_the_transfer_between_sparks_processes() -> None:
    error = pickle.loads(pickle.dumps(OptionError("topics", None, "names of topics")))
    assert isinstance(error, OptionError)
    assert str(error) == "option topics is not given: expected names of topics"
