"""A worker as one rank of a ``torchrun`` group: rank 0 is the trainer, the other ranks compute what it sends."""

import asyncio
import logging
import os
import signal

from contracts.base_model import BaseModelFacts
from contracts.errors import InvalidRequest
from engine.model.base import BaseModel
from engine.training.executors.group import TrainerGroup, is_group
from store.settings import Settings

log = logging.getLogger(__name__)


async def join_group(settings: Settings, bases: int) -> TrainerGroup | None:
    """Return the group of which this process is a rank, once all ranks are there; None without ``torchrun``.

    Raises ``InvalidRequest`` when the group has more than one base to train, ``GroupLost`` when ranks are missing.
    """
    if not is_group():
        return None
    if bases != 1:
        raise InvalidRequest(f"a group of ranks trains one base model, {bases} are set: start a group for each")
    log.info("rank %s waits for the other ranks of %s", os.environ["RANK"], os.environ["WORLD_SIZE"])
    return await asyncio.to_thread(TrainerGroup.join, device=settings.device)


def load_base(facts: BaseModelFacts, settings: Settings, group: TrainerGroup | None) -> BaseModel:
    """Load the base, or this rank's part of it. Blocking. Raises ``InvalidRequest`` when it cannot be loaded."""
    log.info("loading base model %s", facts.name)
    if group is None:
        return BaseModel.load(
            facts,
            dtype=settings.base_dtype,
            device=settings.device,
            gradient_checkpointing=settings.gradient_checkpointing,
        )
    return group.load_base(facts, dtype=settings.base_dtype, gradient_checkpointing=settings.gradient_checkpointing)


async def follow(group: TrainerGroup, facts: BaseModelFacts, settings: Settings) -> None:
    """Compute what rank 0 sends until it closes the group. Raises ``GroupLost`` when rank 0 is gone."""
    # ``torchrun`` signals all ranks. Rank 0 still needs the others to finish its pass, then tells them to end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    await asyncio.to_thread(load_base, facts, settings, group)
    log.info("rank %d of %d computes for rank 0", group.rank, group.size)
    await asyncio.to_thread(group.follow)
