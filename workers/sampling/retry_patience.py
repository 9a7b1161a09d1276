"""Limit of a sample's failed attempts in a row, and the pause before each new attempt."""

from contracts.errors import EngineFailure

MOST_FRUITLESS_ATTEMPTS = 8
"""Failed attempts in a row without a new token after which the sample fails."""
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 5.0


class RetryPatience:
    """Counter of one sample's failed attempts since its last new token."""

    def __init__(self) -> None:
        self._fruitless = 0

    def pause_after(self, failure: EngineFailure | None, *, made: int) -> float:
        """Count an attempt that made ``made`` tokens, and return the seconds to wait before the next attempt.

        ``failure`` is None when a gate or a version cut the attempt; the pause is then 0. Raises ``EngineFailure`` after
        ``MOST_FRUITLESS_ATTEMPTS`` failures in a row without a new token.
        """
        if failure is None or made > 0:
            self._fruitless = 0
            return 0.0
        self._fruitless += 1
        if self._fruitless == MOST_FRUITLESS_ATTEMPTS:
            raise EngineFailure(
                f"the sample made no progress in {self._fruitless} attempts; the last one: {failure.message}"
            )
        return min(_FIRST_PAUSE_SECONDS * 2.0**self._fruitless, _LONGEST_PAUSE_SECONDS)
