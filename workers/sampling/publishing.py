"""Loads a run's new adapter version on the replicas before samplers follow it, and unloads one before its folder is removed."""

import asyncio
import logging
from pathlib import Path

from contracts.errors import EngineFailure
from contracts.ids import CheckpointId, RunId
from engine.sampling.replica import AdapterVersion
from tenants.shares import WeighedTenant
from workers.sampling.open_attempts import OpenAttempts
from workers.sampling.router import Router

log = logging.getLogger(__name__)


async def prepare(
    router: Router, run: RunId, version: CheckpointId, directory: Path, owner: WeighedTenant | None = None
) -> None:
    """Load a version beside the old one on every replica that samples the run, without a pause, in the turns of its owner.

    Raises ``WeftError`` when a live replica cannot load the version. No replica keeps the version then.
    """
    wanted = AdapterVersion(name=version, directory=directory)
    replicas = [routed for routed in router.replicas if routed.takes_work and run in routed.adapters.values()]
    name, share = (owner.id, owner.share) if owner is not None else ("", 1.0)
    loads = (routed.replica.load(wanted, owner=name, share=share) for routed in replicas)
    ends = await asyncio.gather(*loads, return_exceptions=True)
    loaded = [routed for routed, end in zip(replicas, ends, strict=True) if end is None]
    for routed, end in zip(replicas, ends, strict=True):
        if end is None:
            continue
        await router.check(routed)
        # A replica that is gone has no version loaded, and gets no sample before it is started again.
        if routed.is_alive:
            await asyncio.gather(*(other.replica.unload(version) for other in loaded), return_exceptions=True)
            raise end
    for routed in loaded:
        routed.note(version, run)


async def withdraw(router: Router, attempts: OpenAttempts, version: CheckpointId) -> None:
    """Unload a version from every replica, unless an attempt uses it. Called before its folder is removed; waits for no sample.

    A vLLM server dies of a listed adapter without a folder. Raises ``EngineFailure`` when an attempt uses the version or a
    living replica keeps it.
    """
    if any(attempt.uses(version) for attempt in attempts):
        raise EngineFailure("samples draw from it")
    for routed in list(router.replicas):
        # The router's memory of versions does not tell: it is bounded, and cleared when a replica answers again.
        try:
            await routed.replica.unload(version)
        except EngineFailure as failure:
            log.warning("replica=%s could not forget version=%s: %s", routed.name, version, failure.message)
            await router.check(routed)
            # A replica that is gone reads nothing, and has no version loaded when it is started again.
            if routed.is_alive:
                raise
