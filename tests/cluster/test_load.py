"""The load of ``bench.load``, smaller and shorter, on a real cluster: nothing fails and nothing hangs."""

from bench.load.benchmark import Load, run
from testing.throwaway_database import DEFAULT_SERVER
from tests.conftest import need_postgres, need_redis


def test_hundreds_of_samples_at_once_while_others_train() -> None:
    need_redis()
    need_postgres()
    load = Load(tenants=8, concurrent=32, trainers=2, sample_tokens=4, warm_up=1.0, seconds=15.0)
    found = run(load, server=DEFAULT_SERVER)
    assert (found["errors"], found["hung"]) == (0, 0)
    # Everybody's first sample was answered, and others' samples did not keep anybody from training.
    assert isinstance(found["samples"], int)
    assert found["samples"] >= load.tenants * load.concurrent
    assert found["ops_per_s"] != 0
