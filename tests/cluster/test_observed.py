"""Metrics and health of every process of a cluster."""

import uuid

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.conftest import PROCESSES, Cluster, at_work


def pages(cluster: Cluster) -> dict[str, dict[str, float]]:
    """Return the sum of every metric by process."""
    found: dict[str, dict[str, float]] = {}
    for number in range(PROCESSES):
        page = httpx.get(f"http://127.0.0.1:{cluster.metrics_port + number}/metrics", timeout=10).text
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
                if sample.name == "weft_process_info":
                    name = f"{sample.labels['process']}.{number}"
        found[name] = sums
    return found


def test_every_process_is_ready_and_alive(cluster: Cluster) -> None:
    for number in range(PROCESSES):
        answer = httpx.get(f"http://127.0.0.1:{cluster.metrics_port + number}/healthz", timeout=60)
        assert answer.status_code == 200, answer.text
    cluster.until(cluster.is_ready, "every process is ready")


def test_every_pool_has_replicas_of_its_own_names(cluster: Cluster) -> None:
    names = [
        sample.labels["replica"]
        for number in range(PROCESSES)
        for family in text_string_to_metric_families(
            httpx.get(f"http://127.0.0.1:{cluster.metrics_port + number}/metrics", timeout=10).text
        )
        for sample in family.samples
        if sample.name == "weft_replica_up"
    ]
    assert sorted(names) == ["pool-0/torch", "pool-1/torch"]


def test_metrics_of_all_processes_add_up_to_the_work(cluster: Cluster) -> None:
    def total(metric: str) -> float:
        return sum(page.get(metric, 0.0) for page in pages(cluster).values())

    before = total("weft_optimizer_steps_total")
    with at_work(cluster, *(f"tenant-{uuid.uuid4().hex[:8]}" for _ in range(2))) as tenants:
        pass
    found = pages(cluster)
    assert {name.partition(".")[0] for name in found} == {"api", "worker", "pool"}
    assert total("weft_optimizer_steps_total") - before == sum(tenant.account.steps for tenant in tenants)
    assert total("weft_lease_moves_total") >= 2
    for name, page in found.items():
        kind = name.partition(".")[0]
        assert page["weft_database_up"] == 1 if kind == "api" else True
        assert page["process_resident_memory_bytes"] > 0
        assert page["weft_database_pool_limit"] >= page["weft_database_pool_size"] > 0
        if kind == "api":
            assert page["weft_http_requests_total"] > 0
            assert "weft_pending_operations" in page or page["weft_database_up"] == 1
        if kind == "pool":
            assert page["weft_replica_up"] == 1
