"""A follower's record of a sample's tokens."""

from api.token_order import TokenOrder
from ledger.token_feed import TokensMade


def test_a_sequence_without_a_token_keeps_no_others_from_being_handed_over() -> None:
    order = TokenOrder(3)
    order.take([TokensMade(0, 0, "run@1", [5, 6], [-1.0, -2.0]), TokensMade(2, 0, "run@1", [7], [-3.0])])
    progress = order.progress()
    assert [one.tokens.tolist() for one in progress.output.sequences] == [[5, 6], [], [7]]
    assert [len(one.spans) for one in progress.report.sequences] == [1, 0, 1]
