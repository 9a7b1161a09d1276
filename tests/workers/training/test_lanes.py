"""Lanes: the next operation is chosen strictly by seq_id, in whatever order operations arrive and end."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from contracts.errors import EngineFailure
from contracts.ids import RequestId, RunId, TenantId
from contracts.ledger_records import UNLOAD_SEQ_ID, PendingOperation, ReadyOperation, RunLease
from contracts.losses import LossName
from contracts.operations import (
    CreateModel,
    Datum,
    LoadWeights,
    LoraSettings,
    LossSpec,
    OperationKind,
    OptimStep,
    Payload,
    TrainingBatch,
    UnloadModel,
)
from engine.round_robin import Fairness
from engine.training.pass_operation import PassOperation
from workers.training.lanes import LOOKAHEAD_OPERATIONS, Lane, Lanes, Rebuild, creates
from workers.training.scheduler import QueuedPass, plan_pass

RUN, OTHER = RunId("first:train:0"), RunId("second:train:0")
TENANTS = {RUN: TenantId("first"), OTHER: TenantId("second")}
F, B, S, U = (
    OperationKind.FORWARD,
    OperationKind.FORWARD_BACKWARD,
    OperationKind.OPTIM_STEP,
    OperationKind.UNLOAD_MODEL,
)
_positions = itertools.count(1)


def pending(
    seq_id: int, kind: OperationKind = B, *, run: RunId = RUN, next_seq_id: int = 1, tokens: int = 10
) -> PendingOperation:
    """Return an operation as the ledger lists it, accepted after all made before."""
    id = RequestId(f"{run}/{seq_id}")
    return PendingOperation(
        id, next(_positions), TENANTS[run], run, seq_id, kind, tokens, next_seq_id, 1.0, LEASE, LORA
    )


LEASE = RunLease("a trainer", 1)
LORA = LoraSettings(rank=4, seed=1)


def ready(operation: PendingOperation) -> ReadyOperation:
    """Return the operation with its payload."""
    zeros = np.zeros(operation.tokens, dtype=np.int64)
    payloads: dict[OperationKind, Payload] = {S: OptimStep(), U: UnloadModel()}
    payload = payloads.get(operation.kind) or TrainingBatch(LossSpec(LossName.CROSS_ENTROPY), [Datum(zeros, zeros, {})])
    return ReadyOperation(
        operation.id,
        operation.position,
        operation.tenant,
        operation.run,
        operation.seq_id,
        operation.kind,
        payload,
        operation.tokens,
        operation.lease,
    )


def lanes_of(*operations: PendingOperation, loaded: bool = True) -> Lanes:
    """Return lanes that know the operations, with payloads if ``loaded``."""
    lanes = Lanes()
    lanes.add_pending(operations)
    if loaded:
        lanes.add_payloads([ready(operation) for operation in operations])
    return lanes


def lane_of(lanes: Lanes, run: RunId = RUN) -> Lane:
    """Return the run's lane, which must be there."""
    lane = lanes.get(run)
    assert lane is not None
    return lane


def head_of(lanes: Lanes, run: RunId = RUN) -> int | None:
    """Return the seq_id that may run, None if none may."""
    head = lane_of(lanes, run).head
    return None if head is None else head.seq_id


def rebuilt(lanes: Lanes, *seq_ids: int, next_seq_id: int) -> Lane:
    """Set the run's lane back to the replays of ``seq_ids``, and return it."""
    lane = lane_of(lanes)
    assert lane.head is not None
    replays = [replace(pending(seq_id, next_seq_id=next_seq_id), is_replay=True) for seq_id in seq_ids]
    lane.begin_rebuild(Rebuild(next_seq_id, replays, len(replays), 0.0), lane.head)
    return lane


@pytest.mark.parametrize("seed", range(5))
def test_the_head_is_the_next_seq_id_whatever_arrives_first(seed: int) -> None:
    """Another run's arrivals make no difference."""
    operations = [pending(seq_id) for seq_id in range(1, 7)] + [pending(seq_id, run=OTHER) for seq_id in (1, 2)]
    random.Random(seed).shuffle(operations)
    lanes = Lanes()
    for operation in operations:
        lanes.add_pending([operation])
        lanes.add_payloads([ready(operation)])
    seen = []
    while (head := lane_of(lanes).head) is not None:
        seen.append(head.seq_id)
        lane_of(lanes).finish(head)
    assert seen == [1, 2, 3, 4, 5, 6]
    assert head_of(lanes, OTHER) == 1


def test_a_hole_stops_its_own_lane_only_until_it_is_filled() -> None:
    late = pending(1)
    lanes = lanes_of(pending(2), pending(1, run=OTHER))
    assert (head_of(lanes), head_of(lanes, OTHER)) == (None, 1)
    assert lane_of(lanes).has_hole
    assert not lane_of(lanes, OTHER).has_hole
    assert lane_of(lanes).to_load(1000) == []
    lanes.add_pending([late])
    assert not lane_of(lanes).has_hole
    assert head_of(lanes) is None
    assert [operation.seq_id for operation in lane_of(lanes).to_load(1000)] == [1]
    lanes.add_payloads([ready(late)])
    assert [operation.seq_id for operation in lane_of(lanes).passes()] == [1, 2]


def test_a_hole_that_was_refused_is_stepped_over() -> None:
    lanes = lanes_of(pending(2), pending(5), pending(1, run=OTHER))
    lane_of(lanes).move_to(2)
    assert (head_of(lanes), head_of(lanes, OTHER)) == (2, 1)
    lane_of(lanes).move_to(1)
    assert head_of(lanes) == 2


def test_passes_go_up_to_the_next_barrier() -> None:
    lanes = lanes_of(*(pending(seq_id, kind) for seq_id, kind in enumerate((B, F, B, S, B), start=1)))
    lane = lane_of(lanes)
    assert [operation.seq_id for operation in lane.passes()] == [1, 2, 3]
    for operation in list(lane.passes()):
        lane.finish(operation)
    assert list(lane.passes()) == []
    assert head_of(lanes) == 4
    step = lane.head
    assert step is not None
    lane.finish(step)
    assert [operation.seq_id for operation in lane.passes()] == [5]


def test_payloads_are_fetched_as_far_as_a_pass_reaches_and_no_further() -> None:
    lane = lane_of(lanes_of(*(pending(seq_id) for seq_id in range(1, 30)), loaded=False))
    assert [one.seq_id for one in lane.to_load(25)] == [1, 2, 3]
    assert len(lane.to_load(10_000)) == LOOKAHEAD_OPERATIONS
    first = ready(lane.waiting[1])
    lane.loaded[1] = first
    del lane.waiting[1]
    assert [one.seq_id for one in lane.to_load(25)] == [2, 3]
    assert lane.to_load(10) == []


def test_an_unload_comes_after_everything_without_a_hole_before_it() -> None:
    """A hole before later operations can never be filled once the unload is in: the lane ends there."""
    lanes = lanes_of(pending(UNLOAD_SEQ_ID, U), pending(1), pending(3), pending(1, run=OTHER))
    assert head_of(lanes) == 1
    lane = lane_of(lanes)
    first = lane.head
    assert first is not None
    lane.finish(first)
    assert head_of(lanes) == UNLOAD_SEQ_ID
    unload = lane.head
    assert unload is not None
    lane.finish(unload)
    assert lane.next_seq_id == 2
    assert head_of(lanes, OTHER) == 1


def test_an_unload_is_fetched_when_it_is_next() -> None:
    lane = lane_of(lanes_of(pending(UNLOAD_SEQ_ID, U), loaded=False))
    assert lane.head is None
    assert [one.seq_id for one in lane.to_load(1)] == [UNLOAD_SEQ_ID]


def test_what_has_run_does_not_come_back_with_a_look_at_a_ledger_that_is_behind() -> None:
    """Memory is ahead of the ledger while completions are on their way: a full look lists them as pending still."""
    operations = [pending(1), pending(2), pending(1, run=OTHER)]
    lanes = lanes_of(*operations)
    first = lane_of(lanes).head
    assert first is not None
    lane_of(lanes).finish(first)
    lanes.cursor = 0
    lanes.add_pending(operations)
    lanes.add_payloads([ready(operation) for operation in operations])
    assert (head_of(lanes), head_of(lanes, OTHER)) == (2, 1)
    assert lanes.cursor == operations[-1].position


def test_a_dropped_lane_is_forgotten_and_comes_back_as_the_ledger_says() -> None:
    operations = [pending(1), pending(2), pending(1, run=OTHER)]
    lanes = lanes_of(*operations)
    old, first = lane_of(lanes), lane_of(lanes).head
    assert first is not None
    old.finish(first)
    assert lanes.drop(RUN) is old
    assert lanes.drop(RUN) is None
    assert old.is_dropped
    assert lanes.get(RUN) is None
    assert head_of(lanes, OTHER) == 1
    lanes.add_pending(operations)
    assert lane_of(lanes) is not old
    assert lane_of(lanes).next_seq_id == 1
    assert not lane_of(lanes).is_dropped


@pytest.mark.parametrize("reason", ["is_busy", "unwritten", "started", "work", "nothing"])
def test_an_idle_lane_is_dropped_only_when_nothing_depends_on_it(reason: str) -> None:
    lanes = lanes_of(pending(1), pending(1, run=OTHER))
    lane, operation = lane_of(lanes), lane_of(lanes).head
    assert operation is not None
    if reason != "work":
        lane.finish(operation)
    if reason == "is_busy":
        lane.is_busy = True
    elif reason == "unwritten":
        lane.unwritten = 1
    elif reason == "started":
        assert isinstance(operation.payload, TrainingBatch)
        lane.started[operation.id] = PassOperation(RUN, operation.payload, backward=True)
    lanes.drop_idle()
    assert (lanes.get(RUN) is None) == (reason == "nothing")
    assert [one.run for one in lanes if one.run == OTHER] == [OTHER]


def test_a_rebuild_sets_its_lane_back_and_the_pending_operations_wait_for_the_last_replay() -> None:
    """Seq_ids 2 and 5 had no effect, 6 is the first pending one. A look that began before the rebuild changes nothing."""
    lanes = lanes_of(pending(6, next_seq_id=6), pending(7, next_seq_id=6), pending(1, run=OTHER))
    lane = rebuilt(lanes, 1, 3, 4, next_seq_id=6)
    assert lane.next_seq_id == 1
    lanes.add_pending([pending(seq_id, next_seq_id=6) for seq_id in range(1, 8)])
    assert [one.seq_id for one in lane.to_load(1000)] == [1, 3, 4]
    lanes.add_payloads([ready(one) for one in lane.to_load(1000)])
    assert [one.seq_id for one in lane.passes()] == [1, 3, 4]
    assert head_of(lanes, OTHER) == 1
    for replay in list(lane.passes()):
        assert replay.is_replay
        lane.finish(replay)
    lane.end_rebuild(None)
    assert [one.seq_id for one in lane.passes()] == [6, 7]
    assert not any(one.is_replay for one in lane.passes())


def test_a_failed_rebuild_ends_what_is_in_passes_and_goes_on_with_the_pending_operations() -> None:
    lanes = lanes_of(pending(3, next_seq_id=3))
    lane = rebuilt(lanes, 1, 2, next_seq_id=3)
    lanes.add_payloads([ready(one) for one in lane.to_load(1000)])
    replay = next(lane.passes())
    assert isinstance(replay.payload, TrainingBatch)
    begun = lane.started[replay.id] = PassOperation(RUN, replay.payload, backward=True)
    failure = EngineFailure("no")
    lane.end_rebuild(failure)
    assert begun.outcome is not None
    assert not lane.started
    assert (head_of(lanes), lane.restore_failure) == (3, failure)


def test_a_tenants_replays_are_charged_to_it_and_a_light_tenant_waits_for_one_pass_at_most() -> None:
    """A replay of 400 sequences beside ten of another tenant that come one after another."""
    lanes = lanes_of(pending(401, next_seq_id=401))
    heavy = rebuilt(lanes, *range(1, 401), next_seq_id=401)
    fairness, waits, taken = Fairness(), 0, 0
    for number in range(1, 11):
        lanes.add_pending([pending(number, run=OTHER, next_seq_id=number)])
        light = lane_of(lanes, OTHER)
        while light.head is not None or light.waiting:
            lanes.add_payloads([ready(one) for lane in lanes for one in lane.to_load(40)])
            waiting = {one.id: (lane, one) for lane in lanes for one in lane.passes()}
            queue = [QueuedPass(one.id, lane.run, lane.tenant, [one.tokens]) for lane, one in waiting.values()]
            plan = plan_pass(queue, fairness, shares={}, token_budget=40)
            fairness = plan.fairness
            for lane, one in (waiting[piece.id] for piece in plan.pieces):
                lane.finish(one)
                taken += lane is heavy
            waits += light.head is not None
    assert waits <= 10
    assert taken >= 10
    assert heavy.next_seq_id == taken + 1


def test_what_creates_a_run() -> None:
    operation = ready(pending(0))
    made: dict[Payload, bool] = {
        CreateModel("base", LoraSettings(4)): True,
        LoadWeights("path", optimizer=True, creates=True): True,
        LoadWeights("path", optimizer=True, creates=False): False,
    }
    for payload, expected in made.items():
        kind = OperationKind.CREATE_MODEL if isinstance(payload, CreateModel) else OperationKind.LOAD_WEIGHTS
        one = ReadyOperation(operation.id, 1, operation.tenant, RUN, 0, kind, payload, 0)
        assert creates(one) is expected
