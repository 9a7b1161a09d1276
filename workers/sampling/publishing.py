"""A new version of a run goes to the replicas before samplers follow it."""

import asyncio
from pathlib import Path

from contracts.ids import CheckpointId, RunId
from engine.sampling.replica import AdapterVersion
from workers.sampling.router import Router


async def prepare(router: Router, run: RunId, version: CheckpointId, directory: Path) -> None:
    """Load a version beside the old one wherever the run is sampled, without a pause.

    Raises ``WeftError`` when one replica cannot: then none has it.
    """
    wanted = AdapterVersion(name=version, directory=directory)
    replicas = [routed for routed in router.replicas if routed.takes_work and run in routed.adapters.values()]
    ends = await asyncio.gather(*(routed.replica.load(wanted) for routed in replicas), return_exceptions=True)
    loaded = [routed for routed, end in zip(replicas, ends, strict=True) if end is None]
    for routed, end in zip(replicas, ends, strict=True):
        if end is None:
            continue
        await router.check(routed)
        # One that is gone has nothing, and gets nothing before it is started again.
        if routed.is_alive:
            await asyncio.gather(*(other.replica.unload(version) for other in loaded), return_exceptions=True)
            raise end
    for routed in loaded:
        routed.note(version, run)
