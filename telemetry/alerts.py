"""Alerts worth having, as PromQL over weft's metrics; ``weft grafana --alerts`` writes them as rules for Prometheus."""

from dataclasses import dataclass

_HOURLY_STEPS = ("forget-audit", "forget-usage", "forget-webhooks", "remove-orphans")
"""Steps of housekeeping that run once an hour. The other ones run every ten minutes, or more often."""
_OTHERS = ",".join(f'step!="{step}"' for step in _HOURLY_STEPS)


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert. ``expression`` has a series for each thing that is wrong, for ``duration`` on end."""

    name: str
    text: str
    expression: str
    duration: str = "0s"


ALERTS = (
    Alert("WeftWorkNotDone", "work is not done", "max by (kind, base) (weft_oldest_pending_seconds) > 300"),
    Alert(
        "WeftNobodyTrains",
        "nobody trains a base",
        'sum by (base) (weft_pending_operations{kind!="sample"} - weft_held_operations{kind!="sample"}) > 0 '
        "unless sum by (base) (rate(weft_pass_seconds_count[5m])) > 0",
        "5m",
    ),
    Alert(
        "WeftFailsOperations",
        "weft fails operations",
        'sum(rate(weft_operations_finished_total{outcome="engine_failure"}[5m])) > 0',
    ),
    Alert(
        "WeftFailsRequests",
        "the API fails requests",
        'sum(rate(weft_http_requests_total{status=~"5.."}[5m])) / sum(rate(weft_http_requests_total[5m])) > 0.01',
    ),
    Alert("WeftReplicaAway", "a replica is away", "min by (base, replica) (weft_replica_up) == 0", "1m"),
    Alert("WeftDatabaseAway", "the database is away", "min(weft_database_up) == 0", "30s"),
    Alert(
        "WeftConnectionsUsedUp",
        "its connections are used up",
        "weft_database_pool_checked_out >= weft_database_pool_limit",
        "1m",
    ),
    Alert(
        "WeftEventLoopStands",
        "an event loop stands still",
        "max by (instance) (weft_event_loop_lag_seconds) > 1",
        "1m",
    ),
    Alert("WeftSnapshotsFail", "snapshots fail, replays grow", "increase(weft_snapshot_failures_total[15m]) > 0"),
    Alert(
        "WeftAdaptersThrash",
        "adapters thrash",
        'sum by (base) (rate(weft_adapters_paged_total{direction="in"}[5m])) > 1',
        "10m",
    ),
    Alert(
        "WeftSwapsSlow",
        "swaps are slow",
        "histogram_quantile(0.95, sum by (le, base) (rate(weft_swap_seconds_bucket[10m]))) > 0.5",
    ),
    Alert(
        "WeftSamplingDiverges",
        "tokens are trained under other weights than they were sampled with",
        "histogram_quantile(0.5, sum by (le, base) (rate(weft_policy_sampling_kl_bucket[15m]))) > 0.03",
        "15m",
    ),
    Alert(
        "WeftRatiosOutside",
        "tokens are trained under other weights than they were sampled with",
        "histogram_quantile(0.5, sum by (le, base) (rate(weft_policy_ratio_outside_bucket[15m]))) > 0.3",
        "15m",
    ),
    Alert(
        "WeftRatiosLarge",
        "tokens are trained under other weights than they were sampled with",
        "histogram_quantile(0.5, sum by (le, base) (rate(weft_policy_ratio_max_bucket[15m]))) > 10",
        "15m",
    ),
    Alert(
        "WeftHousekeepingStands",
        "housekeeping stands still",
        f"min by (step) (weft_housekeeping_success_age_seconds{{{_OTHERS}}}) > 1800",
    ),
    Alert(
        "WeftHourlyHousekeepingStands",
        "housekeeping stands still",
        "min by (step) (weft_housekeeping_success_age_seconds) > 10800",
    ),
    Alert(
        "WeftHousekeepingFails",
        "housekeeping stands still",
        "min by (step) (weft_housekeeping_failing_seconds) > 600",
    ),
    Alert(
        "WeftHousekeepingBehind",
        "housekeeping falls behind",
        "min by (step) (weft_housekeeping_backlog_seconds) > 3600",
    ),
    Alert(
        "WeftOperationsSuspected",
        "operations are at hand when processes die",
        "sum(increase(weft_operations_suspected_total[10m])) > 0",
    ),
    Alert("WeftDeviceSick", "a device is sick", "sum by (base) (increase(weft_device_failures_total[10m])) > 0"),
    Alert(
        "WeftLeasesWander",
        "leases wander",
        'sum(increase(weft_lease_moves_total{reason="expired"}[10m])) > 0',
    ),
)


def alert_rules() -> dict[str, object]:
    """Return the alerts as a file of rules that Prometheus reads."""
    rules = [
        {
            "alert": one.name,
            "expr": one.expression,
            "for": one.duration,
            "labels": {"service": "weft"},
            "annotations": {"summary": one.text},
        }
        for one in ALERTS
    ]
    return {"groups": [{"name": "weft", "rules": rules}]}
