"""Numbers in forms: what 64 bits do not hold is refused before anything is built from it."""

import pytest

from api.dashboard.form_values import integer, number
from contracts.errors import InvalidRequest


@pytest.mark.parametrize("text", [str(2**63), str(-(2**63) - 1), "1" * 5000, "1e3", "٣", "0x10", "1 1", "--1"])
def test_a_whole_number_is_one_that_64_bits_hold(text: str) -> None:
    with pytest.raises(InvalidRequest, match="whole number"):
        integer({"seed": text}, "seed")


@pytest.mark.parametrize("text", ["nan", "inf", "1e999", "x"])
def test_a_number_is_finite(text: str) -> None:
    with pytest.raises(InvalidRequest, match="must be a number"):
        number({"top_p": text}, "top_p")


def test_numbers_are_read_and_empty_fields_are_none() -> None:
    assert (integer({"a": "-12"}, "a"), integer({"a": ""}, "a"), number({"a": " 0.5 "}, "a")) == (-12, None, 0.5)
    assert integer({"a": str(2**63 - 1)}, "a") == 2**63 - 1
