"""Accounts of tenants with limits: what the ledger says was done, beside what their rates and budgets say."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from testing.cluster_process import ClusterProcess

_MINE = "tenant_id IN (SELECT id FROM tenants WHERE name = ANY(%s))"
_METER = "CASE WHEN kind = 'sample' THEN 'sample' ELSE 'train' END"
_DONE = (
    f"SELECT tenant_id, {_METER}, extract(epoch FROM created_at)::float8, extract(epoch FROM finished_at)::float8, tokens "
    f"FROM operations WHERE {_MINE} AND tokens > 0 AND state = 'done' ORDER BY finished_at"
)
_RATES = f"SELECT tenant_id, meter, charged - returned FROM rates WHERE {_MINE}"
_BUDGETS = f"SELECT tenant_id, spent FROM budgets WHERE {_MINE}"
_COUNTS = (
    f"SELECT count(*) FILTER (WHERE state = 'pending'), count(*) FILTER (WHERE state = 'done'), "
    f"count(*) FILTER (WHERE state = 'failed') FROM operations WHERE {_MINE} AND kind IN ('sample', 'forward_backward')"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Differences, which are to be 0, and what was done.

    - ``admitted_minus_allowed``: most tokens by which the work done at any moment was over burst and rate.
    - ``charged_minus_done_tokens``: tokens by which rates and budgets differ from the work done.
    - ``lost``: requests that were answered and are not done once, or failed.
    """

    admitted_minus_allowed: float
    charged_minus_done_tokens: int
    lost: int
    done: int

    def figures(self) -> dict[str, float]:
        """Return the figures by name."""
        return asdict(self)


def pending(cluster: ClusterProcess, names: Sequence[str]) -> int:
    """Return how many operations of the tenants are pending."""
    ((found, _, _),) = cluster.query(_COUNTS, list(names))
    return int(str(found))


def audit(cluster: ClusterProcess, names: Sequence[str], *, sent: int, a_minute: int, burst: int) -> Verdict:
    """Compare the tenants' accounts. ``sent`` is the number of requests that their clients had answered."""
    done: dict[tuple[object, object], list[tuple[float, float, int]]] = {}
    for tenant, meter, created, finished, tokens in cluster.query(_DONE, list(names)):
        done.setdefault((tenant, meter), []).append((float(str(created)), float(str(finished)), int(str(tokens))))
    over = 0.0
    for line in done.values():
        begin, admitted = min(created for created, _, _ in line), 0
        for _, finished, tokens in line:
            admitted += tokens
            over = max(over, admitted - burst - a_minute / 60 * (finished - begin))
    differing = 0
    for tenant, meter, net in cluster.query(_RATES, list(names)):
        differing += abs(int(str(net)) - sum(tokens for _, _, tokens in done.get((tenant, meter), [])))
    for tenant, spent in cluster.query(_BUDGETS, list(names)):
        used = sum(tokens for key, line in done.items() if key[0] == tenant for _, _, tokens in line)
        differing += abs(int(str(spent)) - used)
    ((waiting, ended, failed),) = cluster.query(_COUNTS, list(names))
    lost = abs(sent - int(str(ended))) + int(str(waiting)) + int(str(failed))
    return Verdict(over, differing, lost, int(str(ended)))
