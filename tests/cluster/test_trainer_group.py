"""A trainer of two ranks among the cluster's others."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

from tests.cluster.conftest import BASE, LEASE_SECONDS, Cluster, at_work


def test_a_group_of_two_ranks_trains_its_share_and_hands_over(
    cluster: Cluster, tiny_model_dir: Path, tmp_path: Path
) -> None:
    log = (tmp_path / "group.log").open("w")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "clients.command.main", "worker", "--data", str(cluster.data)]
    environment = {
        **os.environ,
        "WEFT_DATABASE_URL": cluster.process.database_url,
        "WEFT_REDIS_URL": cluster.redis.url,
        "WEFT_LEASE": f"PT{LEASE_SECONDS}S",
        "OMP_NUM_THREADS": "1",
    }
    group = subprocess.Popen(
        [*command, "--base-model", f"{BASE}={tiny_model_dir}"], env=environment, stdout=log, stderr=log
    )
    try:
        before = {row[0] for row in cluster.living("trainer")}
        cluster.until(lambda: len(cluster.living("trainer")) == 3, "the group is a trainer")
        (ours,) = {row[0] for row in cluster.living("trainer")} - before
        with at_work(cluster, *(f"tenant-{uuid.uuid4().hex[:8]}" for _ in range(6))):
            held = dict(cluster.process.query("SELECT trainer_id, count(*) FROM runs GROUP BY trainer_id"))
            assert int(str(held.get(ours, 0))) >= 1
            group.send_signal(signal.SIGTERM)
            assert group.wait(90) in (0, -signal.SIGTERM, 1), (tmp_path / "group.log").read_text()[-4000:]
            assert ours not in [row[0] for row in cluster.living("trainer")]
    finally:
        if group.poll() is None:
            group.kill()
        log.close()
