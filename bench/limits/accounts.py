"""Accounts of tenants with limits: what the ledger says was done, beside what their rates and budgets say."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from testing.cluster_process import ClusterProcess

_MINE = "tenant_id IN (SELECT id FROM tenants WHERE name = ANY(%s))"
_METER = "CASE WHEN kind = 'sample' THEN 'sample' ELSE 'train' END"
_OF_KEY = "(SELECT id::text FROM api_keys WHERE id = key_id AND limits IS NOT NULL)"
_OF_PROJECT = (
    "(SELECT sessions.project FROM sessions WHERE sessions.id = split_part(operations.lane, ':', 1) "
    "AND sessions.project IN (SELECT id FROM projects WHERE limits IS NOT NULL))"
)
_DONE = (
    f"SELECT tenant_id, {_METER}, extract(epoch FROM created_at)::float8, extract(epoch FROM finished_at)::float8, tokens, "
    f"{_OF_KEY}, {_OF_PROJECT} FROM operations WHERE {_MINE} AND tokens > 0 AND state = 'done' ORDER BY finished_at"
)
_NET = "meter, per_second, burst, charged - returned"
_RATES = f"SELECT tenant_id, '', {_NET} FROM rates WHERE {_MINE}"
_LINES = f"SELECT tenant_id, scope_id, {_NET} FROM rate_lines WHERE {_MINE}"
_BUDGETS = f"SELECT tenant_id, spent FROM budgets WHERE {_MINE}"
_COUNTS = (
    f"SELECT count(*) FILTER (WHERE state = 'pending'), count(*) FILTER (WHERE state = 'done'), "
    f"count(*) FILTER (WHERE state = 'failed') FROM operations WHERE {_MINE} AND kind IN ('sample', 'forward_backward')"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Differences, which are to be 0, and what was done.

    - ``admitted_minus_allowed``: most tokens by which the work done at any moment was over burst and rate.
    - ``charged_minus_done_tokens``: tokens by which rates, of keys and projects too, and budgets differ from the work done.
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


def audit(cluster: ClusterProcess, names: Sequence[str], *, sent: int) -> Verdict:
    """Compare the tenants' accounts. ``sent`` is the number of requests that their clients had answered."""
    done: dict[tuple[object, object, object], list[tuple[float, float, int]]] = {}
    used: Counter[object] = Counter()
    for tenant, meter, created, finished, tokens, key, project in cluster.query(_DONE, list(names)):
        used[tenant] += int(str(tokens))
        for owner in ("", key, project):
            if owner is not None:
                one = (float(str(created)), float(str(finished)), int(str(tokens)))
                done.setdefault((tenant, owner, meter), []).append(one)
    over, differing = 0.0, 0
    for tenant, owner, meter, per_second, burst, net in (
        *cluster.query(_RATES, list(names)),
        *cluster.query(_LINES, list(names)),
    ):
        line, admitted = done.pop((tenant, owner, meter), []), 0
        begin = min((created for created, _, _ in line), default=0.0)
        for _, finished, tokens in line:
            admitted += tokens
            over = max(over, admitted - int(str(burst)) - float(str(per_second)) * (finished - begin))
        differing += abs(int(str(net)) - admitted)
    # Work of a rate without a row.
    differing += sum(tokens for line in done.values() for _, _, tokens in line)
    for tenant, spent in cluster.query(_BUDGETS, list(names)):
        differing += abs(int(str(spent)) - used[tenant])
    ((waiting, ended, failed),) = cluster.query(_COUNTS, list(names))
    lost = abs(sent - int(str(ended))) + int(str(waiting)) + int(str(failed))
    return Verdict(over, differing, lost, int(str(ended)))
