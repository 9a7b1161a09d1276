"""Poison: an operation at which trainers die fails after some deaths, alone, and its neighbours notice only time passing."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import NoReturn

import pytest
import torch
from sqlalchemy import select, update

from contracts.errors import EngineFailure
from contracts.ids import RequestId
from contracts.ledger_records import OperationState
from contracts.losses import LossName
from contracts.operations import ForwardBackwardOutput, OptimStep, OptimStepped, SaveWeights, TrainingBatch
from engine.model.base import BaseModel
from engine.training.pass_operation import PassPiece
from engine.training.trainer import ComputedPass
from ledger.attempts import count_attempts
from ledger.work_in_hand import WorkInHand, read_record, remove_record
from store.data_folder import DataFolder
from store.tables import Operation
from tenants.trainers import RECORDS
from tests.conftest import ROOT
from tests.engine.training.conftest import make_batch
from tests.workers.training.conftest import DEADLINE, Client, NewRig, Rig, busy_file_threads, undisturbed
from tests.workers.training.test_residency import out_of_memory
from tests.workers.training.test_unread_checkpoints import SickDisk, saved
from workers.housekeeping.folders import FolderRemoval
from workers.training.turns import Turns

STEP = OptimStep(learning_rate=1e-3)
DEADLY = 319
MOST_LIVES = 8
MOST_ATTEMPTS = 3


def batch(seed: int, lengths: tuple[int, ...] = (6, 9)) -> TrainingBatch:
    """Return a batch of random sequences."""
    return make_batch(seed, LossName.CROSS_ENTROPY, lengths)


def deadly_batch() -> TrainingBatch:
    """Return a batch whose second sequence kills a mortal trainer."""
    good = batch(7)
    tokens = good.data[1].tokens.copy()
    tokens[0] = DEADLY
    return replace(good, data=[good.data[0], replace(good.data[1], tokens=tokens)])


async def row(rig: Rig, request: RequestId) -> Operation:
    """Return the operation's row."""
    async with rig.database.read() as session:
        return (await session.scalars(select(Operation).where(Operation.id == request))).one()


async def suspect(rig: Rig, *requests: RequestId, attempts: int = 1) -> None:
    """Have trainers died at the operations."""
    async with rig.database.write() as transaction:
        await transaction.execute(update(Operation).where(Operation.id.in_(requests)).values(attempts=attempts))


async def test_an_operation_that_kills_every_trainer_fails_alone_and_its_neighbours_train_on(
    new_rig: NewRig, base: BaseModel, tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes die, also in replays. The neighbours shared the first pass with it, and have all their steps, each once."""
    rig = new_rig()
    replayer = await rig.client("replayer")
    monkeypatch.setattr(rig.residency, "unsaved", list)
    async with rig.running():
        done = [await replayer.send(one) for one in (batch(1), deadly_batch(), STEP)]
        for request in done:
            await replayer.result(request)
    behind = [await replayer.send(one) for one in (batch(2), STEP)]
    poisoner = await rig.client("poisoner")
    deadly, after = await poisoner.send(deadly_batch()), await poisoner.send(STEP)
    neighbours = [await rig.client(name) for name in ("near", "far")]
    work: list[TrainingBatch | OptimStep] = [batch(1), STEP, batch(2), STEP]
    sent = [(one, await one.send(payload)) for payload in work for one in neighbours]
    nursery = [sys.executable, "-m", "tests.workers.training.mortal_trainer", f"sqlite+aiosqlite:///{tmp_path}/weft.db"]
    nursery += [str(tmp_path), str(tiny_model_dir), str(DEADLY), str(MOST_LIVES)]
    ended = await asyncio.to_thread(subprocess.run, nursery, cwd=ROOT, capture_output=True, text=True, timeout=240)
    # The first death may be one of both.
    assert ended.stdout.split()[-1:] in ([str(2 * MOST_ATTEMPTS - 1)], [str(2 * MOST_ATTEMPTS)]), ended.stderr[-4000:]
    failed = await row(rig, deadly)
    assert (failed.state, failed.error_code, failed.attempts) == (
        OperationState.FAILED,
        "poison_operation",
        MOST_ATTEMPTS,
    )
    assert (await row(rig, after)).state == OperationState.DONE
    replayed = await row(rig, done[1])
    assert (replayed.state, replayed.attempts) == (OperationState.DONE, MOST_ATTEMPTS)
    for request in behind:
        with pytest.raises(EngineFailure, match=f"operation 2 cannot be computed again .*{done[1]}"):
            await replayer.result(request)
        assert (await row(rig, request)).attempts <= 1
    for one, request in sent:
        assert isinstance(await one.result(request), ForwardBackwardOutput | OptimStepped)
        assert (await row(rig, request)).attempts <= 1
    for record in rig.data_folder.folders(RECORDS):
        os.utime(rig.data_folder.path(record), (0, 0))
    await FolderRemoval(rig.runtime).remove_orphans(after=f"{RECORDS}/")
    assert rig.data_folder.folders(RECORDS) == []
    again = new_rig(url=rig.database.engine.url.render_as_string())
    async with again.running():
        for one in neighbours:
            one.rig = again
            assert isinstance(await one.do(STEP), OptimStepped)
            expected = undisturbed(base, one.lora, [*work, STEP])
            assert torch.allclose(one.state().weights.vector, expected.weights.vector, rtol=1e-5, atol=1e-6)


class Company:
    """A trainer's ``compute`` that notes which runs are computed at the same time."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[set[str]] = []
        self._now: list[str] = []
        self._lock = Lock()
        self._compute = rig.trainer.compute
        monkeypatch.setattr(rig.trainer, "compute", self)

    def __call__(self, pieces: Sequence[PassPiece], *, slots: int | None = None) -> ComputedPass:
        runs = [piece.operation.run for piece in pieces]
        with self._lock:
            self._now += runs
            self.seen.append(set(self._now))
        try:
            return self._compute(pieces, slots=slots)
        finally:
            with self._lock:
                for run in runs:
                    self._now.remove(run)

    def of(self, client: Client) -> list[set[str]]:
        """Return who was computed together, each time that the client began."""
        return [runs for runs in self.seen if client.run in runs]


async def test_a_suspect_runs_alone_while_others_go_on(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suspect pass, a suspect step and a suspect save, beside a flood that never ends by itself."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    rig = new_rig(token_budget=64)
    async with rig.running():
        client, other, flood = await rig.clients("client", "other", "flood")
        company = Company(rig, monkeypatch)
        async with rig.database.write() as transaction:
            mine = [await client.accept(transaction, one) for one in (batch(1), batch(2), STEP, SaveWeights("kept"))]
            await transaction.execute(update(Operation).where(Operation.id.in_(mine)).values(attempts=1))
            floods = [await flood.accept(transaction, batch(3, (16,) * 8)) for _ in range(12)]
        for number in range(4):
            assert isinstance(await other.do(batch(number)), ForwardBackwardOutput)
        for request in mine:
            await client.result(request)
        for request in floods:
            assert isinstance(await flood.result(request), ForwardBackwardOutput)
        assert company.of(client) == [{client.run}, {client.run}]
        assert any(len(runs) > 1 for runs in company.seen)
        expected = undisturbed(base, client.lora, [batch(1), batch(2), STEP])
        assert torch.allclose(client.state().weights.vector, expected.weights.vector, rtol=1e-5, atol=1e-6)


async def test_a_suspect_that_cannot_begin_holds_nobody_up(new_rig: NewRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A creation waits for the limit of open models. It is made once another model is unloaded."""
    monkeypatch.setattr("workers.training.worker.SWEEP_SECONDS", 0.1)
    rig = new_rig(max_adapters=2)
    async with rig.running():
        first, second = await rig.clients("first", "second")
        third = await rig.client("third")
        await suspect(rig, third.created)
        for number in range(3):
            assert isinstance(await first.do(batch(number)), ForwardBackwardOutput)
        assert await third.is_pending(third.created)
        await second.unload()
        await third.result(third.created)


async def test_a_suspect_creation_that_a_limit_holds_back_gets_no_turn(
    new_rig: NewRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn stops everybody: once the limit is known, none is given before an unload."""
    monkeypatch.setattr("workers.training.turns._STUCK_SECONDS", 0.0)
    given: list[RequestId] = []
    choose = Turns.choose

    def record(turns: Turns, *, is_computing: bool) -> None:
        before = turns._alone
        choose(turns, is_computing=is_computing)
        if turns._alone is not None and turns._alone != before:
            given.append(turns._alone[1])

    monkeypatch.setattr(Turns, "choose", record)
    rig = new_rig(max_adapters=2)
    async with rig.running():
        first, second = await rig.clients("first", "second")
        third = await rig.client("third")
        await suspect(rig, third.created)
        for number in range(8):
            assert isinstance(await first.do(batch(number)), ForwardBackwardOutput)
        assert given.count(third.created) <= 1
        await second.unload()
        await third.result(third.created)


async def test_a_suspect_that_is_tried_again_holds_nobody_up_meanwhile(
    new_rig: NewRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load's checkpoint cannot be read for a while. It is done once the checkpoint can be read again."""
    monkeypatch.setattr("workers.training.worker.SWEEP_SECONDS", 0.1)
    monkeypatch.setattr("workers.training.turns._LONGEST_WAIT_SECONDS", 0.2)
    disk, rig = SickDisk(monkeypatch), new_rig()
    async with rig.running():
        client, other = await rig.clients("client", "other")
        load = await saved(client)
        disk.times = 10_000
        async with rig.database.write() as transaction:
            loading = await client.accept(transaction, load)
            await transaction.execute(update(Operation).where(Operation.id == loading).values(attempts=1))
        assert await asyncio.to_thread(disk.has_failed.wait, DEADLINE)
        assert isinstance(await other.do(batch(4)), ForwardBackwardOutput)
        assert isinstance(await other.do(STEP), OptimStepped)
        assert await client.is_pending(loading)
        disk.times = 0
        await client.result(loading)


async def test_an_operation_with_too_many_attempts_fails_with_a_code_and_its_run_goes_on(new_rig: NewRig) -> None:
    rig = new_rig()
    (client,) = await asyncio.gather(rig.client("client"))
    poison, after = await client.send(batch(1)), await client.send(STEP)
    other = await rig.client("other")
    refused = await rig.client("refused")
    await suspect(rig, poison, refused.created, attempts=MOST_ATTEMPTS)
    async with rig.running():
        for owner, request in ((client, poison), (refused, refused.created)):
            with pytest.raises(EngineFailure, match="3 trainers ended"):
                await owner.result(request)
            assert (await row(rig, request)).error_code == "poison_operation"
        assert isinstance(await client.result(after), OptimStepped)
        assert isinstance(await other.do(batch(1)), ForwardBackwardOutput)


@pytest.mark.parametrize("kind", ["save", "load", "restore", "creation"])
async def test_work_that_waits_for_its_place_gets_no_attempt_when_its_trainer_dies(new_rig: NewRig, kind: str) -> None:
    """The places of files are all taken by two tenants' saves, which have begun. A third tenant's work waits."""
    rig = new_rig()
    async with rig.running():
        savers = [*await rig.clients("cats", "mice")]
        savers += [await rig.model(one.tenant, one.session, one.lora, 1) for one in savers]
        dogs, birds = await rig.clients("dogs", "birds")
        for one in (*savers, dogs):
            await one.result(one.created)
        await dogs.do(batch(1))
        load = await saved(dogs)
        if kind == "restore":
            await out_of_memory(rig, dogs)
        trainer = rig.worker.leases.identity.id
        with busy_file_threads():
            saves = [await one.send(SaveWeights("kept")) for one in savers]
            while not set(saves) <= set(read_record(rig.data_folder, trainer)):
                await birds.do(batch(1))
            if kind == "creation":
                dogs = await rig.model(dogs.tenant, dogs.session, dogs.lora, 1)
                waiting = dogs.created
            else:
                waiting = await dogs.send({"save": SaveWeights("theirs"), "load": load, "restore": STEP}[kind])
            while not rig.residency.files.waiting:
                await birds.do(batch(1))
            in_hand = read_record(rig.data_folder, trainer)
            async with rig.database.write() as transaction:
                await count_attempts(transaction, in_hand)
            assert [(await row(rig, one)).attempts for one in saves] == [1] * 4
            assert (await row(rig, waiting)).attempts == 0
        for one, request in [*zip(savers, saves, strict=True), (dogs, waiting)]:
            await one.result(request)
        assert isinstance(await birds.do(STEP), OptimStepped)


async def test_waiting_work_is_recorded_from_its_begin_to_its_end(tmp_path: Path) -> None:
    """Begun work stays recorded after an error that ends the process. Others' work is recorded by itself."""
    folder, work = DataFolder(tmp_path), WorkInHand()
    await work.open(folder, "trainer")
    mine, theirs = RequestId("1" * 36), RequestId("2" * 36)
    with work.holding([theirs]):
        with work.waiting(mine):
            assert read_record(folder, "trainer") == [theirs]
            work.begin(mine)
            work.begin(mine)
            assert set(read_record(folder, "trainer")) == {mine, theirs}
        assert read_record(folder, "trainer") == [theirs]
        with pytest.raises(KeyboardInterrupt), work.waiting(mine):
            raise KeyboardInterrupt
        assert read_record(folder, "trainer") == [theirs]

    def die() -> NoReturn:
        work.begin(mine)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), work.waiting(mine):
        die()
    assert read_record(folder, "trainer") == [mine]
    work.close()


async def test_a_record_shows_what_was_in_hand_last(tmp_path: Path) -> None:
    """The record is right after it has become shorter, too, and after an error that ends the process."""
    folder, work = DataFolder(tmp_path), WorkInHand()
    await work.open(folder, "trainer")
    first, second = RequestId("1" * 36), RequestId("2" * 36)
    with work.holding([first, second]), work.holding([second]):
        assert set(read_record(folder, "trainer")) == {first, second}
    assert read_record(folder, "trainer") == []
    with pytest.raises(ValueError, match="its own"), work.holding([first]):
        raise ValueError("its own")
    assert not work
    with pytest.raises(KeyboardInterrupt), work.holding([second]):
        raise KeyboardInterrupt
    assert read_record(folder, "trainer") == [second]
    work.close()
    remove_record(folder, "trainer")
    assert read_record(folder, "trainer") == []
