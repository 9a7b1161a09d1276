"""Weights of a tenant's runs among themselves, and what is told of a wait: held by the scheduler's own functions and a clock."""

import random
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.turn_bounds import Queue, expected_tokens, own_tokens_before, passes_until_served
from engine.weighted_order import in_weighted_order, tags_now
from tests.workers.training.test_scheduler import Service, pieces

ROUNDING = 1 + 1e-9
checked = settings(max_examples=30)
WEIGHTS = st.sampled_from([0.25, 0.5, 1.0, 1.0, 2.0, 3.0, 10.0])


@dataclass
class Runs:
    """Tenants whose runs have always two operations in the queue, each of the lengths that its run has."""

    service: Service
    weights: dict[str, dict[str, float]]
    lengths: dict[str, list[int]]
    served: Counter[str] = field(default_factory=Counter)

    def step(self) -> dict[str, int]:
        """Fill up the queue and compute one pass; return the tokens of each tenant."""
        for tenant, runs in self.weights.items():
            for run, weight in runs.items():
                name = f"{tenant}:{run}"
                while sum(one.run == name for one in self.service.queue) < 2:
                    self.service.accept(tenant, run, self.lengths.get(name, [40] * 20), weight=weight)
        known = {one.id: one for one in self.service.queue}
        for id, count in pieces(self.service.plan()).items():
            operation = known[id]  # type: ignore[index]
            self.served[operation.run] += sum(operation.lengths[:count])
        return {str(tenant): tokens for tenant, tokens in self.service.step().items()}


def test_two_runs_of_weights_three_and_one_get_three_to_one_and_a_neighbour_what_it_had() -> None:
    weights = {"cats": {"eval": 3.0, "sweep": 1.0}, "dogs": {"a": 1.0, "b": 1.0}}
    plain = {tenant: dict.fromkeys(runs, 1.0) for tenant, runs in weights.items()}
    weighted, without = Runs(Service(1000), weights, {}), Runs(Service(1000), plain, {})
    for _ in range(100):
        assert weighted.step() == without.step()
        assert abs(weighted.served["cats:eval"] / 3 - weighted.served["cats:sweep"]) < 40 / 3 + 40
    assert weighted.served["dogs:a"] == without.served["dogs:a"]
    assert without.served["cats:eval"] == pytest.approx(without.served["cats:sweep"], abs=1600)


@checked
@given(
    st.lists(st.tuples(WEIGHTS, st.lists(st.integers(1, 300), min_size=1, max_size=4)), min_size=2, max_size=5),
    st.integers(0, 3),
)
def test_runs_with_work_are_served_by_their_weights_within_the_bound(
    runs: list[tuple[float, list[int]]], others: int
) -> None:
    weights = {str(number): weight for number, (weight, _) in enumerate(runs)}
    # More than a pass holds, so that no run ever is without work.
    lengths = {f"cats:{number}": pattern * (400 // sum(pattern) + 1) for number, (_, pattern) in enumerate(runs)}
    world = Runs(Service(400), {"cats": weights, **{f"dogs{number}": {"a": 1.0} for number in range(others)}}, lengths)
    longest = max(max(pattern) for pattern in lengths.values())
    for _ in range(30):
        world.step()
        if set(weights.values()) == {1.0}:
            continue
        for one, weight in weights.items():
            for other, beside in weights.items():
                apart = world.served[f"cats:{one}"] / weight - world.served[f"cats:{other}"] / beside
                assert abs(apart) <= (longest / weight + longest / beside) * ROUNDING


def test_a_new_weight_is_in_force_in_the_next_pass() -> None:
    world = Runs(Service(400), {"cats": {"a": 1.0, "b": 1.0}}, {})
    for _ in range(5):
        world.step()
    world.service.queue.clear()
    world.weights["cats"]["a"] = 9.0
    world.served.clear()
    world.step()
    assert (world.served["cats:a"], world.served["cats:b"]) == (360, 40)


def test_a_run_gains_nothing_by_leaving_and_coming_back() -> None:
    """A run that pauses every other pass never gets more beside a neighbour than its weight says."""
    world = Runs(Service(400), {"cats": {"steady": 2.0, "leaves": 1.0}}, {})
    for number in range(40):
        world.weights["cats"] = {"steady": 2.0} | ({"leaves": 1.0} if number % 2 else {})
        world.service.queue = [one for one in world.service.queue if one.run.endswith("steady") or number % 2]
        before = Counter(world.served)
        world.step()
        if number % 2:
            got = {run: world.served[run] - before[run] for run in ("cats:steady", "cats:leaves")}
            assert got["cats:leaves"] <= got["cats:steady"] / 2 + 40 * 1.5


def test_a_run_that_comes_as_another_leaves_begins_with_those_that_are_there() -> None:
    """The run that left was behind: what it had not taken is nobody's head start."""
    there, comes = SimpleNamespace(run="there", cost=40), SimpleNamespace(run="comes", cost=40)
    tags = tags_now([comes, there], {"left": 0.0, "there": 160.0})
    assert tags == {"there": 160.0, "comes": 160.0}
    drawn = in_weighted_order([comes, comes, there, there], tags, {})
    assert [one.run for one in drawn] == ["comes", "there", "comes", "there"]


# --- what is told of a wait -------------------------------------------------------------------------------------------

QUEUES = 1000


@dataclass(frozen=True)
class Told:
    """Wait that was told of an operation, and the one that it had."""

    bound: int
    passes: int
    eta: float
    seconds: float


def measured(seed: int) -> Told:
    """Return both waits of a random operation in a random queue. A pass takes as long as its tokens."""
    draw = random.Random(seed)
    budget = draw.choice([256, 1024, 4096])
    tenants = [f"t{number}" for number in range(draw.randint(1, 12))]
    service = Service(budget, {name: draw.choice([0.25, 1.0, 1.0, 4.0]) for name in tenants})  # type: ignore[misc]
    weights = {
        (name, run): draw.choice([1.0, 3.0]) if name == "t0" and seed % 2 else 1.0 for name in tenants for run in "ab"
    }
    for _ in range(draw.randint(1, 60)):
        name, run = draw.choice(tenants), draw.choice("ab")
        sizes = [draw.randint(1, budget // 4) for _ in range(draw.randint(1, 8))]
        service.accept(name, run, sizes, weight=weights[name, run])
    for _ in range(draw.randint(0, 3)):
        # The circle is under way when the operation is asked about.
        if sum(sum(one.lengths) for one in service.queue) > 2 * budget:
            service.step()
    asked = draw.choice([one for one in service.queue if one.tenant == "t0"] or service.queue)
    queue, own_waiting, others = looked_at(service, asked)
    until = expected_tokens(
        queue,
        others_rounded=1 << max(0, others - 1).bit_length() if others else 0,
        own_waiting=own_waiting,
        pass_tokens=budget,
    )
    clock, passes = 0, 0
    while any(one.id == asked.id for one in service.queue):
        clock += sum(service.step().values())
        passes += 1
    return Told(passes_until_served(queue, budget), passes, until, clock)


def looked_at(service: Service, asked) -> tuple[Queue, int, int]:
    """Return what ``ledger.wait_ahead`` finds for the operation in the queue, and its tenant's and the others' tokens."""
    own = [one for one in service.queue if one.tenant == asked.tenant]
    number = int(asked.id)
    before = [one for one in own if int(one.id) <= number]
    tokens = sum(sum(one.lengths) for one in before)
    if any(one.weight != 1 for one in own):
        beside = {one.run for one in own} - {asked.run}
        runs = [
            (
                next(one.weight for one in own if one.run == run),
                max(sum(one.lengths) for one in own if one.run == run),
            )
            for run in sorted(beside)
        ]
        tokens = own_tokens_before(sum(sum(one.lengths) for one in before if one.run == asked.run), asked.weight, runs)
    waiting = Counter({one.tenant: 0 for one in service.queue})
    for one in service.queue:
        waiting[one.tenant] += sum(one.lengths)
    shares = [service.shares[name] for name in waiting if name != asked.tenant]
    longest = max(sum(one.lengths) for one in service.queue)
    queue = Queue(service.shares[asked.tenant], shares, tokens, longest)
    return queue, waiting[asked.tenant], sum(waiting.values()) - waiting[asked.tenant]


def test_no_wait_is_longer_than_its_bound_and_four_of_five_are_as_long_as_told_within_a_factor_of_two() -> None:
    told = [measured(seed) for seed in range(QUEUES)]
    assert [one for one in told if one.passes > one.bound] == []
    near = sum(one.seconds / 2 <= one.eta <= 2 * one.seconds for one in told)
    assert near >= 0.8 * QUEUES, near
