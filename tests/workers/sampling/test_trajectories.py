"""Homes of trajectories: every turn of a conversation is sent to the replica that has its prefix."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from contracts.base_model import read_base_model_facts
from contracts.ids import RequestId, TenantId
from contracts.ledger_records import ReadyOperation
from contracts.operations import OperationKind, SampleRequest
from engine.sampling.vllm.replica import VllmReplica
from engine.sampling.vllm.settings import VllmReplicaSettings
from workers.sampling.router import HOME_SEQUENCES, Router, affinity_of

BASE = "weft/tiny"
CAT, DOG = TenantId("cat"), TenantId("dog")
KEYS = [f"conversation {number}" for number in range(64)]
REPLICAS = ("a", "b", "c", "d")


def turn(tenant: TenantId, key: str | None, *, lane: str = "session:sample:0") -> ReadyOperation:
    """A sample of a trajectory."""
    sample = SampleRequest(np.array([1, 2]), trajectory=key)
    return ReadyOperation(RequestId("r"), 1, tenant, lane, 0, OperationKind.SAMPLE, sample, 2)


@pytest.fixture
def fresh(tiny_model_dir: Path, tmp_path: Path) -> Router:
    """A router over four replicas that are never started: it says nothing to them."""
    facts = read_base_model_facts(BASE, tiny_model_dir, None)
    settings = [
        VllmReplicaSettings(
            name=name,
            base_url="http://127.0.0.1:9",
            served_model=BASE,
            base=facts,
            zero_adapter=tmp_path / "zero",
            max_lora_rank=8,
            max_loras=4,
            max_resident=4,
        )
        for name in REPLICAS
    ]
    return Router([VllmReplica(one) for one in settings])


def home(router: Router, operation: ReadyOperation, adapter: str | None = None) -> str:
    """The name of the replica that the sample is sent to."""
    routed = router.choose(affinity_of(operation), adapter)
    assert routed is not None
    return routed.name


def test_turns_keep_their_home_whatever_session_they_come_by(fresh: Router) -> None:
    homes = {key: home(fresh, turn(CAT, key)) for key in KEYS}
    for number in range(8):
        assert {key: home(fresh, turn(CAT, key, lane=f"other:sample:{number}")) for key in KEYS} == homes
    spread = Counter(homes.values())
    assert set(spread) == set(REPLICAS)
    assert max(spread.values()) < len(KEYS) / 2


def test_a_key_is_its_tenants_own(fresh: Router) -> None:
    """Two tenants' equal keys have nothing to do with each other, and neither has a sampling session of that name."""
    homes = [[home(fresh, turn(tenant, key)) for key in KEYS] for tenant in (CAT, DOG)]
    assert homes[0] != homes[1]
    keys = {affinity_of(turn(tenant, key)).key for tenant in (CAT, DOG) for key in KEYS}
    keys |= {affinity_of(turn(tenant, None, lane=key)).key for tenant in (CAT, DOG) for key in KEYS}
    assert len(keys) == 3 * len(KEYS)


def test_a_full_home_sends_turns_to_one_other_replica_and_takes_them_back(fresh: Router) -> None:
    at_home = home(fresh, turn(CAT, KEYS[0]))
    routed = fresh.find(at_home)
    assert routed is not None
    fresh.hold(routed, None, None, HOME_SEQUENCES - 1)
    assert home(fresh, turn(CAT, KEYS[0])) == at_home
    fresh.hold(routed, None, None, 1)
    away = {home(fresh, turn(CAT, KEYS[0], lane=lane)) for lane in ("x", "y", "z")}
    assert len(away) == 1
    assert at_home not in away
    fresh.release(routed, HOME_SEQUENCES)
    assert home(fresh, turn(CAT, KEYS[0])) == at_home


def test_a_home_that_is_away_has_one_stand_in_and_other_trajectories_stay(fresh: Router) -> None:
    homes = {key: home(fresh, turn(CAT, key)) for key in KEYS}
    lost = fresh.find("a")
    assert lost is not None
    fresh.drain(lost, is_draining=True)
    moved = {key: home(fresh, turn(CAT, key)) for key in KEYS}
    assert {key for key in KEYS if moved[key] != homes[key]} == {key for key in KEYS if homes[key] == "a"}
    assert {key: home(fresh, turn(CAT, key)) for key in KEYS} == moved
    fresh.drain(lost, is_draining=False)
    assert {key: home(fresh, turn(CAT, key)) for key in KEYS} == homes


def test_a_prefix_is_worth_more_than_a_loaded_adapter(fresh: Router) -> None:
    """A session without a key goes where its adapter is; a trajectory goes home and has the adapter loaded there."""
    holder = fresh.find("b")
    assert holder is not None
    holder.note("version", None)
    assert {home(fresh, turn(CAT, None, lane=key), "version") for key in KEYS} == {"b"}
    assert {home(fresh, turn(CAT, key), "version") for key in KEYS} == set(REPLICAS)


def test_a_sample_that_fails_tries_the_replicas_in_turn(fresh: Router) -> None:
    """Replicas where it has not failed come first, then the one where it failed longest ago. A neighbour keeps its home."""
    mine, beside = affinity_of(turn(CAT, "mine")), affinity_of(turn(DOG, "beside"))
    neighbours = fresh.choose(beside, None)
    tried: list[str] = []
    for _ in range(2 * len(REPLICAS)):
        routed = fresh.choose(mine, None, tried[-len(REPLICAS) :])
        assert routed is not None
        tried.append(routed.name)
    assert set(tried[: len(REPLICAS)]) == set(REPLICAS)
    assert tried[len(REPLICAS) :] == tried[: len(REPLICAS)]
    assert fresh.choose(beside, None) is neighbours
