"""Each reason for which training waits is told while it is so, with a second tenant beside whose own is another."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from threading import Event
from time import monotonic
from typing import Any

import pytest
from sqlalchemy import update

from contracts.ids import RequestId
from contracts.losses import LossName
from contracts.operations import OptimStep, SaveWeights, TrainingBatch
from contracts.service_class import ServiceClass
from contracts.waiting import Ahead, Wait, WaitReason
from ledger.waiting import Waits
from ledger.wakeups import placements_topic, shares_topic
from store.clock import utc_now
from store.settings import Settings
from store.tables import Operation
from tenants.limits import set_tenant
from tenants.run_directives import RunDirective, direct_run, lift_run_directives
from tenants.runs import get_run, weigh_run
from tenants.trainers import drain_trainer, undrain_trainer
from tests.engine.training.conftest import make_batch
from tests.workers.training.conftest import BASE, DEADLINE, NewRig, Rig
from workers.training import adapter_restorer, checkpoint_operations, fused_passes

STEP = OptimStep(learning_rate=1e-3)


def batch(seed: int) -> TrainingBatch:
    """Return a batch of random sequences."""
    return make_batch(seed, LossName.CROSS_ENTROPY, (16, 16))


def waits_of(rig: Rig, **settings: Any) -> Waits:
    """Return what tells why operations wait."""
    return Waits(rig.database, Settings(data_dir=rig.data_folder.path("."), **settings), rig.data_folder, utc_now)


async def waits(rig: Rig, *requests: RequestId, **settings: Any) -> list[Wait | None]:
    """Return why each of the requests waits, as every part of the service is told."""
    of = waits_of(rig, **settings)
    return [await of.of(request) for request in requests]


async def told(rig: Rig, *requests: RequestId, **settings: Any) -> list[WaitReason | None]:
    """Return the requests' reasons."""
    return [None if wait is None else wait.reason for wait in await waits(rig, *requests, **settings)]


async def until_told(rig: Rig, request: RequestId, reason: WaitReason, **settings: Any) -> Wait:
    """Wait until the request's reason is ``reason``, and return the wait."""
    found: Wait | None = None
    ends = monotonic() + DEADLINE
    while found is None or found.reason is not reason:
        assert monotonic() < ends, f"not {reason} in time, but {found}"
        await asyncio.sleep(0.01)
        (found,) = await waits(rig, request, **settings)
    return found


async def ahead(rig: Rig, request: RequestId) -> Ahead:
    """Return what is before the request."""
    (wait,) = await waits(rig, request)
    assert wait is not None
    async with rig.database.read() as session:
        found = await waits_of(rig).ahead(session, request, wait)
    assert found is not None
    return found


@contextmanager
def stuck(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Iterator[None]:
    """Have calls of ``owner.name`` stand still meanwhile, as on a device or a disk that hangs."""
    gate, call = Event(), getattr(owner, name)

    def waiting(*arguments: Any, **named: Any) -> Any:
        gate.wait(2 * DEADLINE)
        return call(*arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, waiting)
        try:
            yield
        finally:
            gate.set()


@asynccontextmanager
async def restarted(new_rig: NewRig, rig: Rig) -> AsyncIterator[Rig]:
    """A new trainer on the same database."""
    again = new_rig(url=rig.database.engine.url.render_as_string())
    async with again.running():
        yield again


async def test_a_pass_that_runs_says_so_and_others_wait_for_their_turn(
    new_rig: NewRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = new_rig()
    async with rig.running():
        cats, dogs = await rig.clients("cats", "dogs")
        with stuck(monkeypatch, rig.trainer, "compute"):
            mine = await cats.send(batch(1))
            await until_told(rig, mine, WaitReason.RUNNING)
            behind, theirs = await cats.send(STEP), await dogs.send(batch(2))
            later = await dogs.send(batch(3))
            (step, turn, second) = await waits(rig, behind, theirs, later)
            assert step is not None
            assert (step.reason, step.cause, step.front) == (WaitReason.EARLIER_OPERATION, WaitReason.RUNNING, mine)
            assert (step.seq_id, step.queue_state) == (1, "active")
            assert turn is not None
            assert (turn.reason, turn.queue_state) == (WaitReason.TURN, "active")
            assert second is not None
            assert (second.cause, second.seq_id) == (WaitReason.TURN, 1)
            before = await ahead(rig, theirs)
            assert (before.own_operations, before.own_tokens) == (0, 32)
            assert (before.other_operations, before.other_tokens) == (1, 32)
            assert before.bound_passes is not None
            assert before.bound_passes >= 2
            # Nothing has ended meanwhile, so the speed is not known.
            assert before.eta_seconds is None
        for client, request in ((cats, mine), (cats, behind), (dogs, theirs), (dogs, later)):
            await client.result(request)
        assert await told(rig, mine, theirs) == [None, None]


async def test_a_checkpoint_that_is_written_says_so_and_a_neighbour_trains(
    new_rig: NewRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = new_rig()
    async with rig.running():
        cats, dogs = await rig.clients("cats", "dogs")
        with stuck(monkeypatch, checkpoint_operations, "write_checkpoint"):
            saving = await cats.send(SaveWeights("one", None))
            wait = await until_told(rig, saving, WaitReason.SAVING)
            assert wait.queue_state == "active"
            await dogs.do(batch(1))
        await cats.result(saving)


async def test_an_adapter_that_is_restored_or_replayed_says_so(
    new_rig: NewRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cats' snapshot covers everything, the dogs' does not, and a model that is new beside them has none."""
    rig = new_rig()
    dogs = await rig.client("dogs")
    async with rig.running():
        cats = (await rig.clients("cats"))[0]
        await cats.do(SaveWeights("one", None))
        for payload in (batch(1), STEP):
            await dogs.do(payload)
        unsaved = rig.residency.unsaved
        monkeypatch.setattr(rig.residency, "unsaved", lambda: [run for run in unsaved() if run != dogs.run])
    mine, theirs = await cats.send(batch(3)), await dogs.send(batch(4))
    with ExitStack() as opened:
        for read in ("read_state", "fresh_state"):
            opened.enter_context(stuck(monkeypatch, adapter_restorer, read))
        async with restarted(new_rig, rig) as again:
            # Whatever is found, what is stuck goes on before the trainer ends.
            with stuck(monkeypatch, again.trainer, "compute"):
                with opened:
                    for request in (mine, theirs):
                        wait = await until_told(again, request, WaitReason.RESTORING)
                        assert wait.queue_state == "paused_capacity"
                    fox = await again.client("fox")
                    assert (await told(again, fox.created))[0] is not WaitReason.RESTORING
                replay = await until_told(again, theirs, WaitReason.REPLAYING)
                assert "operations after it" in replay.text
                assert replay.queue_state == "paused_capacity"
                await again.ledger.wait_until_final(fox.tenant, fox.created, seconds=DEADLINE)
                new = await fox.send(batch(5))
                assert (await told(again, mine))[0] in (WaitReason.TURN, WaitReason.RUNNING)
                assert (await told(again, new))[0] in (WaitReason.TURN, WaitReason.RUNNING)


async def test_a_suspect_waits_to_run_alone_and_its_neighbour_does_not(
    new_rig: NewRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = new_rig()
    async with rig.running():
        cats, dogs = await rig.clients("cats", "dogs")
        with stuck(monkeypatch, rig.trainer, "compute"):
            theirs = await dogs.send(batch(1))
            await until_told(rig, theirs, WaitReason.RUNNING)
            async with rig.database.write() as transaction:
                mine = await cats.accept(transaction, batch(2))
                await transaction.execute(update(Operation).where(Operation.id == mine).values(attempts=1))
            (wait,) = await waits(rig, mine)
            assert wait is not None
            assert (wait.reason, wait.queue_state) == (WaitReason.SUSPECT_ALONE, "paused_capacity")
            assert await told(rig, theirs) == [WaitReason.RUNNING]
        await cats.result(mine)
        await dogs.result(theirs)


async def test_a_model_beyond_the_open_ones_says_so_and_the_open_one_trains(new_rig: NewRig) -> None:
    rig = new_rig(max_adapters=1)
    async with rig.running():
        cats = (await rig.clients("cats"))[0]
        dogs = await rig.client("dogs")
        assert await told(rig, dogs.created, max_adapters=1) == [WaitReason.OPEN_ADAPTERS]
        await cats.do(batch(1))
        await cats.unload()
        await dogs.result(dogs.created)


async def test_a_run_without_a_trainer_says_so(new_rig: NewRig) -> None:
    rig = new_rig()
    async with rig.running():
        cats = (await rig.clients("cats"))[0]
        await cats.do(batch(1))
    # The trainer has ended in order, and has given its runs up.
    mine = await cats.send(batch(2))
    (wait,) = await waits(rig, mine)
    assert wait is not None
    assert (wait.reason, wait.queue_state) == (WaitReason.NO_TRAINER, "paused_capacity")


async def test_a_model_that_comes_while_the_only_trainer_ends_says_that_it_is_not_placed(
    new_rig: NewRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = new_rig()
    async with rig.running():
        dogs = (await rig.clients("dogs"))[0]
        with stuck(monkeypatch, rig.trainer, "compute"):
            theirs = await dogs.send(batch(1))
            await until_told(rig, theirs, WaitReason.RUNNING)
            # It has been told to end, and finishes the pass in hand first.
            rig.worker.stop()
            late = await rig.client("late")
            (wait,) = await waits(rig, late.created)
            assert wait is not None
            assert (wait.reason, wait.queue_state) == (WaitReason.NOT_PLACED, "active")
            assert await told(rig, theirs) == [WaitReason.RUNNING]
        await dogs.result(theirs)
    async with restarted(new_rig, rig) as again:
        await again.ledger.wait_until_final(late.tenant, late.created, seconds=DEADLINE)
        assert await told(again, late.created) == [None]


async def test_a_share_a_class_and_a_runs_weight_that_are_set_are_in_force_with_the_next_pass(
    new_rig: NewRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing new has come meanwhile: the work that waits is shared out anew."""
    rig = new_rig()
    planned: list[dict[str, float]] = []
    weights: dict[str, float] = {}
    plan = fused_passes.plan_pass

    def noted(queue: Any, fairness: Any, *, shares: Any, **rest: Any) -> Any:
        planned.append(dict(shares))
        weights.update({one.run: one.weight for one in queue})
        return plan(queue, fairness, shares=shares, **rest)

    monkeypatch.setattr(fused_passes, "plan_pass", noted)
    async with rig.running():
        cats, dogs, first = await rig.clients("cats", "dogs", "first")
        with stuck(monkeypatch, rig.trainer, "compute"):
            running = await first.send(batch(1))
            await until_told(rig, running, WaitReason.RUNNING)
            waiting = [(client, await client.send(batch(2))) for client in (cats, dogs)]
            for _, request in waiting:
                await until_told(rig, request, WaitReason.TURN)
            async with rig.database.write() as transaction:
                await set_tenant(transaction, name="cats", limits={}, share=2.0, service_class=ServiceClass.INTERACTIVE)
                await set_tenant(transaction, name="dogs", limits={}, service_class=ServiceClass.BATCH)
                await weigh_run(transaction, await get_run(transaction, cats.tenant, cats.run), 3.0)
            planned.clear()
            rig.ledger.wakeups.announce(shares_topic())
        for client, request in waiting:
            await client.result(request)
    shared = [shares for shares in planned if {cats.tenant, dogs.tenant} <= shares.keys()]
    assert shared
    assert shared[-1][cats.tenant] == 2.0 * 4.0
    assert shared[-1][dogs.tenant] == 0.25
    assert (weights[cats.run], weights[dogs.run]) == (3.0, 1.0)


async def test_a_run_that_is_to_be_moved_says_so_and_its_neighbour_does_not(
    new_rig: NewRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = new_rig()
    async with rig.running():
        cats, dogs = await rig.clients("cats", "dogs")
        with stuck(monkeypatch, rig.trainer, "compute"):
            theirs = await dogs.send(batch(1))
            await until_told(rig, theirs, WaitReason.RUNNING)
            mine = await cats.send(batch(2))
            await until_told(rig, mine, WaitReason.TURN)
            async with rig.database.write() as transaction:
                await direct_run(transaction, cats.run, RunDirective.MOVE, reason="room", now=utc_now())
            assert await told(rig, mine, theirs) == [WaitReason.MOVING, WaitReason.RUNNING]
            async with rig.database.write() as transaction:
                await lift_run_directives(transaction, [cats.run])
        await cats.result(mine)
        await dogs.result(theirs)


async def test_a_run_without_a_trainer_that_takes_it_says_that_all_are_drained(new_rig: NewRig) -> None:
    """A drained trainer keeps none of its runs either, so the neighbour here is a run that has ended its work."""
    rig = new_rig()
    async with rig.running():
        dogs = (await rig.clients("dogs"))[0]
        done = await dogs.send(batch(1))
        await dogs.result(done)
        async with rig.database.write() as transaction:
            await drain_trainer(transaction, rig.worker.leases.identity.id, reason="upgrade", now=utc_now())
        late = await rig.client("late")
        (wait,) = await waits(rig, late.created)
        assert wait is not None
        assert (wait.reason, "drained" in wait.text) == (WaitReason.NO_TRAINER, True)
        assert await told(rig, done) == [None]
        async with rig.database.write() as transaction:
            await undrain_trainer(transaction, rig.worker.leases.identity.id)
        rig.ledger.wakeups.announce(placements_topic(BASE))
        await late.result(late.created)
