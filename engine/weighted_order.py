"""Start-time fair queueing: the order of one tenant's items between its own runs, by weights that the tenant gives them.

Each run has a tag: the tokens that it took, divided by its weight, while it had work beside others. The next item is one of the
run with the least tag (Goyal, Vin and Cheng 1996, "Start-time Fair Queueing"). A run that comes gets the least tag of those that
have work, unless it has one that is ahead of that: it gains nothing by leaving.

Bound: over any calls through which two runs of weights w and w' have work, the tokens taken of each, divided by its weight,
differ by less than L / w + L / w', L the largest item.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypeVar


class OfRun(Protocol):
    """An item of a run."""

    @property
    def run(self) -> str:
        """Run that the item is of."""

    @property
    def cost(self) -> int:
        """Tokens of the item."""


Item = TypeVar("Item", bound=OfRun)
Tags = Mapping[str, float]
"""Tags by run, between two calls."""


def tags_now(items: Sequence[OfRun], before: Tags) -> dict[str, float]:
    """Return the tags of the runs with items, and of those that are ahead of them and may come back."""
    present = list(dict.fromkeys(item.run for item in items))
    least = min((before[run] for run in present if run in before), default=0.0)
    tags = {run: max(before.get(run, least), least) for run in present}
    return tags | {run: tag for run, tag in before.items() if run not in tags and tag > least}


def in_weighted_order(items: Sequence[Item], tags: Tags, weights: Mapping[str, float]) -> Iterator[Item]:
    """Yield the items, oldest first within a run, as the runs' turns come. Of equal tags the older item goes first.

    ``tags`` are of ``tags_now``; a run that is missing in ``weights`` has 1.0.
    """
    queues: dict[str, list[Item]] = {}
    places: dict[str, list[int]] = {}
    for place, item in reversed(list(enumerate(items))):
        queues.setdefault(item.run, []).append(item)
        places.setdefault(item.run, []).append(place)
    current = dict(tags)
    while queues:
        run = min(queues, key=lambda one: (current[one], places[one][-1]))
        item = queues[run].pop()
        places[run].pop()
        current[run] += item.cost / weights.get(run, 1.0)
        if not queues[run]:
            del queues[run]
        yield item


def tags_after(tags: Tags, taken: Mapping[str, int], weights: Mapping[str, float]) -> Tags:
    """Return the tags once the runs took these tokens, counted from the least of them."""
    moved = {run: tag + taken.get(run, 0) / weights.get(run, 1.0) for run, tag in tags.items()}
    least = min(moved.values(), default=0.0)
    return {run: tag - least for run, tag in moved.items()}
