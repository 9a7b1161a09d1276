"""Publisher of samples' tokens to those who follow them: new tokens at once, and others again at each tenant's own pace.

Redis sends what is published to every process, and cuts off a process that does not read it soon enough. So many long samples
that are published again must not come all at once. Their followers have the tokens at the latest with the results.
"""

from collections.abc import Callable
from dataclasses import replace
from time import monotonic

from contracts.ids import TenantId
from ledger.token_feed import FeedKey, TokenFeed
from workers.sampling.continuation import Continuation

AGAIN_AT_ONCE = 4096
"""Most tokens of one tenant that are published at once beside the new ones."""
AGAIN_A_SECOND = 16_384
"""Tokens of one tenant that are published in a second beside the new ones."""
_MOST_TENANTS = 1024
"""Most tenants remembered before those are forgotten whose pace is not used."""


class TokenPublisher:
    """Publisher of the samples of one process. Used from one event loop."""

    def __init__(self, feed: TokenFeed, clock: Callable[[], float] = monotonic) -> None:
        self._feed = feed
        self._clock = clock
        self._used_until: dict[TenantId, float] = {}
        """Seconds on the clock up to which each tenant has used its pace."""

    def publish(
        self,
        key: FeedKey,
        tenant: TenantId,
        continuation: Continuation,
        drawn: int,
        *,
        claim: int = 0,
        publication: int | None = None,
    ) -> None:
        """Publish the ``drawn`` tokens, and of others those that the tenant's pace allows.

        ``claim`` and ``publication``: see ``TokensMade``.
        """
        continuation.publish_again(self._feed.take_asked_again(key))
        now = self._clock()
        used = max(0.0, self._used_until.get(tenant, now) - now)
        again = max(0, int(AGAIN_AT_ONCE - used * AGAIN_A_SECOND))
        made = continuation.new_tokens(drawn + again)
        if (beside := sum(len(part.tokens) for part in made) - drawn) > 0:
            self._used_until[tenant] = now + used + beside / AGAIN_A_SECOND
            if len(self._used_until) > _MOST_TENANTS:
                self._used_until = {one: until for one, until in self._used_until.items() if until > now}
        if made:
            self._feed.publish(key, [replace(part, claim=claim, publication=publication) for part in made])
