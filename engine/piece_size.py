"""Size of the pieces into which work is cut while several tenants have some: about a stated time each.

A piece that has begun runs to its end, and who comes meanwhile waits for it. A tenant alone has full pieces. Beside others a
piece takes about ``seconds``, by what the pieces before it took. So nobody waits longer for a tenant that sends more.

Bound: beside others a piece takes about ``seconds``, or as long as the least piece, below which pieces would cost more than
they save others. What cannot be cut, as one sequence in training, is a piece whatever it takes.
"""

from collections.abc import Callable, Iterable
from time import monotonic

COMPANY_SECONDS = 10.0
"""Time for which a tenant counts as there after its last work: between two of its requests it has none."""
_KEPT = 7 / 8
"""Part of what earlier pieces took that counts beside one more piece."""


class PieceSize:
    """Tokens of the next piece, learned from those before it. Not thread-safe."""

    def __init__(self, seconds: float, *, clock: Callable[[], float] = monotonic) -> None:
        """``seconds`` is the time that a piece should take beside others; ``clock`` tells the seconds of now."""
        self._bound = seconds
        self._clock = clock
        self._tokens = 0.0
        self._seconds = 0.0
        self._seen: dict[str, float] = {}

    def meet(self, tenants: Iterable[str]) -> None:
        """Note that ``tenants`` have work now."""
        now = self._clock()
        self._seen = {tenant: at for tenant, at in self._seen.items() if now - at < COMPANY_SECONDS}
        self._seen |= dict.fromkeys(tenants, now)

    def note(self, tokens: float, seconds: float) -> None:
        """Learn from a piece of ``tokens`` tokens that took ``seconds``. Larger pieces count for more."""
        self._tokens = self._tokens * _KEPT + tokens
        self._seconds = self._seconds * _KEPT + seconds

    def tokens(self, *, full: int, least: int) -> int:
        """Return the most tokens of the next piece: ``full`` for a tenant alone, and before anything is known."""
        if len(self._seen) < 2 or not self._seconds:
            return full
        return max(min(full, int(self._bound * self._tokens / self._seconds)), min(full, least))
