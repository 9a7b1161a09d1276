"""Processes and services taken away while two tenants work: no operation is lost, none takes effect twice."""

import signal
import time
import uuid

import httpx
import psutil
import psycopg
import pytest

from store.database import IDLE_SECONDS
from store.settings import Settings
from tests.cluster.conftest import BASE, LEASE_SECONDS, Cluster, at_work, recovered
from workers.cluster.celery_app import ANNOUNCE, HOUSEKEEPING, make_celery, send_placement, step_task


def names() -> tuple[str, str]:
    """Return names for two new tenants."""
    return f"cats-{uuid.uuid4().hex[:8]}", f"dogs-{uuid.uuid4().hex[:8]}"


def trainer_of(cluster: Cluster, tenant: str) -> tuple[str, psutil.Process]:
    """Return id and process of the trainer that has the tenant's run."""
    ((trainer, pid),) = cluster.process.query(
        "SELECT p.id, p.pid FROM runs r JOIN worker_processes p ON p.id = r.trainer_id "
        "JOIN tenants t ON t.id = r.tenant_id WHERE t.name = %s",
        tenant,
    )
    return str(trainer), psutil.Process(int(str(pid)))


def test_runs_are_divided_among_the_trainers(cluster: Cluster) -> None:
    cats, dogs = names()
    held = "SELECT id FROM runs WHERE trainer_id IS NOT NULL"
    cluster.until(lambda: not cluster.process.query(held), "no run of a test before counts for a trainer")
    with at_work(cluster, cats, dogs):
        assert trainer_of(cluster, cats)[0] != trainer_of(cluster, dogs)[0]


def test_the_work_of_a_killed_trainer_takes_effect_once_elsewhere(cluster: Cluster) -> None:
    cats, dogs = names()
    with at_work(cluster, cats, dogs) as tenants:
        _, process = trainer_of(cluster, cats)
        killed = time.monotonic()
        cluster.process.kill_child(process)
        assert recovered(tenants, killed)


def test_a_trainer_frozen_past_its_lease_and_thawed_writes_nothing(cluster: Cluster) -> None:
    cats, dogs = names()
    with at_work(cluster, cats, dogs) as tenants:
        frozen, process = trainer_of(cluster, cats)
        ((token,),) = cluster.process.query("SELECT lease_token FROM runs WHERE trainer_id = %s LIMIT 1", frozen)
        stopped = time.monotonic()
        process.send_signal(signal.SIGSTOP)
        try:
            assert recovered(tenants, stopped)
            assert time.monotonic() - stopped >= LEASE_SECONDS / 2
            assert trainer_of(cluster, cats)[0] != frozen
        finally:
            process.send_signal(signal.SIGCONT)
        thawed = time.monotonic()
        # It comes back as a trainer; what it had in hand is another's, and steps are counted one by one (``at_work``).
        cluster.until(lambda: frozen in [row[0] for row in cluster.living("trainer")], "the thawed trainer is alive")
        assert recovered(tenants, thawed)
        ((after,),) = cluster.process.query(
            "SELECT max(lease_token) FROM runs r JOIN tenants t ON t.id = r.tenant_id WHERE t.name = %s", cats
        )
        assert int(str(after)) > int(str(token))


def test_the_samples_of_a_killed_pool_are_drawn_by_another(cluster: Cluster) -> None:
    with at_work(cluster, *names()) as tenants:
        killed = time.monotonic()
        cluster.process.kill_child(cluster.process.children("pool")[0])
        assert recovered(tenants, killed)


def test_the_polls_of_a_killed_api_are_answered_by_another(cluster: Cluster) -> None:
    with at_work(cluster, *names()) as tenants:
        killed = time.monotonic()
        cluster.process.kill_child(cluster.process.children("api")[0])
        assert recovered(tenants, killed)
    # The samples' polls were joint ones, of whole sampling clients.
    assert cluster.process.query("SELECT count(*) > 0 FROM operations WHERE told_as IS NOT NULL") == [(True,)]


def test_an_api_frozen_for_good_is_ended_and_the_others_answer(cluster: Cluster) -> None:
    """The kernel gives it a part of all connections for as long as it lives."""
    frozen, other = cluster.process.children("api")
    frozen.suspend()
    cluster.until(lambda: not frozen.is_running(), "the frozen API is ended")
    cluster.settle()
    assert other.is_running()
    for _ in range(20):
        assert httpx.get(f"{cluster.process.base_url}/healthz", timeout=10).status_code == 200


def test_losing_redis_and_getting_it_back_loses_nothing(cluster: Cluster) -> None:
    with at_work(cluster, *names()) as tenants:
        gone = time.monotonic()
        cluster.redis.kill()
        try:
            assert recovered(tenants, gone), "work goes on without Redis"
        finally:
            cluster.redis.start()
        assert recovered(tenants, time.monotonic())


@pytest.mark.parametrize("how", ["cut", "stall"])
def test_an_absent_database_is_an_outage_and_no_loss(cluster: Cluster, how: str) -> None:
    with at_work(cluster, *names()) as tenants:
        sent = [len(tenant.account.trained) for tenant in tenants]
        (cluster.postgres.cut if how == "cut" else cluster.postgres.stall)()
        try:
            with pytest.raises(RuntimeError, match="503"):
                _heartbeat(cluster)
        finally:
            cluster.postgres.restore()
        assert recovered(tenants, time.monotonic())
        assert all(len(tenant.account.trained) > before for tenant, before in zip(tenants, sent, strict=True))


def test_a_sample_that_a_pool_has_taken_and_not_heard_of_is_drawn(cluster: Cluster) -> None:
    """A database that goes away in a commit may have recorded a claim of which the living pool does not know."""
    with at_work(cluster, *names()) as tenants:
        pools, late = cluster.process.children("pool"), cluster.tenant(9, cluster.tenant_key(names()[0]))
        ((alive, _), *_) = cluster.living("pool")
        for pool in pools:
            pool.send_signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            late.start()
            taken = (
                "UPDATE operations SET taken_by = %s WHERE state = 'pending' AND kind = 'sample' AND taken_by IS NULL"
            )
            cluster.until(lambda: cluster.process.query(f"{taken} RETURNING id", alive) != [], "a sample waits")
        finally:
            for pool in pools:
                pool.send_signal(signal.SIGCONT)
        try:
            assert recovered([*tenants, late], began)
        finally:
            late.stop()
        assert late.account.lost == []


def test_connections_that_the_database_ends_lose_nothing(cluster: Cluster) -> None:
    with at_work(cluster, *names()) as tenants:
        ended = time.monotonic()
        cluster.process.query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
            "AND pid <> pg_backend_pid()"
        )
        assert recovered(tenants, ended)


def test_a_doubled_celery_message_changes_nothing(cluster: Cluster) -> None:
    settings = Settings(redis_url=cluster.redis.url)
    celery = make_celery(settings)
    with at_work(cluster, *names()) as tenants:
        sent = time.monotonic()
        for _ in range(20):
            send_placement(celery, BASE)
            for task in (step_task("prune-results"), ANNOUNCE):
                celery.send_task(task, queue=HOUSEKEEPING)
        assert recovered(tenants, sent)


def _heartbeat(cluster: Cluster) -> None:
    """Ask for something that needs the database. Raises ``RuntimeError`` that names the status of a refusal."""
    answer = httpx.get(f"{cluster.process.base_url}/api/v1/training_runs", headers={"X-API-Key": "tml-x"}, timeout=30)
    if answer.status_code != 401:
        raise RuntimeError(f"answered {answer.status_code}: {answer.text}")


def test_a_redis_that_stands_still_is_an_outage_and_no_loss(cluster: Cluster) -> None:
    with at_work(cluster, *names()) as tenants:
        stopped = time.monotonic()
        cluster.redis.freeze()
        try:
            cluster.until(cluster.misses_redis, "Redis is missed")
            cluster.until(cluster.counts_requests_apart, "requests are counted by each process")
            cluster.until(cluster.is_ready, "work goes on without Redis, so nobody is taken out of service")
            assert recovered(tenants, time.monotonic())
            assert time.monotonic() - stopped < 60
        finally:
            cluster.redis.thaw()
        cluster.until(lambda: not cluster.misses_redis(), "Redis is heard again")
        assert recovered(tenants, time.monotonic())


def test_a_process_frozen_in_the_middle_of_a_transaction_does_not_keep_others_from_its_rows(cluster: Cluster) -> None:
    cats, dogs = names()
    with at_work(cluster, cats, dogs) as tenants:
        holder, process = trainer_of(cluster, cats)
        url = cluster.process.database_url.replace("postgresql+asyncpg", "postgresql")
        # As the frozen trainer would: its runs locked in a transaction that stands still, by weft's own settings.
        options = f"-c idle_in_transaction_session_timeout={int(IDLE_SECONDS * 1000)}"
        with psycopg.connect(url, options=options) as connection:
            connection.execute("SELECT id FROM runs WHERE trainer_id = %s FOR UPDATE", (holder,))
            frozen = time.monotonic()
            process.send_signal(signal.SIGSTOP)
            try:
                assert recovered(tenants, frozen)
                assert trainer_of(cluster, cats)[0] != holder
            finally:
                process.send_signal(signal.SIGCONT)
            with pytest.raises(psycopg.errors.IdleInTransactionSessionTimeout):
                connection.execute("SELECT 1")
            connection.close()
