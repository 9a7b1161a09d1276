"""A trainer of two ranks among the cluster's other trainers."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.cluster.conftest import BASE, DEADLINE, LEASE_SECONDS, Cluster, at_work, recovered


@contextmanager
def group_of_two(cluster: Cluster, model: Path, log_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str, int]]:
    """Start a ``torchrun`` of two ranks as one more trainer; yield its process, the trainer's id and the pid of rank 0.

    All its ranks are killed at the end.
    """
    before = {row[0] for row in cluster.living("trainer")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", "2", "-m", "cli.main", "worker", "--data", str(cluster.data)]
    environment = {
        **os.environ,
        "WEFT_DATABASE_URL": cluster.process.database_url,
        "WEFT_REDIS_URL": cluster.redis.url,
        "WEFT_LEASE": f"PT{LEASE_SECONDS}S",
        "OMP_NUM_THREADS": "1",
    }
    with log_path.open("w") as log:
        group = subprocess.Popen([*command, "--base-model", f"{BASE}={model}"], env=environment, stdout=log, stderr=log)
        ranks: list[psutil.Process] = []
        try:
            cluster.until(lambda: len(cluster.living("trainer")) > len(before), "the group is a trainer")
            ranks = psutil.Process(group.pid).children()
            # Two processes, one trainer.
            ((ours, leads),) = [row for row in cluster.living("trainer") if row[0] not in before]
            yield group, str(ours), int(str(leads))
        except BaseException:
            print(log_path.read_text()[-4000:])
            raise
        finally:
            for process in (group, *ranks):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            group.wait()


def names(count: int) -> list[str]:
    """Return names for new tenants."""
    return [f"tenant-{uuid.uuid4().hex[:8]}" for _ in range(count)]


def has_runs(cluster: Cluster, trainer: str) -> bool:
    """Return whether the trainer has an even part of the runs."""
    return cluster.process.query("SELECT count(*) FROM runs WHERE trainer_id = %s", trainer) != [(0,)]


def test_a_group_of_two_ranks_trains_its_part_and_hands_over(
    cluster: Cluster, tiny_model_dir: Path, tmp_path: Path
) -> None:
    with (
        group_of_two(cluster, tiny_model_dir, tmp_path / "group.log") as (group, ours, _),
        at_work(cluster, *names(6)),
    ):
        assert has_runs(cluster, ours)
        group.send_signal(signal.SIGTERM)
        group.wait(DEADLINE)
        assert "rank 1 of 2 computes for rank 0" in (tmp_path / "group.log").read_text()
        assert ours not in [row[0] for row in cluster.living("trainer")]


def test_a_group_that_loses_a_rank_ends_and_its_runs_go_on_elsewhere(
    cluster: Cluster, tiny_model_dir: Path, tmp_path: Path
) -> None:
    with (
        group_of_two(cluster, tiny_model_dir, tmp_path / "group.log") as (group, ours, leads),
        at_work(cluster, *names(6)) as tenants,
    ):
        assert has_runs(cluster, ours)
        (other,) = [rank for rank in psutil.Process(group.pid).children() if rank.pid != leads]
        killed = time.monotonic()
        other.kill()
        assert group.wait(DEADLINE) != 0
        assert recovered(tenants, killed)
