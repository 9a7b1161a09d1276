"""Operators move runs and drain trainers of a working cluster: nobody loses, doubles or feels anything."""

import time

from testing.operator_command import weft
from tests.cluster.conftest import Cluster, at_work, recovered
from tests.cluster.test_faults import names, trainer_of


def command(cluster: Cluster, *arguments: str) -> str:
    """Run an operator's command on the cluster."""
    places = {"WEFT_DATABASE_URL": cluster.process.database_url, "WEFT_REDIS_URL": cluster.redis.url}
    return weft(cluster.data, *arguments, environment=places)


def run_of(cluster: Cluster, tenant: str) -> str:
    """Return the tenant's run."""
    query = "SELECT r.id FROM runs r JOIN tenants t ON t.id = r.tenant_id WHERE t.name = %s"
    ((run,),) = cluster.process.query(query, tenant)
    return str(run)


def trainers(cluster: Cluster, *tenants: str) -> list[tuple[object, ...]]:
    """Return the trainers that have the tenants' runs; one is None while a run is on its way."""
    query = "SELECT DISTINCT r.trainer_id FROM runs r JOIN tenants t ON t.id = r.tenant_id WHERE t.name = ANY(%s)"
    return cluster.process.query(query, list(tenants))


def test_a_run_that_trains_is_moved_and_a_drained_trainer_gets_rid_of_all(cluster: Cluster) -> None:
    cats, dogs = names()
    with at_work(cluster, cats, dogs) as tenants:
        (home, _), (other, _) = trainer_of(cluster, cats), trainer_of(cluster, dogs)
        moved = time.monotonic()
        command(cluster, "run", "move", run_of(cluster, cats), "--to", other, "--reason", "room")
        cluster.until(lambda: trainers(cluster, cats, dogs) == [(other,)], "the run is moved")
        assert recovered(tenants, moved)
        drained = time.monotonic()
        command(cluster, "trainer", "drain", other)
        cluster.until(lambda: trainers(cluster, cats, dogs) == [(home,)], "the other has all runs")
        assert recovered(tenants, drained)
        command(cluster, "trainer", "work", other)
        events = cluster.process.query("SELECT kind FROM run_events WHERE run_id = %s", run_of(cluster, cats))
        assert ("lost",) not in events
        assert "drained" not in command(cluster, "trainer", "list")
