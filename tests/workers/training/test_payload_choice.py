"""Payloads in a trainer's memory: each look loads so many bytes at most, tenants in turn, and nobody waits for ever."""

from collections.abc import Sequence

import numpy as np
import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import RequestId, RunId, TenantId
from contracts.ledger_records import PendingOperation, ReadyOperation, RunLease
from contracts.losses import LossName
from contracts.operations import Datum, ForwardBackwardOutput, LoraSettings, LossSpec, OperationKind, TrainingBatch
from engine.model.base import BaseModel
from tests.engine.training.conftest import make_batch
from tests.workers.training.conftest import NewRig
from workers.training import payload_choice
from workers.training.lanes import Lanes
from workers.training.payload_choice import PayloadChoice, choose

TOKENS, SEQUENCES, MODELS, OF_MODEL = 64, 8, 5, 3
BYTES = 20 * TOKENS * SEQUENCES
"""Bytes of a decoded batch of zeros."""
BOUND = 3 * BYTES
HOG, CAT, DOG = TenantId("hog"), TenantId("cat"), TenantId("dog")


def zeros() -> TrainingBatch:
    """Return a batch that takes few bytes where it is stored."""
    numbers = np.zeros(TOKENS, dtype=np.int64)
    inputs = {"weights": np.zeros(TOKENS, dtype=np.float32)}
    return TrainingBatch(LossSpec(LossName.CROSS_ENTROPY), [Datum(numbers, numbers, inputs)] * SEQUENCES)


def decoded_bytes(operations: Sequence[ReadyOperation]) -> int:
    """Return the bytes of the operations' arrays."""
    batches = [one.payload for one in operations if isinstance(one.payload, TrainingBatch)]
    data = [datum for batch in batches for datum in batch.data]
    return sum(one.tokens.nbytes + one.targets.nbytes + sum(i.nbytes for i in one.inputs.values()) for one in data)


async def test_batches_that_are_large_once_decoded_are_loaded_in_parts_and_a_neighbours_with_the_first(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tenant has many models, each with a few batches of equal numbers, which were all accepted first."""
    monkeypatch.setattr(payload_choice, "LOADED_BYTES", BOUND)
    monkeypatch.setattr(payload_choice, "KEPT_BYTES", BOUND)
    rig = new_rig()
    async with rig.running():
        hog, cat = await rig.clients("hog", "cat")
        hogs = [hog] + [await rig.model(hog.tenant, hog.session, hog.lora, 1 + number) for number in range(MODELS - 1)]
        for one in hogs:
            await one.result(one.created)
        looks: list[list[ReadyOperation]] = []
        kept: list[int] = []
        load = rig.ledger.load

        async def noting(session: AsyncSession, ids: Sequence[RequestId]) -> list[ReadyOperation]:
            looks.append(await load(session, ids))
            lanes = [lane for lane in rig.worker._lanes if lane.tenant == hog.tenant]
            of_hog = [one for one in looks[-1] if one.tenant == hog.tenant]
            kept.append(decoded_bytes([one for lane in lanes for one in lane.loaded.values()] + of_hog))
            return looks[-1]

        monkeypatch.setattr(rig.ledger, "load", noting)
        async with rig.database.write() as transaction:
            large = [(one, await one.accept(transaction, zeros())) for _ in range(OF_MODEL) for one in hogs]
            small = await cat.accept(transaction, make_batch(1, LossName.CROSS_ENTROPY, (6, 9)))
        assert isinstance(await cat.result(small), ForwardBackwardOutput)
        for one, request in large:
            assert isinstance(await one.result(request), ForwardBackwardOutput)
    assert small in [one.id for one in looks[0]]
    assert max(map(decoded_bytes, looks)) <= BOUND
    assert max(kept) <= 2 * BOUND
    assert sum(len(one) for one in looks) == MODELS * OF_MODEL + 1


def pending(tenant: TenantId, position: int, *, nbytes: int) -> PendingOperation:
    """Return a model's next operation as the ledger lists it."""
    kind, id = OperationKind.FORWARD_BACKWARD, RequestId(str(position))
    run, lease = RunId(f"{tenant}:{position}"), RunLease("a trainer", 1)
    return PendingOperation(id, position, tenant, run, 1, kind, 10, 1, 1.0, lease, LoraSettings(rank=4), nbytes=nbytes)


def ready(one: PendingOperation) -> ReadyOperation:
    """Return the operation with its payload."""
    return ReadyOperation(one.id, one.position, one.tenant, one.run, one.seq_id, one.kind, zeros(), one.tokens)


def test_a_tenant_with_enough_in_memory_waits_only_while_a_pass_may_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its models in memory would wait for those that wait for their memory."""
    monkeypatch.setattr(payload_choice, "KEPT_BYTES", payload_choice.LOADED_BYTES)
    half = payload_choice.LOADED_BYTES // 2
    operations = [pending(HOG, position, nbytes=half) for position in range(2, 6)] + [pending(CAT, 6, nbytes=half)]
    lanes, residents = Lanes(), {operations[0].run}
    lanes.add_pending(operations)
    choice = PayloadChoice(lanes, 100, is_resident=residents.__contains__)
    lanes.add_payloads([ready(one) for one in operations[:2]])
    assert choose(choice.wanted()) == ["6"]
    lanes.add_pending([oldest := pending(HOG, 1, nbytes=half)])
    assert choose(choice.wanted()) == [oldest.id, "6"]
    residents.clear()
    assert choose(choice.wanted()) == [oldest.id, "6"]
    lanes.add_payloads([ready(oldest), ready(operations[4])])
    assert choose(choice.wanted()) == ["4", "5"]


def test_a_large_operation_that_cannot_be_read_keeps_nobody_from_being_loaded() -> None:
    bound = payload_choice.LOADED_BYTES
    operations = [pending(HOG, 1, nbytes=2 * bound), pending(CAT, 2, nbytes=bound), pending(DOG, 3, nbytes=bound)]
    lanes = Lanes()
    lanes.add_pending(operations)
    choice = PayloadChoice(lanes, 100, is_resident=lambda _run: True)
    looks = []
    for _ in operations:
        looks.append(chosen := choose(choice.wanted()))
        found = [ready(one) for one in operations if one.id in chosen and one.tenant != HOG]
        lanes.add_payloads(found)
        is_to_go_on = choice.is_to_go_on(chosen, [one.id for one in found])
    assert looks == [["1"], ["2"], ["3"]]
    assert is_to_go_on
    last = choose(choice.wanted())
    assert last == ["1"]
    assert not choice.is_to_go_on(last, []), "it would be tried without a pause"
