"""Reasons of pending training operations, from the facts of ``ledger.wait_facts``."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row

from contracts.ids import RequestId, TenantId
from contracts.ledger_records import UNLOAD_SEQ_ID
from contracts.operations import OperationKind
from contracts.waiting import Wait, WaitReason
from ledger.wait_facts import WaitFacts
from store.settings import Settings
from store.tables import RunState
from tenants.limit_use import SNAPSHOT_BYTES
from tenants.rate_holds import Hold
from tenants.run_directives import RunDirective
from tenants.run_history import RunEventKind

_SAVES = {
    OperationKind.SAVE_WEIGHTS,
    OperationKind.SAVE_WEIGHTS_FOR_SAMPLER,
    OperationKind.SAVE_WEIGHTS_EXTERNAL,
}
_LATE = 2
"""A trainer renews its lease four times in its length. One whose lease has less than this part left is not heard of."""


def wait_of_training(row: Row[Any], facts: WaitFacts, settings: Settings) -> Wait:
    """Return why the operation waits: for itself, or behind the operation of its run that runs next."""
    if row.suspended_at is not None:
        return held(row)
    if row.run_state == RunState.CREATING and (full := _full(row, facts, settings)) is not None:
        return full
    if (hold := facts.holds.get(row.id)) is not None and row.id not in facts.in_hand:
        return over(row, hold)
    # An unload runs after everything that has come in its lane, also behind a gap.
    is_front = row.seq_id == row.next_seq_id or (row.seq_id == UNLOAD_SEQ_ID and row.front_id is None)
    if not is_front and row.front_id is None:
        return _missing(row, settings)
    reason, text, since, until = _of_front(row, facts, settings)
    wait = Wait(reason, text, cause=reason, since=since, until=until, front=RequestId(row.front_id or row.id))
    if is_front:
        return wait
    kind = str(row.front_kind).replace("_", " ")
    told = f"seq_id {row.next_seq_id} of this model ({kind}) comes first: {text}"
    return replace(wait, reason=WaitReason.EARLIER_OPERATION, text=told, seq_id=row.next_seq_id)


def held(row: Row[Any]) -> Wait:
    """Return the wait of a suspended tenant."""
    told = row.suspend_reason or "ask the service's operator why"
    text = f"this tenant's work is suspended: {told}"
    return Wait(WaitReason.HELD, text, cause=WaitReason.HELD, since=row.suspended_at)


def over(row: Row[Any], hold: Hold) -> Wait:
    """Return the wait of an operation that its tenant's rate or a spent budget holds."""
    return Wait(hold.reason, hold.told, cause=hold.reason, since=row.created_at, until=hold.until)


def _missing(row: Row[Any], settings: Settings) -> Wait:
    minutes = settings.gap_grace.total_seconds() / 60
    text = (
        f"seq_id {row.next_seq_id} of this model has not come, and this request waits for it; {minutes:.0f} minutes after "
        "the model's last request it counts as failed, and this one runs"
    )
    reason = WaitReason.MISSING_SEQ_ID
    return Wait(reason, text, cause=reason, since=_front_since(row), seq_id=row.next_seq_id)


def _full(row: Row[Any], facts: WaitFacts, settings: Settings) -> Wait | None:
    """Return the wait of a run that is not made yet for want of room, None if there is room."""
    use, project = facts.uses[TenantId(row.tenant_id)], facts.projects.get(row.lane)
    opened, most = facts.open_adapters.get(row.base_model, 0), settings.max_adapters
    if use.room("open_runs") < 1:
        reason = WaitReason.OPEN_RUNS
        text = (
            f"you have {use.used['open_runs']} models open, and your limit is {use.limits.open_runs}; this one is created "
            "when another is unloaded or its session ends"
        )
    elif project is not None and not project.has_room("open_runs"):
        reason = WaitReason.OPEN_RUNS
        text = (
            f"{project.used['open_runs']} models are open in project {project.name!r}, and its limit is "
            f"{project.limits['open_runs']}; this one is created when another is unloaded or its session ends"
        )
    elif not use.may_open_run:
        reason = WaitReason.STORAGE
        text = (
            f"the snapshots of your models take {use.used[SNAPSHOT_BYTES]} of {use.limits.stored_bytes} bytes of storage; "
            "this one is created when others are unloaded, or some time after their sessions end"
        )
    elif most is not None and opened >= most:
        reason = WaitReason.OPEN_ADAPTERS
        text = f"{most} models are open on {row.base_model}; this one is created when another is unloaded"
    else:
        return None
    return Wait(reason, text, cause=reason, since=row.created_at)


_Found = tuple[WaitReason, str, datetime, datetime | None]
"""Reason, text, since and until."""


def _of_front(row: Row[Any], facts: WaitFacts, settings: Settings) -> _Found:
    """Return why the operation of the run that runs next has not ended."""
    if (hold := facts.holds.get(row.front_id)) is not None and row.front_id not in facts.in_hand:
        return hold.reason, hold.told, _front_since(row), hold.until
    if row.trainer_id is None:
        return _of_unplaced(row, facts)
    if (lost := _lost(row, facts, settings)) is not None:
        return lost
    since = _front_since(row)
    is_in_hand = (row.front_id or row.id) in facts.in_hand
    if _is_brought_back(row):
        text = "the model's adapter is brought back from its last snapshot"
        return WaitReason.RESTORING, text, max(since, row.claimed_at), None
    if row.rebuild == RunEventKind.REPLAYED and not is_in_hand and _is_after(row.rebuilt_at, row.before_finished_at):
        text = f"the model's adapter is rebuilt ({row.rebuild_detail}), before which nothing else of it runs"
        return WaitReason.REPLAYING, text, row.rebuilt_at, None
    if is_in_hand:
        if (row.front_kind or row.kind) in _SAVES:
            return WaitReason.SAVING, "its checkpoint is written", since, None
        return WaitReason.RUNNING, "it is computed now", since, None
    if row.directive == RunDirective.MOVE or row.trainer_drained_at is not None:
        text = "the model is handed to another trainer"
        return WaitReason.MOVING, text, row.trainer_drained_at or row.directed_at, None
    if row.front_attempts if row.front_id is not None else row.attempts:
        text = "a trainer ended at this request, so it runs alone, when nothing else of the base runs"
        return WaitReason.SUSPECT_ALONE, text, since, None
    return WaitReason.TURN, "it may run and waits for its turn among the tenants' work", since, None


def _of_unplaced(row: Row[Any], facts: WaitFacts) -> _Found:
    trainers = facts.processes[row.base_model].trainers
    since = row.placed_at or _front_since(row)
    if not trainers:
        text = f"no trainer of {row.base_model} is there; the work is kept until one comes"
        return WaitReason.NO_TRAINER, text, since, None
    if all(one.drained_at is not None for one in trainers):
        text = (
            f"the operator has drained the trainers of {row.base_model}; the work is kept until one takes models again"
        )
        return WaitReason.NO_TRAINER, text, since, None
    return WaitReason.NOT_PLACED, "a trainer is about to take the model", since, None


def _lost(row: Row[Any], facts: WaitFacts, settings: Settings) -> _Found | None:
    """Return the wait for a trainer whose lease is over, or that has missed renewals; None for one that is heard of."""
    ends, lease = row.trainer_expires_at, settings.lease
    if ends is None or ends <= facts.now:
        text = "the model's trainer has ended; another takes the model over"
        if not facts.processes[row.base_model].trainers:
            text = f"the model's trainer has ended, and no other of {row.base_model} is there; the work is kept"
        return WaitReason.TRAINER_LOST, text, (ends or _front_since(row)), None
    if ends - facts.now < lease / _LATE:
        heard = ends - lease
        text = (
            f"the model's trainer is not heard of; another takes the model over {_seconds(ends - facts.now)} from now"
        )
        return WaitReason.TRAINER_LOST, text, heard, ends
    return None


def _is_brought_back(row: Row[Any]) -> bool:
    """Return whether all that was done was done under earlier leases, and the adapter has not been brought back since."""
    if row.rebuilt_at is not None or row.claimed_at is None or row.before_finished_at is None:
        return False
    return bool(row.before_finished_at < row.claimed_at)


def _is_after(moment: datetime, other: datetime | None) -> bool:
    return other is None or moment > other


def _front_since(row: Row[Any]) -> datetime:
    """Return since when the operation that runs next might run: it has come, and the one before it has ended."""
    came: datetime = row.front_created_at or row.created_at
    return came if row.before_finished_at is None else max(came, row.before_finished_at)


def _seconds(time: timedelta) -> str:
    return f"{max(0.0, time.total_seconds()):.0f} s"
