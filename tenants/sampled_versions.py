"""Versions that samplers sample now: what a dispatch reads, and holds until its transaction ends."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import and_, bindparam, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import NotFound
from contracts.ids import CheckpointId, RunId, TenantId
from store.batcher import few_lengths
from store.clock import Clock
from store.tables import Checkpoint, Sampler
from tenants.samplers import Staleness, SwapPolicy, gone_checkpoint, missing_sampler, staleness_of, swap_policy_of


@dataclass(frozen=True, slots=True)
class SampledVersion:
    """Version that a sampler samples now. ``checkpoint`` None means the bare base.

    ``is_live``: the sampler follows its run's newest version. ``publications``: how many versions it has followed.
    ``directory``: the version's folder, relative to the data folder. ``run`` is None for another tenant's checkpoint, too.
    ``swap_policy``: the sampler's own, None if it has none.
    """

    checkpoint: CheckpointId | None
    run: RunId | None
    directory: str | None
    is_live: bool
    publications: int
    staleness: Staleness | None
    swap_policy: SwapPolicy | None = None


_IS_UNEXPIRED = or_(Checkpoint.expires_at.is_(None), Checkpoint.expires_at > bindparam("now"))
_SAMPLERS = select(
    Sampler.id,
    Sampler.tenant_id,
    Sampler.checkpoint_id,
    Sampler.live_run_id,
    Sampler.publications,
    Sampler.max_version_lag,
    Sampler.on_stale,
    Sampler.swap_policy,
).where(Sampler.id.in_(bindparam("ids", expanding=True)))
_SAMPLERS_LOCKED = _SAMPLERS.order_by(Sampler.id).with_for_update(read=True, skip_locked=True)
_CHECKPOINTS = select(
    Checkpoint.id, Checkpoint.tenant_id, Checkpoint.run_id, Checkpoint.directory, Checkpoint.public
).where(Checkpoint.id.in_(bindparam("ids", expanding=True)), _IS_UNEXPIRED)
_FOLLOWED = _SAMPLERS.add_columns(Checkpoint.run_id, Checkpoint.directory).join(
    Checkpoint, and_(Checkpoint.id == Sampler.checkpoint_id, Checkpoint.tenant_id == Sampler.tenant_id, _IS_UNEXPIRED)
)


async def sampled_versions(
    session: AsyncSession, asked: Sequence[tuple[TenantId, str]], clock: Clock
) -> list[SampledVersion | NotFound]:
    """Return for each (tenant, sampler) the version that it samples now, in order.

    ``NotFound`` stands for an unknown sampler, or one whose checkpoint was deleted or has expired.
    """
    return await _versions_of(session, asked, clock, await _samplers_of(session, asked, _SAMPLERS))


async def held_versions(
    transaction: AsyncSession, asked: Sequence[tuple[TenantId, str]], clock: Clock
) -> list[SampledVersion | NotFound | None]:
    """Return as ``sampled_versions`` does, and lock the samplers: no version is published to them before the transaction ends.

    None stands for a sampler that another transaction has locked. It is not waited for.
    """
    held = await _samplers_of(transaction, asked, _SAMPLERS_LOCKED)
    found: list[SampledVersion | NotFound | None] = [*await _versions_of(transaction, asked, clock, held)]
    missing = [key for key in asked if key not in held]
    locked = await _samplers_of(transaction, missing, _SAMPLERS) if missing else {}
    return [None if key in locked.keys() - held.keys() else version for key, version in zip(asked, found, strict=True)]


async def _samplers_of(
    session: AsyncSession, asked: Sequence[tuple[TenantId, str]], statement: Any
) -> dict[tuple[str, str], Any]:
    rows = await session.execute(statement, {"ids": few_lengths(sorted({sampler for _, sampler in asked}))})
    return {(row.tenant_id, row.id): row for row in rows}


async def _versions_of(
    session: AsyncSession, asked: Sequence[tuple[TenantId, str]], clock: Clock, found: Mapping[tuple[str, str], Any]
) -> list[SampledVersion | NotFound]:
    # Two queries, not a join: a sampler that was locked may be newer than what a join's snapshot shows of the other table.
    drawn = sorted({row.checkpoint_id for row in found.values() if row.checkpoint_id is not None})
    checkpoints = {}
    if drawn:
        rows = await session.execute(_CHECKPOINTS, {"ids": few_lengths(drawn), "now": clock()})
        checkpoints = {row.id: row for row in rows}
    return [_sampled(row, checkpoints) if (row := found.get(key)) else missing_sampler(key[1]) for key in asked]


def _sampled(sampler: Any, checkpoints: Mapping[str, Any]) -> SampledVersion | NotFound:
    if sampler.checkpoint_id is None:
        return SampledVersion(None, None, None, is_live=False, publications=0, staleness=None)
    checkpoint = checkpoints.get(sampler.checkpoint_id)
    if checkpoint is None:
        return gone_checkpoint()
    if checkpoint.tenant_id == sampler.tenant_id:
        return _version_of(sampler, checkpoint)
    # Without the run: its gates are its tenant's, who would otherwise pause the samples of others and wait for them.
    return replace(_version_of(sampler, checkpoint), run=None) if checkpoint.public else gone_checkpoint()


def _version_of(sampler: Any, checkpoint: Any) -> SampledVersion:
    return SampledVersion(
        checkpoint=CheckpointId(sampler.checkpoint_id),
        run=RunId(checkpoint.run_id),
        directory=checkpoint.directory,
        is_live=sampler.live_run_id is not None,
        publications=sampler.publications,
        staleness=staleness_of(sampler),
        swap_policy=swap_policy_of(sampler),
    )


async def versions_followed(
    session: AsyncSession, samplers: Collection[str], clock: Clock
) -> dict[str, SampledVersion]:
    """Return the version that each sampler samples now, leaving out the bare base and versions that are gone."""
    rows = await session.execute(_FOLLOWED, {"ids": few_lengths(sorted(set(samplers))), "now": clock()})
    return {row.id: _version_of(row, row) for row in rows}
