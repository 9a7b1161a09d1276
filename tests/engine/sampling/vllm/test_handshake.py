"""The handshake with a real vLLM server: passed by a sound one, and refused by name where one projection is misserved."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from contracts.errors import EngineFailure
from engine.sampling.replica import SamplerReplica
from engine.sampling.vllm.replica import VllmReplica
from engine.sampling.vllm.settings import VllmReplicaSettings
from tenants.replica_directives import StandingDirective
from tests.engine.sampling.drawing import GREEDY, Client
from tests.engine.sampling.handshakes import handshake, shake_hands
from tests.engine.sampling.vllm.conftest import assert_greedy
from tests.engine.sampling.vllm.misserving_proxy import misserving_proxy
from workers.base_forward import BaseForward
from workers.sampling.replica_pool import ReplicaPool
from workers.sampling.router import Router

PROMPT = [72, 101, 108, 108, 111]
SOON = 60.0
"""Seconds that a handshake with a warm server may take on a busy machine; measured: 0.4."""


class Source:
    """A replica on a server that is already there."""

    def __init__(self, settings: VllmReplicaSettings, forward: BaseForward) -> None:
        self.settings, self.forward = settings, forward

    @property
    def name(self) -> str:
        return self.settings.name

    async def start(self) -> SamplerReplica:
        replica = VllmReplica(self.settings, self.forward)
        await replica.start()
        return replica

    async def stop(self) -> None:
        """Nothing to end."""


async def no_directives() -> Mapping[str, StandingDirective]:
    return {}


async def test_a_sound_server_passes_beside_a_running_sample(client: Client, world: Any, tmp_path: Path) -> None:
    async with handshake(world, tmp_path) as made:
        neighbour = client.start(PROMPT, world.cat, replace(GREEDY, max_tokens=200))
        await neighbour.reached(1)
        began = monotonic()
        await shake_hands(client.replica, made)
        assert monotonic() - began < SOON
        assert_greedy((await neighbour.end()).only, world.cat, PROMPT)


@pytest.mark.parametrize("projection", ["o_proj", "lm_head"])
async def test_a_replica_that_misserves_a_projection_gets_no_work(
    client: Client, settings: VllmReplicaSettings, world: Any, tmp_path: Path, projection: str
) -> None:
    """A sound neighbour on the same server is not disturbed."""
    forward, router = BaseForward(world.base), Router()
    async with (
        misserving_proxy(settings.base_url, projection, tmp_path / "misserved") as url,
        handshake(world, tmp_path / "handshakes") as made,
    ):
        neighbour = client.start(PROMPT, world.cat, replace(GREEDY, max_tokens=200))
        await neighbour.reached(1)
        source = Source(replace(settings, name="faulty", base_url=url), forward)
        with pytest.raises(EngineFailure, match=f"{projection} is off by") as refused:
            await ReplicaPool(router, [source], no_directives, made).start()
        assert router.replicas == []
        assert_greedy((await neighbour.end()).only, world.cat, PROMPT)
    assert refused.value.message.count("is off by") == 1
    assert "tolerance: 0.001" in refused.value.message
    await forward.close()
