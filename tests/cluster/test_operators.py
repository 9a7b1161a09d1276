"""Operators move runs and drain trainers of a working cluster: nobody loses, doubles or feels anything."""

import json
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


def keep_apart(cluster: Cluster, tenant: str, trainer: str) -> None:
    """Have another trainer than ``trainer`` train the tenant's run: ended runs of tests before may count for one of them."""
    if trainer_of(cluster, tenant)[0] != trainer:
        return
    other = next(str(one) for one, _ in cluster.living("trainer") if one != trainer)
    command(cluster, "run", "move", run_of(cluster, tenant), "--to", other, "--reason", "room")
    cluster.until(lambda: trainers(cluster, tenant) == [(other,)], "the run is moved")


def last_passes(cluster: Cluster) -> dict[str, dict[str, object] | None]:
    """Return the last pass of each living trainer, as operators see it."""
    told = json.loads(command(cluster, "trainer", "list", "--json"))["items"]
    return {one["id"]: one["last_pass"] for one in told if one["is_alive"]}


def tenants_of_passes(cluster: Cluster) -> dict[str, object]:
    """Return how many tenants each trainer's last pass had."""
    return {trainer: one and one["tenants"] for trainer, one in last_passes(cluster).items()}


def ended_at(one: dict[str, object] | None) -> str:
    """Return when a last pass ended, before all times if there is none."""
    return "" if one is None else str(one["ended_at"])


def test_each_trainers_last_pass_is_its_own_and_goes_on_where_a_killed_ones_runs_go(cluster: Cluster) -> None:
    cats, dogs = names()
    with at_work(cluster, cats, dogs) as tenants:
        home, process = trainer_of(cluster, cats)
        keep_apart(cluster, dogs, home)
        other, _ = trainer_of(cluster, dogs)
        cluster.until(
            lambda: tenants_of_passes(cluster) == {home: 1, other: 1}, "each tells of the one tenant it trains"
        )
        before = last_passes(cluster)
        killed = time.monotonic()
        cluster.process.kill_child(process)
        assert recovered(tenants, killed)
        cluster.until(lambda: len(cluster.living("trainer")) == 2, "another trainer is there in its place")
        cluster.until(lambda: ended_at(last_passes(cluster)[other]) > ended_at(before[other]), "the other's goes on")
        now = last_passes(cluster)
        assert home not in now
        (new,) = now.keys() - {other}
        holders = {str(one) for (one,) in trainers(cluster, cats, dogs)}
        assert now[new] is None or new in holders, "a trainer tells of no pass that it did not compute"


def test_a_run_that_trains_is_moved_and_a_drained_trainer_gets_rid_of_all(cluster: Cluster) -> None:
    cats, dogs = names()
    with at_work(cluster, cats, dogs) as tenants:
        home, _ = trainer_of(cluster, cats)
        keep_apart(cluster, dogs, home)
        other, _ = trainer_of(cluster, dogs)
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
