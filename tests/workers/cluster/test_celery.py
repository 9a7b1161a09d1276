"""Background jobs over a real Redis: Celery retries what fails, answers while it works, and drops nothing for a clock."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from celery import Celery
from celery.beat import ScheduleEntry
from redis import Redis

from contracts.errors import Unavailable
from store.settings import Settings
from testing.cluster_process import RedisProcess
from tests.conftest import need_redis
from workers.cluster.celery_app import (
    ANNOUNCE,
    HOUSEKEEPING,
    JOBS,
    beat_schedule,
    make_celery,
    send_placement,
    step_task,
    training_queue,
    waiting_messages,
)
from workers.cluster.celery_worker import CeleryWorker, Handler
from workers.cluster.job_looks import MOST_HOPS, JobLooks
from workers.cluster.sparing_scheduler import SparingScheduler
from workers.housekeeping.schedule import StepName, interval


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    """A Redis server."""
    need_redis()
    with RedisProcess(tmp_path_factory.mktemp("redis")) as process:
        yield process


@pytest.fixture
def app(redis: RedisProcess, request: pytest.FixtureRequest) -> Iterator[Celery]:
    """A Celery app with queues of its own."""
    namespace = str(request.node.name)[:40].replace("[", ".").rstrip("]")
    made = make_celery(Settings(redis_url=redis.url, redis_namespace=namespace))
    yield made
    made.close()


@asynccontextmanager
async def consuming(
    app: Celery, handlers: dict[str, Handler], seconds: dict[str, float | None] | None = None
) -> AsyncIterator[None]:
    """Run a worker of the housekeeping queue inside the block."""
    worker = CeleryWorker(app, [HOUSEKEEPING], handlers, name="test@here", seconds=seconds)
    worker.start()
    try:
        yield
    finally:
        await worker.stop()


def _beat(app: Celery) -> SparingScheduler:
    app.conf.beat_schedule = beat_schedule({step: interval(step, Settings()) for step in StepName})
    return SparingScheduler(app)


def test_each_step_is_a_task_that_no_hosts_clock_can_drop(app: Celery) -> None:
    """Celery compares an ``expires`` of the sender's clock with the worker's."""
    beat = _beat(app)
    entries: dict[str, ScheduleEntry] = beat.schedule
    assert {entry.task for entry in entries.values()} == {ANNOUNCE, JOBS, *(step_task(step) for step in StepName)}
    send_placement(app, "base")
    for entry in entries.values():
        beat.apply_async(entry)
    for queue, count in ((HOUSEKEEPING, len(entries)), (training_queue("base"), 1)):
        assert [message["headers"]["expires"] for message in _messages(app, queue)] == [None] * count


def test_while_no_worker_lives_messages_do_not_heap_up(app: Celery) -> None:
    beat = _beat(app)
    entries = list(beat.schedule.values())
    for _ in range(10):
        for entry in entries:
            beat.apply_async(entry)
        send_placement(app, "base")
        send_placement(app, "base")
    assert waiting_messages(app, HOUSEKEEPING) <= 2 * len(entries)
    assert waiting_messages(app, training_queue("base")) <= 8
    assert len(_messages(app, training_queue("base"))) >= 1


async def test_a_step_that_fails_is_tried_again_while_others_work_and_celery_answers(app: Celery) -> None:
    tried, others = 0, asyncio.Event()
    is_done, may_end = asyncio.Event(), asyncio.Event()

    async def fails_twice() -> None:
        nonlocal tried
        tried += 1
        if tried < 3:
            raise Unavailable("the database does not answer")
        is_done.set()
        await may_end.wait()

    async def works() -> None:
        others.set()

    failing, working = step_task("failing"), step_task("working")
    async with asyncio.timeout(90), consuming(app, {failing: fails_twice, working: works}):
        app.send_task(failing, queue=HOUSEKEEPING)
        app.send_task(working, queue=HOUSEKEEPING)
        await others.wait()
        await is_done.wait()
        active: dict[str, list[dict[str, Any]]] = {}
        while not active:
            active = await asyncio.to_thread(app.control.inspect(timeout=1.0).active) or {}
        may_end.set()
    assert tried == 3
    assert [task["name"] for tasks in active.values() for task in tasks] == [failing]


async def test_a_task_without_a_longest_time_goes_on_while_others_are_ended(app: Celery) -> None:
    """A look for jobs takes as long as its jobs: a merge that was ended by the clock would never be done."""
    began, ended, may_end, done = asyncio.Event(), asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def unbound() -> None:
        began.set()
        await may_end.wait()
        done.set()

    async def bound() -> None:
        await began.wait()
        try:
            await may_end.wait()
        finally:
            ended.set()

    bound_task = step_task("bound")
    handlers = {JOBS: unbound, bound_task: bound}
    async with asyncio.timeout(90), consuming(app, handlers, {JOBS: None, bound_task: 0.2}):
        app.send_task(JOBS, queue=HOUSEKEEPING)
        app.send_task(bound_task, queue=HOUSEKEEPING)
        await ended.wait()
        may_end.set()
        await done.wait()


async def test_a_busy_process_hands_the_look_for_jobs_on_to_one_that_is_not(app: Celery) -> None:
    is_busy, looks = True, 0

    async def run_all() -> None:
        nonlocal looks
        looks += 1

    one = JobLooks(app, lambda: is_busy, run_all)
    await one.look()
    (message,) = _messages(app, HOUSEKEEPING)
    assert (message["headers"]["task"], message["headers"]["argsrepr"]) == (JOBS, "[1]")
    await one.look(MOST_HOPS)
    assert (len(_messages(app, HOUSEKEEPING)), looks) == (1, 0)
    is_busy = False
    await one.look(MOST_HOPS)
    assert looks == 1


def _messages(app: Celery, queue: str) -> list[dict[str, Any]]:
    """Return all messages that wait in the queue."""
    key = f"{app.conf.broker_transport_options['global_keyprefix']}{queue}"
    with Redis.from_url(app.conf.broker_url) as client:
        return [json.loads(message) for message in client.lrange(key, 0, -1)]
