"""The kinds of faults. Each strikes, lasts and is over when its call returns; what it broke is then mended by the service."""

import random
import signal
import subprocess
import threading
from collections.abc import Callable

import psutil

from bench.chaos import injected
from bench.chaos.ground import BASE, STALL_SECONDS, FaultNotOverError, Ground
from bench.chaos.poisoner import Poisoner

Fault = Callable[[Ground, random.Random], None]

FROZEN_SECONDS = 10.0
_AWAY_SECONDS = 3.0
_COMMITS_LOST = 6
_KINDS = ("api", "worker", "pool")


def _wait(seconds: float) -> None:
    threading.Event().wait(seconds)


def _one(ground: Ground, chance: random.Random, kind: str) -> psutil.Process:
    ground.until(lambda: bool(ground.cluster.children(kind)), f"a {kind} runs")
    return chance.choice(ground.cluster.children(kind))


def _killed(kind: str) -> Fault:
    def strike(ground: Ground, chance: random.Random) -> None:
        ground.cluster.kill_child(_one(ground, chance, kind))

    return strike


def redis_killed(ground: Ground, chance: random.Random) -> None:
    """Kill Redis and start it again, empty."""
    ground.redis.kill()
    _wait(chance.uniform(0.0, _AWAY_SECONDS))
    ground.redis.start()


def redis_frozen(ground: Ground, _chance: random.Random) -> None:
    """Stop Redis in its tracks: connections stand, and nothing answers."""
    ground.redis.freeze()
    try:
        _wait(_AWAY_SECONDS)
    finally:
        ground.redis.thaw()


def process_frozen(ground: Ground, chance: random.Random) -> None:
    """Stop a process in its tracks for longer than its lease."""
    process = _one(ground, chance, chance.choice(_KINDS))
    process.send_signal(signal.SIGSTOP)
    try:
        _wait(FROZEN_SECONDS)
    finally:
        process.send_signal(signal.SIGCONT)


def postgres_restarted(ground: Ground, chance: random.Random) -> None:
    """Stop PostgreSQL and start it again."""
    ground.postgres.stop()
    _wait(chance.uniform(0.0, _AWAY_SECONDS))
    ground.postgres.start()


def commits_lost(ground: Ground, _chance: random.Random) -> None:
    """Lose the answers of some COMMITs, one after another. The server commits."""
    for _ in range(_COMMITS_LOST):
        ground.commits.arm()
        if not ground.commits.lost.wait(30):
            raise FaultNotOverError("no transaction was committed for 30 s")


def disk_full(ground: Ground, _chance: random.Random) -> None:
    """Let no process of the cluster write to any file for a while."""
    processes = [child for kind in _KINDS for child in ground.cluster.children(kind)]
    _limit_files(processes, "0")
    try:
        _wait(2 * _AWAY_SECONDS)
    finally:
        _limit_files(processes, "unlimited")


def _limit_files(processes: list[psutil.Process], nbytes: str) -> None:
    for process in processes:
        subprocess.run(["prlimit", "--pid", str(process.pid), f"--fsize={nbytes}:"], check=process.is_running())


def poison(ground: Ground, _chance: random.Random) -> None:
    """Have a tenant send an operation at which every trainer dies, until it fails."""
    Poisoner(ground).poison()


def device_sick(ground: Ground, _chance: random.Random) -> None:
    """Make a trainer's device fail at everything, until the process has ended."""
    _trainer_ends(ground, injected.SICK)


def device_hung(ground: Ground, _chance: random.Random) -> None:
    """Let a trainer's pass never end, until the process has ended."""
    _trainer_ends(ground, injected.HUNG)


def _trainer_ends(ground: Ground, order: str) -> None:
    before = {process.pid for process in ground.cluster.children("worker")}
    ground.order(order)
    ground.until(lambda: ground.is_taken(order), f"a trainer is {order}")
    ground.until(
        lambda: not before <= {process.pid for process in ground.cluster.children("worker")},
        f"the {order} trainer ended",
        seconds=60.0 + 3 * STALL_SECONDS,
    )


def clock_ahead(ground: Ground, chance: random.Random) -> None:
    """Start a process whose clock is an hour ahead, let it work, and replace it."""
    kind = chance.choice(("api", "worker", "pool"))
    ground.order(injected.SKEW)
    process = _one(ground, chance, kind)
    ground.cluster.kill_child(process)
    ground.until(lambda: ground.is_taken(injected.SKEW), "a process with another clock starts")
    ground.until_replaced(process, kind)
    _wait(FROZEN_SECONDS)
    skewed = [int(path.suffix[1:]) for path in ground.orders.glob(f"{injected.SKEW}.*")]
    for child in (one for kind in _KINDS for one in ground.cluster.children(kind)):
        if child.pid in skewed:
            ground.cluster.kill_child(child)


def pool_drained(ground: Ground, chance: random.Random) -> None:
    """Send all replicas of one pool no samples for a while, as an operator does."""
    name = chance.choice(_sampling_replicas(ground))
    ground.weft("replica", "drain", name, "--base", BASE)
    try:
        _wait(_AWAY_SECONDS)
    finally:
        ground.weft("replica", "work", name, "--base", BASE)


def _sampling_replicas(ground: Ground) -> list[str]:
    """Return the replicas that compute samples, once there is one."""
    found: set[str] = set()

    def look() -> bool:
        found.update(str(row[0]) for row in ground.cluster.query("SELECT replica FROM samples_in_flight"))
        return bool(found)

    ground.until(look, "a replica samples")
    return sorted(found)


def rolling_restart(ground: Ground, _chance: random.Random) -> None:
    """End every process in order (SIGTERM), one after another, each once the one before has a successor."""
    for kind in _KINDS:
        for process in ground.cluster.children(kind):
            process.terminate()
            ground.until_replaced(process, kind)


FAULTS: dict[str, Fault] = {
    "trainer-killed": _killed("worker"),
    "api-killed": _killed("api"),
    "pool-killed": _killed("pool"),
    "redis-killed": redis_killed,
    "redis-frozen": redis_frozen,
    "process-frozen": process_frozen,
    "postgres-restarted": postgres_restarted,
    "commits-lost": commits_lost,
    "disk-full": disk_full,
    "poison": poison,
    "device-sick": device_sick,
    "device-hung": device_hung,
    "clock-ahead": clock_ahead,
    "pool-drained": pool_drained,
    "rolling-restart": rolling_restart,
}
