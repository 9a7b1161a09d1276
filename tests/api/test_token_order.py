"""A follower's record of a sample's tokens."""

import pytest

from api.token_order import TokenOrder
from ledger.token_feed import TokensMade


def test_a_sequence_without_a_token_keeps_no_others_from_being_handed_over() -> None:
    order = TokenOrder(3)
    order.take([TokensMade(0, 0, "run@1", [5, 6], [-1.0, -2.0]), TokensMade(2, 0, "run@1", [7], [-3.0])])
    progress = order.progress()
    assert [one.tokens.tolist() for one in progress.output.sequences] == [[5, 6], [], [7]]
    assert [len(one.spans) for one in progress.report.sequences] == [1, 0, 1]


def part(start: int, *tokens: int, claim: int, restarts: int = 0) -> TokensMade:
    return TokensMade(0, start, "run@1", list(tokens), [-1.0] * len(tokens), restarts, claim)


def heard(order: TokenOrder) -> list[int]:
    return order.progress().output.sequences[0].tokens.tolist()


@pytest.mark.parametrize("restarts", [0, 3])
def test_late_parts_of_an_earlier_claim_replace_nothing(restarts: int) -> None:
    order, beside = TokenOrder(1), TokenOrder(1)
    order.take([part(0, 1, 2, 3, claim=1), part(3, 40, 41, 42, claim=2)])
    beside.take([part(0, 1, 2, 3, claim=1)])
    late = part(3, 4, 5, claim=1, restarts=restarts)
    assert order.take([late]) == []
    assert order.take([part(6, 43, claim=2)]) == [part(6, 43, claim=2)]
    assert heard(order) == [1, 2, 3, 40, 41, 42, 43]
    assert beside.take([late]) == ([late] if restarts == 0 else [])


def test_a_later_claim_that_begins_anew_replaces_what_had_begun_anew_before() -> None:
    """The next process has nothing of what the earlier one drew, and so none of its restarts."""
    order = TokenOrder(1)
    order.take([part(0, 1, 2, 3, claim=1, restarts=2)])
    order.take([part(0, 1, 9, claim=2)])
    assert heard(order) == [1, 9]


def test_parts_without_a_claim_are_taken_as_they_come() -> None:
    """A process of a version before draws on where one of this version has stopped."""
    order = TokenOrder(1)
    order.take([part(0, 1, 2, claim=3), part(2, 3, claim=0), part(1, 7, claim=0)])
    assert heard(order) == [1, 7]
