"""``weft doctor`` for a cluster: Redis, PostgreSQL's connections and clock, and worker processes."""

import errno
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from redis import Redis
from redis.exceptions import RedisError
from sqlalchemy import Connection, create_engine, func, select, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from cli.finding import Finding
from migrations.upgrade import sync_url
from store.clock import utc_now
from store.settings import Settings
from store.tables import ProcessKind, WorkerProcess
from workers.cluster.celery_app import HOUSEKEEPING

_SECONDS = 3.0
_MANY_MESSAGES = 30
_LARGE_SKEW = timedelta(seconds=2)
_KINDS = (ProcessKind.TRAINER, ProcessKind.POOL)
_COMMANDS = {ProcessKind.TRAINER: "weft worker", ProcessKind.POOL: "weft pool", ProcessKind.API: "weft api"}


def examine_cluster(settings: Settings, bases: Iterable[str], *, has_schema: bool) -> list[Finding]:
    """Check every part of a cluster and change nothing. ``has_schema``: the database answers and has this code's schema."""
    findings = [*_metrics_port(settings), *_redis(settings)]
    if not has_schema:
        return findings
    engine = create_engine(sync_url(settings.resolved_database_url()), connect_args={"connect_timeout": int(_SECONDS)})
    try:
        with engine.connect() as connection:
            processes = _processes(connection)
            return [
                *findings,
                _room(connection, settings, len({(one.host, one.pid) for one in processes if one.is_alive})),
                _clock(connection),
                *_alive(
                    processes,
                    sorted({*bases, *(one.base_model for one in processes if one.base_model)}),
                    settings.lease,
                ),
            ]
    except SQLAlchemyError as error:
        return [*findings, Finding("database", False, f"cannot be asked: {type(error).__name__}; look at its log")]
    finally:
        engine.dispose()


# --- Redis ---------------------------------------------------------------------------------------------------------


def _redis(settings: Settings) -> list[Finding]:
    url = settings.redis_url or ""
    shown = make_url(url).render_as_string(hide_password=True)
    try:
        with Redis.from_url(url, socket_connect_timeout=_SECONDS, socket_timeout=_SECONDS) as redis:
            info: dict[str, Any] = redis.info()
            channel = f"{settings.redis_namespace}:wakeups"
            ((_, listeners),) = redis.pubsub_numsub(channel)
            waiting: int = redis.llen(f"{settings.redis_namespace}:celery:{HOUSEKEEPING}")
    except (RedisError, OSError) as error:
        return [Finding("Redis", False, f"{shown}: {error}; check WEFT_REDIS_URL and that the server runs")]
    return [
        Finding("Redis", True, f"{shown}, version {info['redis_version']}, {listeners} processes listen on {channel}"),
        _redis_memory(info),
        _messages(waiting),
    ]


def _redis_memory(info: dict[str, Any]) -> Finding:
    limit, policy = int(info.get("maxmemory", 0)), str(info.get("maxmemory_policy", "noeviction"))
    used = f"{info['used_memory_human']} of {info['maxmemory_human'] if limit else 'no limit'}, {policy}"
    if limit and policy.startswith("allkeys"):
        advice = "a full Redis would drop Celery's queues: weft finds the work all the same, later; set noeviction"
        return Finding("Redis memory", True, f"{used}; {advice}", advises=True)
    return Finding("Redis memory", True, used)


def _messages(waiting: int) -> Finding:
    if waiting > _MANY_MESSAGES:
        told = f"{waiting} messages wait: no `weft worker` takes them; sessions, checkpoints and results do not end"
        return Finding("housekeeping", True, told, advises=True)
    return Finding("housekeeping", True, f"{waiting} messages wait")


# --- PostgreSQL ----------------------------------------------------------------------------------------------------


def _room(connection: Connection, settings: Settings, alive: int) -> Finding:
    limit, reserved = (
        int(connection.scalar(text(f"SHOW {name}")) or 0)
        for name in ("max_connections", "superuser_reserved_connections")
    )
    used = connection.scalar(text("SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"))
    fitting = (limit - reserved) // settings.database_pool
    told = (
        f"{used} of {limit} are in use; each API, trainer and pool takes up to {settings.database_pool} "
        f"(WEFT_DATABASE_POOL), so {fitting} processes fit"
    )
    if fitting < 1:
        return Finding("connections", False, f"{told}: raise max_connections or lower WEFT_DATABASE_POOL")
    if fitting <= alive:
        advice = f"{alive} processes are alive: raise max_connections or lower WEFT_DATABASE_POOL"
        return Finding("connections", True, f"{told}; {advice}", advises=True)
    return Finding("connections", True, told)


def _clock(connection: Connection) -> Finding:
    now: datetime = connection.scalars(select(func.clock_timestamp())).one()
    skew = utc_now() - now
    told = f"{abs(skew.total_seconds()):.1f} s {'ahead of' if skew > timedelta(0) else 'behind'} the database's"
    if abs(skew) > _LARGE_SKEW:
        # Processes of a cluster have ``DatabaseClock``.
        advice = (
            "leases, expiries and timeouts go by the database's time; logs, traces and times that `weft` commands write here, "
            "such as the end of a key, are off by as much: synchronise it"
        )
        return Finding("clock", True, f"{told}; {advice}", advises=True)
    return Finding("clock", True, told)


# --- processes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Process:
    id: str
    kind: str
    base_model: str
    host: str
    pid: int
    left: timedelta
    """Time left of the process's lease; below zero for a dead process that is not yet reaped."""

    @property
    def is_alive(self) -> bool:
        return self.left > timedelta(0)


def _processes(connection: Connection) -> list[_Process]:
    rows = connection.execute(
        select(
            WorkerProcess.id,
            WorkerProcess.kind,
            WorkerProcess.base_model,
            WorkerProcess.host,
            WorkerProcess.pid,
            WorkerProcess.expires_at,
            func.clock_timestamp().label("now"),
        ).order_by(WorkerProcess.started_at)
    )
    return [
        _Process(row.id, row.kind, row.base_model, row.host, row.pid, row.expires_at.astimezone(UTC) - row.now)
        for row in rows
    ]


def _alive(processes: Sequence[_Process], bases: Sequence[str], lease: timedelta) -> list[Finding]:
    apis = [one for one in processes if one.kind == ProcessKind.API]
    findings = [_of_kind("API processes", ProcessKind.API, apis, lease)]
    for base_model in bases:
        for kind in _KINDS:
            own = [one for one in processes if (one.kind, one.base_model) == (kind, base_model)]
            findings.append(_of_kind(f"{kind}s of {base_model}", kind, own, lease))
    return findings


def _of_kind(part: str, kind: ProcessKind, processes: Sequence[_Process], lease: timedelta) -> Finding:
    told = [
        f"{one.id} on {one.host} (pid {one.pid}), "
        + (f"{max(0.0, (lease - one.left).total_seconds()):.1f} s ago" if one.is_alive else "dead")
        for one in processes
    ]
    if not any(one.is_alive for one in processes):
        shown = f"none is alive; start `{_COMMANDS[kind]}`" + "".join(f"; {line}" for line in told)
        return Finding(part, True, shown, advises=True)
    return Finding(part, True, "; ".join(told))


# --- this machine --------------------------------------------------------------------------------------------------


def _metrics_port(settings: Settings) -> list[Finding]:
    if not settings.metrics_port:
        return []
    shown = f"{settings.metrics_host}:{settings.metrics_port}"
    family = socket.AF_INET6 if ":" in settings.metrics_host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.metrics_host, settings.metrics_port))
        except OSError as error:
            # In use beside a running cluster, the address is most likely that of a process of the cluster.
            is_taken = error.errno == errno.EADDRINUSE
            told = f"{shown}: {error.strerror}; every process needs a WEFT_METRICS_PORT of its own"
            return [Finding("metrics address", is_taken, told, advises=True)]
    return [Finding("metrics address", True, f"{shown} is free")]
