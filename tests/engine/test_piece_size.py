"""The size of pieces: full for a tenant alone, and of about a stated time beside others, whatever the machine's speed."""

import pytest

from engine.piece_size import COMPANY_SECONDS, PieceSize

FULL, LEAST, SECONDS = 1000, 250, 0.1


@pytest.mark.parametrize("per_token", [1e-6, 1e-4, 2e-4, 3e-4, 1e-2])
@pytest.mark.parametrize("fixed", [0.0, 0.03])
def test_pieces_beside_others_take_the_stated_time_or_are_the_least(per_token: float, fixed: float) -> None:
    """The time of a piece is learned from those before it, also after the machine has become slower or quicker."""
    size = PieceSize(SECONDS, clock=lambda: 0.0)
    size.meet(["flood", "light"])
    assert size.tokens(full=FULL, least=LEAST) == FULL, "nothing is known yet"
    for speed in (1.0, 5.0, 0.2, 1.0):
        for _ in range(60):
            tokens = size.tokens(full=FULL, least=LEAST)
            size.note(tokens, speed * (fixed + tokens * per_token))
        tokens = size.tokens(full=FULL, least=LEAST)
        seconds = speed * (fixed + tokens * per_token)
        assert LEAST <= tokens <= FULL
        assert tokens == LEAST or seconds <= SECONDS * 1.02
        assert tokens == FULL or seconds >= SECONDS * 0.95


def test_only_company_makes_pieces_smaller() -> None:
    now = 0.0
    size = PieceSize(SECONDS, clock=lambda: now)
    size.note(FULL, 1.0)

    def tokens() -> int:
        return size.tokens(full=FULL, least=LEAST)

    size.meet(["flood"])
    assert tokens() == FULL
    size.meet(["light"])
    assert tokens() == LEAST
    now += COMPANY_SECONDS / 2
    size.meet(["flood"])
    assert tokens() == LEAST, "a tenant is not away between two of its requests"
    now += COMPANY_SECONDS / 2
    size.meet(["flood"])
    assert tokens() == FULL


def test_the_least_is_never_more_than_a_full_piece() -> None:
    size = PieceSize(SECONDS)
    size.meet(["flood", "light"])
    size.note(10, 100.0)
    assert size.tokens(full=16, least=64) == 16
