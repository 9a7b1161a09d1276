"""Runs and samples of a cluster say which process they wait for; a second tenant's do not."""

import signal

import httpx
from weft_client.synchronous import Weft

from cli.administration import on_database
from store.settings import Settings
from testing.tenants import new_key
from tests.cluster.conftest import BASE, Cluster, at_work
from tests.cluster.test_faults import names, trainer_of
from tests.cluster.test_operators import keep_apart, run_of, trainers


def key_of(cluster: Cluster, tenant: str) -> str:
    """Make another key of the tenant."""
    settings = Settings(data_dir=cluster.data, database_url=cluster.process.database_url)
    key: str = on_database(settings, lambda database: new_key(database, tenant))
    return key


def test_the_run_of_a_frozen_trainer_says_so_until_another_has_it(cluster: Cluster) -> None:
    cats, dogs = names()
    with (
        at_work(cluster, cats, dogs),
        Weft(cluster.process.base_url, key_of(cluster, cats)) as mine,
        Weft(cluster.process.base_url, key_of(cluster, dogs)) as theirs,
    ):
        runs = run_of(cluster, cats), run_of(cluster, dogs)
        frozen, process = trainer_of(cluster, cats)
        keep_apart(cluster, dogs, frozen)
        process.send_signal(signal.SIGSTOP)
        try:
            beside: set[str | None] = set()

            def is_told() -> bool:
                beside.add(theirs.runs.waiting(runs[1]).cause)
                return mine.runs.waiting(runs[0]).cause == "trainer_lost"

            cluster.until(is_told, "the run tells that its trainer is lost")
            assert "trainer_lost" not in beside
            cluster.until(
                lambda: trainers(cluster, cats) not in ([(frozen,)], [(None,)]), "another trainer has the run"
            )
            gone = {"trainer_lost", "not_placed", "no_trainer"}
            cluster.until(lambda: mine.runs.waiting(runs[0]).cause not in gone, "the run goes on")
        finally:
            process.send_signal(signal.SIGCONT)


def test_a_sample_without_a_living_pool_says_so_and_training_goes_on(cluster: Cluster) -> None:
    cats, dogs = names()
    with at_work(cluster, dogs), Weft(cluster.process.base_url, cluster.tenant_key(cats)) as mine:
        key = key_of(cluster, cats)
        http = httpx.Client(base_url=f"{cluster.process.base_url}/api/v1", headers={"X-API-Key": key}, timeout=30)
        session = http.post("/create_session", json={"tags": [], "sdk_version": "0.38.0", "type": "create_session"})
        opened = {"session_id": session.json()["session_id"], "sampling_session_seq_id": 0, "base_model": BASE}
        sampler = http.post("/create_sampling_session", json=opened).json()["sampling_session_id"]
        pools = cluster.process.children("pool")
        for pool in pools:
            pool.send_signal(signal.SIGSTOP)
        try:
            cluster.until(lambda: cluster.living("pool") == [], "the pools' leases are over")
            body = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": {"max_tokens": 2}}
            request = http.post("/asample", json={"sampling_session_id": sampler, "seq_id": 0, **body})
            found = mine.samples.waiting(request.json()["request_id"])
            assert (found.reason, BASE in (found.text or "")) == ("no_replica", True)
            with Weft(cluster.process.base_url, key_of(cluster, dogs)) as theirs:
                assert theirs.runs.waiting(run_of(cluster, dogs)).cause != "no_replica"
        finally:
            for pool in pools:
                pool.send_signal(signal.SIGCONT)
        cluster.until(
            lambda: mine.samples.waiting(request.json()["request_id"]).reason is None, "the sample is drawn after all"
        )
        http.close()
