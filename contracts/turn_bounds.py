"""Bounds on turns: how many tokens of others may be served before a tenant's own, by deficit round robin.

``engine.round_robin`` has the rule. The proofs are in ``workers.training.scheduler`` and below; property tests hold both.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

QUANTA_PER_PASS = 16
"""Turns of a tenant of share 1 that fill a pass: many enough that a pass serves many tenants, few enough that a turn is a
handful of sequences."""
LEAST_PART = 4
"""A pass beside other tenants has at least one part in ``LEAST_PART`` of the token budget, if so much waits. A pass of less would
compute each token more slowly."""
SAMPLE_QUANTUM = 64
"""Tokens of one turn of a tenant of share 1 among samples: few, so that many short samples of one tenant do not take all
seats at once."""


@dataclass(frozen=True, slots=True)
class Queue:
    """Work that is shared out now.

    - ``share``: the tenant's weight. ``others``: weights of the other tenants with work.
    - ``tokens``: the tenant's tokens up to and including its item, in order of acceptance.
    - ``longest``: most tokens of one item.
    """

    share: float
    others: Collection[float]
    tokens: int
    longest: int


def least_tokens(pass_tokens: int) -> int:
    """Return the tokens of the smallest pass that is planned while more waits; a full one has ``pass_tokens``."""
    return max(1, pass_tokens // LEAST_PART)


def passes_until_served(queue: Queue, pass_tokens: int) -> int:
    """Return within how many passes an item is served, full ones of ``pass_tokens`` (``workers.training.scheduler``: waiting)."""
    turns = math.ceil(queue.tokens * QUANTA_PER_PASS / (queue.share * pass_tokens))
    by_quanta = (turns + 1) * sum(queue.others) / QUANTA_PER_PASS
    by_length = (len(queue.others) * queue.longest + queue.tokens) / pass_tokens
    # Two passes in a row serve more than the least pass holds.
    return math.ceil(2 + 2 * (by_quanta + by_length) * pass_tokens / least_tokens(pass_tokens))


def tokens_before(queue: Queue, quantum: float, processes: int = 1) -> int:
    """Return the most tokens of others that are taken before an item, less what they give back, while nobody is put off.

    Proof: ``K`` turns cover ``tokens`` where one process hands out. To each turn another tenant has one turn of its quantum, and
    one more if it joins, and less than ``longest`` saved up. Of several processes each has a circle of its own: all but one
    may give the tenant a turn that covers nothing.
    """
    turns = math.ceil(queue.tokens / (queue.share * quantum))
    by_quanta = (turns + 2 * processes - 1) * quantum * sum(queue.others)
    return math.ceil(by_quanta + processes * len(queue.others) * queue.longest)


def own_tokens_before(tokens: int, weight: float, others: Iterable[tuple[float, int]]) -> int:
    """Return the most tokens of its own runs that a tenant is served up to and including an item, where it gives them weights.

    - ``tokens``: those of the item's run up to and including the item. ``weight``: the run's.
    - ``others``: weight and longest item of each other run of the tenant with work.

    Proof (``engine.weighted_order``): while the item waits, its run takes ``tokens`` at most, and another run no more than that
    times the ratio of their weights, and one longest item of each beside it.
    """
    return math.ceil(sum((tokens * one / weight + longest * (1 + one / weight) for one, longest in others), tokens))


_OF_ROUNDED = 0.75
"""Mean part that a number is of the least power of two that is not less."""


def expected_tokens(queue: Queue, *, others_rounded: int, own_waiting: int, pass_tokens: int | None) -> float:
    """Return about how many tokens are computed until an item is served, if nothing more comes.

    - ``others_rounded``: tokens of other tenants that wait, up to the next power of two. ``own_waiting``: those of its own.
    - ``pass_tokens``: most tokens of a pass, at whose end the item is served; None: it is served by itself.
    """
    others = others_rounded * _OF_ROUNDED
    served = queue.tokens + min(others, queue.tokens / queue.share * sum(queue.others))
    if pass_tokens is None:
        return served
    return max(served, min(math.ceil(served / pass_tokens) * pass_tokens, own_waiting + others))
