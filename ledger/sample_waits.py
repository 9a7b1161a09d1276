"""Reasons of pending samples, from the facts of ``ledger.wait_facts``."""

from datetime import datetime
from typing import Any

from sqlalchemy import Row

from contracts.waiting import Wait, WaitReason
from ledger.training_waits import held, over
from ledger.wait_facts import WaitFacts
from store.tables import PoolState

_SPARE_PART = 9
"""A ninth of a pool's room is kept for tenants that come."""
_SUSPECT = "a process died when it drew this sample, so it is drawn apart from others"


def wait_of_sample(row: Row[Any], facts: WaitFacts) -> Wait:
    """Return why the sample has not ended."""
    if row.suspended_at is not None:
        return held(row)
    if (hold := facts.holds.get(row.id)) is not None:
        return over(row, hold)
    reason, text, since, until = _found(row, facts)
    return Wait(reason, text, cause=reason, since=since, until=until)


def _found(row: Row[Any], facts: WaitFacts) -> tuple[WaitReason, str, datetime, datetime | None]:
    if row.replica is not None:
        return WaitReason.RUNNING, "a replica draws it, or loads its adapter first", row.drawn_since, None
    gates = (
        (
            f"sampling from model {row.sampled_run} is paused",
            row.run_mode,
            row.run_since,
            row.run_expires_at,
            row.run_reason,
        ),
        (
            f"sampling from {row.base_model} is paused by the operator",
            row.pool_mode,
            row.pool_since,
            row.pool_expires_at,
            row.pool_reason,
        ),
    )
    for text, mode, since, expires_at, reason in gates:
        if mode is not None and (expires_at is None or expires_at > facts.now):
            until = "" if expires_at is None else f" until {expires_at:%Y-%m-%d %H:%M:%S} UTC"
            told = f": {reason}" if reason else ""
            return WaitReason.GATE_PAUSED, f"{text} ({mode}){until}{told}", max(since, row.created_at), expires_at
    if row.taken_by is not None:
        return (*_claimed(row), row.created_at, None)
    return (*_unclaimed(row, facts), row.created_at, None)


def _claimed(row: Row[Any]) -> tuple[WaitReason, str]:
    if row.attempts:
        return WaitReason.SUSPECT_ALONE, _SUSPECT
    text = "a sampling process has it, and sends it to a replica once no change of its sampler or its gate is under way"
    return WaitReason.CLAIMED, text


def _unclaimed(row: Row[Any], facts: WaitFacts) -> tuple[WaitReason, str]:
    processes = facts.processes[row.base_model]
    states = {pool.pool_state for pool in processes.pools}
    if PoolState.WORKING not in states:
        if PoolState.DRAINED in states:
            return (
                WaitReason.DRAINED,
                f"the operator has drained the replicas of {row.base_model}; the sample begins when one takes work again",
            )
        if states:
            return (
                WaitReason.NO_REPLICA,
                f"no replica of {row.base_model} answers; one may be starting, and the sample begins when one takes work",
            )
        return (
            WaitReason.NO_REPLICA,
            f"no sampling process of {row.base_model} answers; the sample begins when one does",
        )
    if row.attempts:
        return WaitReason.SUSPECT_ALONE, _SUSPECT
    room = processes.room
    if room is not None and processes.claimed >= room - room // _SPARE_PART:
        text = "the sampling processes hold as many samples as they have room for; this one begins when some end"
        return WaitReason.NO_ROOM, text
    return WaitReason.TURN, "it may be drawn and waits for its turn among the tenants' samples"
