"""A pool of two replicas on scripted servers: operators' directives, and a version that one of the two cannot load."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from contracts.base_model import BaseModelFacts, read_base_model_facts
from contracts.errors import EngineFailure, Unavailable, WeftError
from contracts.ids import CheckpointId, RunId
from engine.sampling.replica import AdapterVersion, SamplerReplica
from engine.sampling.vllm.replica import VllmReplica
from engine.sampling.vllm.settings import VllmReplicaSettings
from store.clock import utc_now
from tenants.replica_directives import ReplicaDirective, StandingDirective
from tests.engine.sampling.conftest import QWEN_TARGETS, make_adapter
from tests.engine.sampling.vllm.scripted import SERVED, ScriptedServer, scripted_server
from workers.sampling.open_attempts import OpenAttempts
from workers.sampling.publishing import prepare, withdraw
from workers.sampling.replica_pool import ReplicaPool, _ReplicaWatch
from workers.sampling.router import Affinity, Router

SECONDS = 60.0
CAT, DOG = RunId("cat:train:0"), RunId("dog:train:0")


@dataclass
class Source:
    """A replica on a server that is already there."""

    settings: VllmReplicaSettings

    @property
    def name(self) -> str:
        return self.settings.name

    async def start(self) -> SamplerReplica:
        made = VllmReplica(self.settings)
        await made.start()
        return made

    async def stop(self) -> None:
        """Nothing to end."""


@dataclass
class TwoReplicas:
    """``a`` and ``b``, and what operators want of them."""

    pool: ReplicaPool
    servers: dict[str, ScriptedServer]
    directives: dict[str, StandingDirective] = field(default_factory=dict)

    @property
    def router(self) -> Router:
        return self.pool.router

    def chosen(self) -> set[str]:
        """Return the replicas of many sessions' samples."""
        found = (self.router.choose(Affinity(f"session {number}"), None) for number in range(20))
        return {routed.name for routed in found if routed is not None}

    def direct(self, name: str, directive: ReplicaDirective) -> None:
        self.directives[name] = StandingDirective(name, directive, None, utc_now())

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while not reached():
                await self.router.wait_for_change()


@pytest.fixture
async def two(tiny_model_dir: Path, tmp_path: Path) -> AsyncIterator[TwoReplicas]:
    async with AsyncExitStack() as stack:
        servers = {name: await stack.enter_async_context(scripted_server()) for name in ("a", "b")}
        directives: dict[str, StandingDirective] = {}
        facts = replace(read_base_model_facts(SERVED, tiny_model_dir, None), context_length=64)
        pool = pool_of(servers, directives, facts, tmp_path)
        await pool.start()
        yield TwoReplicas(pool, servers, directives)
        await pool.close()


def pool_of(
    servers: dict[str, ScriptedServer], directives: dict[str, StandingDirective], facts: BaseModelFacts, folder: Path
) -> ReplicaPool:
    settings = [
        VllmReplicaSettings(
            name=name,
            base_url=server.base_url,
            served_model=SERVED,
            base=facts,
            zero_adapter=folder / f"zero-{name}",
            max_lora_rank=8,
            max_loras=4,
            max_resident=4,
        )
        for name, server in servers.items()
    ]

    async def read() -> dict[str, StandingDirective]:
        return dict(directives)

    return ReplicaPool(Router(), [Source(one) for one in settings], read)


@pytest.fixture
def new(tiny_model_dir: Path, tmp_path: Path) -> AdapterVersion:
    """A version that servers have not seen."""
    version = make_adapter(tiny_model_dir, tmp_path / "new", "new", 1, 8, QWEN_TARGETS[:2]).version
    assert version is not None
    return version


async def test_a_drained_replica_gets_no_new_samples_and_the_other_all(two: TwoReplicas) -> None:
    assert two.chosen() == {"a", "b"}
    two.direct("a", ReplicaDirective.DRAIN)
    await two.until(lambda: two.chosen() == {"b"})
    two.directives.clear()
    await two.until(lambda: two.chosen() == {"a", "b"})
    assert two.servers["a"].operated == two.servers["b"].operated == []


async def test_a_replica_sleeps_when_nothing_is_left_on_it_and_works_once_it_is_awake(two: TwoReplicas) -> None:
    asleep = two.router.find("a")
    assert asleep is not None
    two.router.hold(asleep, None, None, sequences=1)
    two.direct("a", ReplicaDirective.SLEEP)
    await two.until(lambda: two.chosen() == {"b"})
    assert two.servers["a"].operated == []
    two.router.release(asleep, 1)
    await two.until(lambda: asleep.is_asleep)
    two.directives.clear()
    await two.until(lambda: two.chosen() == {"a", "b"})
    assert two.servers["a"].operated == ["/sleep", "/wake_up"]
    assert two.servers["b"].operated == []


async def test_a_replica_that_refuses_to_sleep_is_told_apart_from_one_that_falls_asleep(two: TwoReplicas) -> None:
    two.servers["a"].operate_answers = [404]
    two.direct("a", ReplicaDirective.SLEEP)
    awake, other = two.router.find("a"), two.router.find("b")
    assert awake is not None
    assert other is not None
    await two.until(lambda: awake.cannot_sleep)
    assert (two.chosen(), other.cannot_sleep) == ({"b"}, False)
    two.directives.clear()
    await two.until(lambda: two.chosen() == {"a", "b"})
    assert not awake.cannot_sleep
    assert two.servers["b"].operated == []


async def test_a_sleep_whose_answer_was_lost_is_ended_all_the_same(two: TwoReplicas) -> None:
    two.servers["a"].operate_answers = [500]
    two.direct("a", ReplicaDirective.SLEEP)
    await two.until(lambda: bool(two.servers["a"].operated))
    two.directives.clear()
    await two.until(lambda: two.chosen() == {"a", "b"})
    assert two.servers["a"].operated[-1] == "/wake_up"


async def test_directives_hold_from_the_start_and_a_sleeping_server_can_start(
    two: TwoReplicas, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Replicas after a restart of weft, which has put one to sleep and drained the other."""
    two.servers["a"].sleeps = True
    two.direct("b", ReplicaDirective.DRAIN)
    facts = replace(read_base_model_facts(SERVED, tiny_model_dir, None), context_length=64)
    again = pool_of(two.servers, two.directives, facts, tmp_path / "again")
    await again.start()
    assert two.servers["a"].operated == ["/wake_up"]
    assert {again.router.choose(Affinity(str(number)), None) for number in range(20)} == {again.router.find("a")}
    await again.close()


async def test_a_version_that_one_of_two_cannot_load_is_on_neither(two: TwoReplicas, new: AdapterVersion) -> None:
    for routed in two.router.replicas:
        routed.note("an old version", CAT)
    two.servers["b"].load_answers = [500]
    with pytest.raises(WeftError):
        await prepare(two.router, CAT, CheckpointId(new.name), new.directory)
    for name in ("a", "b"):
        routed = two.router.find(name)
        assert routed is not None
        assert new.name not in (await routed.replica.health()).adapters
        assert new.name not in routed.adapters
    await prepare(two.router, CAT, CheckpointId(new.name), new.directory)
    for routed in two.router.replicas:
        assert new.name in (await routed.replica.health()).adapters


async def test_a_version_is_loaded_only_where_its_run_is_sampled(two: TwoReplicas, new: AdapterVersion) -> None:
    sampled, other = two.router.replicas
    sampled.note("an old version", CAT)
    other.note("another's version", DOG)
    await prepare(two.router, CAT, CheckpointId(new.name), new.directory)
    assert (await sampled.replica.health()).adapters == (new.name,)
    assert (await other.replica.health()).adapters == ()


def _misses_a_look(router: Router) -> None:
    for routed in router.replicas:
        router.mark(routed, is_alive=False)
        router.mark(routed, is_alive=True)


def _is_asked_for_many_versions(router: Router) -> None:
    for routed in router.replicas:
        for number in range(300):
            routed.note(f"later {number}", DOG)


@pytest.mark.parametrize("forgets", [_misses_a_look, _is_asked_for_many_versions])
async def test_a_withdrawn_version_is_unloaded_from_every_replica_that_has_it_loaded(
    two: TwoReplicas, new: AdapterVersion, forgets: Callable[[Router], None]
) -> None:
    """The router has forgotten the version. A server that never had it is asked nothing, and another run's version stays."""
    has_it, other = two.router.replicas
    beside = replace(new, name="another's version")
    has_it.note("an old version", CAT)
    await prepare(two.router, CAT, CheckpointId(new.name), new.directory)
    await has_it.replica.load(beside)
    forgets(two.router)
    assert new.name not in has_it.adapters
    await withdraw(two.router, OpenAttempts(two.router, None), CheckpointId(new.name))  # type: ignore[arg-type]
    assert (await has_it.replica.health()).adapters == (beside.name,)
    assert {name: server.unloads for name, server in two.servers.items()} == {has_it.name: 1, other.name: 0}


@dataclass
class AwaySource(Source):
    """A source whose server is away at first."""

    is_away: bool = True
    starts: int = 0

    async def start(self) -> SamplerReplica:
        self.starts += 1
        if self.is_away:
            raise EngineFailure("the server is away")
        return await Source.start(self)


@pytest.fixture
def away(two: TwoReplicas) -> AwaySource:
    """A third replica beside the two, on a server of theirs."""
    (source, *_) = two.pool._sources
    assert isinstance(source, Source)
    return AwaySource(replace(source.settings, name="c"))


async def test_a_replica_that_was_away_for_days_comes_back(two: TwoReplicas, away: AwaySource) -> None:
    async def none() -> dict[str, StandingDirective]:
        return {}

    watch = _ReplicaWatch(away, two.router, none, None)
    for _ in range(2000):
        await watch._look()
    assert two.chosen() == {"a", "b"}
    away.is_away = False
    await watch._look()
    assert two.chosen() == {"a", "b", "c"}
    await two.router.find("c").replica.close()


async def test_a_replica_is_not_started_in_vain_while_the_database_is_away(two: TwoReplicas, away: AwaySource) -> None:
    is_read = False

    async def read() -> dict[str, StandingDirective]:
        if not is_read:
            raise Unavailable("the database is away")
        return {}

    away.is_away = False
    watch = _ReplicaWatch(away, two.router, read, None)
    for _ in range(5):
        await watch._look()
    assert (away.starts, two.chosen()) == (0, {"a", "b"})
    is_read = True
    await watch._look()
    assert (away.starts, two.chosen()) == (1, {"a", "b", "c"})
    await two.router.find("c").replica.close()
