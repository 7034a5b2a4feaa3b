"""The shares of the crash tests are all of them together, and none takes what another one does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.crash.share import VARIABLE, Share, share


@given(st.integers(1, 20), st.integers(0, 100))
def test_all_shares_are_the_whole(of: int, more: int) -> None:
    count = of + more
    taken = sorted(part for turn in range(of) for part in Share(turn, of).parts(count))
    assert taken == list(range(count))


def test_without_the_variable_all_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert list(share().parts(3)) == [0, 1, 2]
    assert share().least(1000) == 1000


def test_the_variable_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "2/4")
    assert list(share().parts(12)) == [2, 6, 10]
    assert share().least(1600) == 100


@pytest.mark.parametrize("text", ["4/4", "1", "0/0", "-1/4", "1/4/2", "x"])
def test_another_text_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ValueError, match="expected TURN/PARTS"):
        share()


def test_more_shares_than_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="8 shares of 4 parts"):
        Share(0, 8).parts(4)
