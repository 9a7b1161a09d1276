"""Jobs on weights are Celery tasks in a cluster: begun again after the death of a worker, done once, each tenant's own."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import psutil
import psycopg

from store.database import session_name, this_host
from tenants.limits import Counted
from tests.cluster.conftest import BASE, Cluster
from tests.cluster.test_faults import names
from tests.e2e.test_jobs_over_http import client, ended, packed, saved

WAITING = (
    "SELECT DISTINCT application_name FROM pg_stat_activity "
    "WHERE datname = current_database() AND wait_event_type = 'Lock' AND wait_event = 'advisory'"
)


@contextmanager
def frozen_workers(cluster: Cluster) -> Iterator[None]:
    """Stop the Celery workers for the block: what is asked for waits."""
    workers = cluster.process.children("worker")
    for worker in workers:
        worker.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for worker in workers:
            worker.send_signal(signal.SIGCONT)


@contextmanager
def held_storage(cluster: Cluster, tenant: str) -> Iterator[None]:
    """Let nothing be recorded in a tenant's storage for the block: a job is done but for its record."""
    url = cluster.process.database_url.replace("postgresql+asyncpg", "postgresql")
    with psycopg.connect(url) as connection:
        connection.execute(
            "SELECT pg_advisory_xact_lock(%s, hashtext(id)) FROM tenants WHERE name = %s",
            (int(Counted.STORAGE), tenant),
        )
        yield
        connection.rollback()


def at_their_record(cluster: Cluster) -> list[psutil.Process]:
    """Return the workers whose job waits to be recorded."""
    waiting = {name for (name,) in cluster.process.query(WAITING)}
    return [one for one in cluster.process.children("worker") if session_name(this_host(), one.pid) in waiting]


def accepted(http: httpx.Client, endpoint: str, **request: object) -> str:
    """Ask for a job and return its id."""
    answer = http.post(endpoint, **request)  # type: ignore[arg-type]
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def test_jobs_of_killed_workers_are_done_once_and_another_tenants_job_does_not_notice(cluster: Cluster) -> None:
    """Both workers die with a job whose files are written and whose end is not recorded yet."""
    cats, dogs = names()
    keys, url = [cluster.tenant_key(name) for name in (cats, dogs)], cluster.process.base_url
    before = set((cluster.data / "checkpoints").glob("*")) if (cluster.data / "checkpoints").exists() else set()
    mine, theirs = [saved(url, key) for key in keys]
    adapters = set((cluster.data / "checkpoints").iterdir()) - before
    archive = packed(min(adapters))
    with client(url, keys[0]) as http, client(url, keys[1]) as other:
        with frozen_workers(cluster):
            merge = accepted(http, "/merges", json={"path": mine, "name": "merged"})
            imported = accepted(http, "/imports", params={"base_model": BASE}, content=archive)
            waits = accepted(http, "/merges", json={"path": mine, "name": "cancelled"})
            cancelled = http.delete(f"/jobs/{waits}").raise_for_status().json()
            assert (cancelled["state"], cancelled["error"]) == ("cancelled", None)
            holding = held_storage(cluster, cats)
            holding.__enter__()
        try:
            cluster.until(lambda: len(at_their_record(cluster)) == 2, "each worker has a job in hand")
            free = accepted(other, "/merges", json={"path": theirs, "name": "merged"})
            for worker in at_their_record(cluster):
                cluster.process.kill_child(worker)
        finally:
            holding.__exit__(None, None, None)
        # The new workers have it long before the leases of the others end.
        unaffected = ended(other, free)
        assert (unaffected["state"], unaffected["attempts"]) == ("done", 1)
        done = [ended(http, job) for job in (merge, imported)]
        assert [(one["state"], one["attempts"]) for one in done] == [("done", 2), ("done", 2)]
        assert http.get(f"/jobs/{waits}").json()["state"] == "cancelled"
    checkpoints = cluster.process.query(
        "SELECT c.segment, c.name, c.directory FROM checkpoints c JOIN tenants t ON t.id = c.tenant_id "
        "WHERE t.name IN (%s, %s) AND c.segment <> 'weights' OR c.name = 'imported' ORDER BY c.segment, c.name",
        cats,
        dogs,
    )
    assert [row[:2] for row in checkpoints] == [("external_weights", "merged")] * 2 + [("weights", "imported")]
    made = set((cluster.data / "checkpoints").iterdir()) - before - adapters
    assert made == {cluster.data / str(row[2]) for row in checkpoints}, "nothing of the dead attempts is left"
    assert list((cluster.data / "imports").iterdir()) == []
