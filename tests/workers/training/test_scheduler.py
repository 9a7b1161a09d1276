"""The scheduler: order, budget, work conservation, and the bounds that its module states, against adversaries."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.ids import RequestId, RunId, TenantId
from contracts.service_class import FACTORS, ServiceClass
from contracts.turn_bounds import QUANTA_PER_PASS, Queue, least_tokens, passes_until_served
from engine.round_robin import Fairness
from engine.weighted_order import Tags
from workers.training.scheduler import (
    PassPlan,
    Piece,
    QueuedPass,
    parts_by_length,
    plan_pass,
)

checked = settings(max_examples=100)

ROUNDING = 1 + 1e-9
SHARES = st.sampled_from([0.1, 0.5, 1.0, 1.0, 1.0, 2.0, 16.0])


@dataclass
class Service:
    """A trainer that computes every pass at once. Operations arrive between passes."""

    token_budget: int
    shares: Mapping[TenantId, float] = field(default_factory=dict)
    queue: list[QueuedPass] = field(default_factory=list)
    fairness: Fairness = field(default_factory=Fairness)
    tags: Mapping[TenantId, Tags] = field(default_factory=dict)
    accepted: int = 0
    part: float = 1.0
    """Part of the token budget that the next pass has."""

    def accept(self, tenant: str, run: str, lengths: Sequence[int], *, weight: float = 1.0) -> QueuedPass:
        """Queue an operation and return its id, which is its number."""
        id, of_run = RequestId(str(self.accepted)), RunId(f"{tenant}:{run}")
        new = QueuedPass(id, of_run, TenantId(tenant), lengths, weight)
        self.accepted += 1
        self.queue.append(new)
        return new

    def plan(self) -> PassPlan:
        """Return the next pass without computing it."""
        full = budget = self.token_budget
        if self.part < 1:
            budget = max(least_tokens(full), int(self.part * full))
        return plan_pass(
            self.queue, self.fairness, shares=self.shares, token_budget=budget, full_budget=full, tags=self.tags
        )

    def step(self) -> dict[TenantId, int]:
        """Compute the next pass and return the tokens that each tenant was served."""
        plan = self.plan()
        sequences = pieces(plan)
        served: dict[TenantId, int] = {}
        left = []
        for queued in self.queue:
            count = sequences.get(queued.id, 0)
            served[queued.tenant] = served.get(queued.tenant, 0) + sum(queued.lengths[:count])
            if count < len(queued.lengths):
                left.append(replace(queued, lengths=queued.lengths[count:]))
        self.queue = left
        self.fairness, self.tags = plan.fairness, plan.tags
        return served

    def quantum(self, tenant: TenantId) -> float:
        """Return the tokens of one turn of the tenant."""
        return self.shares.get(tenant, 1.0) * self.token_budget / QUANTA_PER_PASS

    def busy(self) -> set[TenantId]:
        """Return the tenants with work."""
        return {queued.tenant for queued in self.queue}


def pieces(plan: PassPlan) -> dict[str, int]:
    """Return the plan's number of sequences by operation."""
    return {piece.id: piece.sequences for piece in plan.pieces}


def run_heads(queue: Iterable[QueuedPass]) -> dict[RunId, QueuedPass]:
    """Return the oldest operation of every run."""
    heads: dict[RunId, QueuedPass] = {}
    for queued in queue:
        heads.setdefault(queued.run, queued)
    return heads


def sequence_lengths(token_budget: int) -> st.SearchStrategy[int]:
    """Draw lengths around every limit that a pass has, up to three passes long."""
    limits = [1, max(token_budget // 16, 1), token_budget // 2 + 1, token_budget - 1, token_budget]
    return st.sampled_from(limits) | st.integers(1, token_budget) | st.integers(token_budget + 1, 3 * token_budget)


@dataclass
class Flood:
    """Tenants whose queues never run dry: each has three operations, of lengths that repeat."""

    service: Service
    patterns: Mapping[str, Sequence[int]]
    runs: int

    def refill(self, paused: Iterable[str] = ()) -> None:
        """Top up the queues of all tenants that do not pause."""
        for tenant, operations in (dict.fromkeys(self.patterns, 3) | dict.fromkeys(paused, 0)).items():
            while sum(queued.tenant == tenant for queued in self.service.queue) < operations:
                self.service.accept(tenant, str(self.service.accepted % self.runs), self.patterns[tenant])

    def longest(self) -> int:
        """Return the tokens of the longest sequence."""
        return max(max(pattern) for pattern in self.patterns.values())


@st.composite
def floods(draw: st.DrawFn, *, backlogged: bool = False) -> Flood:
    """Draw a flood. ``backlogged``: no pass empties a queue."""
    budget = draw(st.sampled_from([16, 100, 1000]))
    shares = draw(st.lists(SHARES, min_size=2, max_size=6))
    lengths = sequence_lengths(budget)
    patterns = {}
    for place in range(len(shares)):
        pattern = draw(st.lists(lengths, min_size=1, max_size=4))
        repeats = math.ceil(budget / sum(pattern)) if backlogged else 1
        patterns[f"flood{place}"] = pattern * repeats
    service = Service(budget, {TenantId(name): share for name, share in zip(patterns, shares, strict=True)})
    return Flood(service, patterns, runs=draw(st.integers(1, 3)))


@dataclass
class Workload:
    """Operations that arrive before each of the first passes: tenant, run and lengths."""

    service: Service
    arrivals: Sequence[Sequence[tuple[str, str, Sequence[int]]]]

    def plans(self) -> Iterator[PassPlan]:
        """Yield every pass before it is computed, until no work is left."""
        number = 0
        while number < len(self.arrivals) or self.service.queue:
            for arrival in self.arrivals[number] if number < len(self.arrivals) else ():
                self.service.accept(*arrival)
            yield self.service.plan()
            number += 1


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Draw the work of up to four tenants of two runs each."""
    budget = draw(st.sampled_from([16, 100, 1000, 16384]))
    tenants = ["a", "b", "c", "d"]
    shares = {TenantId(tenant): draw(SHARES) for tenant in tenants[1:]}
    lengths = st.lists(sequence_lengths(budget), min_size=1, max_size=5)
    arrival = st.tuples(st.sampled_from(tenants), st.sampled_from(["0", "1"]), lengths)
    return Workload(Service(budget, shares), draw(st.lists(st.lists(arrival, max_size=5), min_size=1, max_size=6)))


@checked
@given(workloads())
def test_runs_keep_their_order_and_nothing_is_lost_or_doubled(workload: Workload) -> None:
    service = workload.service
    computed = 0
    for plan in workload.plans():
        left = {queued.id: queued for queued in service.queue}
        for piece in plan.pieces:
            queued = left[piece.id]
            assert run_heads(left.values())[queued.run] is queued
            assert 1 <= piece.sequences <= len(queued.lengths)
            if piece.sequences == len(queued.lengths):
                del left[piece.id]
        computed += sum(service.step().values())
    assert computed == sum(sum(lengths) for arrivals in workload.arrivals for _, _, lengths in arrivals)


@checked
@given(workloads())
def test_the_budget_is_kept_and_no_room_is_left_for_the_longest_sequence(workload: Workload) -> None:
    service = workload.service
    for plan in workload.plans():
        assert bool(plan.pieces) == bool(service.queue)
        numbers = [int(piece.id) for piece in plan.pieces]
        assert numbers == sorted(set(numbers))
        if plan.tokens > service.token_budget:
            assert [piece.sequences for piece in plan.pieces] == [1]
        assert sum(service.step().values()) == plan.tokens
        if service.queue:
            longest = max(max(queued.lengths) for queued in service.queue)
            assert plan.tokens + longest > service.token_budget


@checked
@given(workloads())
def test_equal_inputs_give_equal_plans_and_stay_as_they_are(workload: Workload) -> None:
    service = workload.service
    for plan in workload.plans():
        queue, memory = list(service.queue), service.fairness
        again = Fairness(dict(memory.deficits), memory.turn)
        shares = dict(reversed(list(service.shares.items())))
        assert plan_pass(queue, again, shares=shares, token_budget=service.token_budget) == plan
        assert (service.queue, memory) == (queue, again)
        service.step()


@checked
@given(
    floods(),
    st.lists(st.integers(0, 5), max_size=12),
    st.lists(st.sampled_from([0.0, 0.4, 1.0]), min_size=1, max_size=6),
)
def test_every_sequence_is_served_within_the_bound_under_a_flood(
    flood: Flood, pauses: list[int], parts: list[float]
) -> None:
    """Tenants also come and go: ``pauses`` names the one whose queue is not topped up before a pass. Passes differ in size."""
    service = flood.service
    due: dict[RequestId, int] = {}
    for number in range(40):
        service.part = parts[number % len(parts)]
        flood.refill(f"flood{place}" for place in pauses[number : number + 1])
        ahead = dict.fromkeys(service.shares, 0)
        for queued in service.queue:
            ahead[queued.tenant] += sum(queued.lengths)
            if queued.id not in due:
                others = [share for tenant, share in service.shares.items() if tenant != queued.tenant]
                mine = Queue(service.shares[queued.tenant], others, ahead[queued.tenant], flood.longest())
                due[queued.id] = number + passes_until_served(mine, service.token_budget)
        service.step()
        for queued in service.queue:
            assert number + 1 < due[queued.id]


@checked
@given(st.lists(st.sampled_from([*FACTORS.values()]), min_size=1, max_size=5), st.sampled_from([100, 1000]))
def test_batch_work_goes_on_beside_interactive_work_that_never_ends(classes: list[float], budget: int) -> None:
    """Within the bound, however many tenants of whatever class are beside it; each gets tokens by its factor."""
    batch = FACTORS[ServiceClass.BATCH]
    shares = {
        TenantId(f"t{place}"): factor for place, factor in enumerate([*classes, FACTORS[ServiceClass.INTERACTIVE]])
    }
    service = Service(budget, {**shares, TenantId("batch"): batch})
    flood = Flood(service, {name: [budget // 10] * 20 for name in [*shares, "batch"]}, runs=2)
    served: dict[str, int] = dict.fromkeys([*shares, "batch"], 0)
    longest, waited = budget // 10, 0
    most = passes_until_served(Queue(batch, [*shares.values()], longest, longest), budget)
    for _ in range(120):
        flood.refill()
        got = service.step()
        waited = 0 if got.get(TenantId("batch")) else waited + 1
        assert waited <= most
        for tenant, tokens in got.items():
            served[tenant] += tokens
    for tenant, share in shares.items():
        gap = abs(served[tenant] / share - served["batch"] / batch)
        assert gap <= (3 * budget / QUANTA_PER_PASS + longest / share + longest / batch) * ROUNDING


@checked
@given(floods(), st.integers(1, 12))
def test_one_light_sequence_is_in_the_next_pass_or_the_one_after(flood: Flood, passes_before: int) -> None:
    service = flood.service
    service.token_budget = 32 * QUANTA_PER_PASS
    for _ in range(passes_before):
        flood.refill()
        service.step()
    flood.refill()
    light = service.accept("light", "0", [32])
    for _ in range(2):
        service.step()
        flood.refill()
    assert light not in service.queue


@checked
@given(floods(backlogged=True))
def test_backlogged_tenants_get_tokens_by_their_shares(flood: Flood) -> None:
    """The bound over any passes: ``3 * B / 16 + L / s + L / s'``."""
    service = flood.service
    passes: list[dict[TenantId, int]] = []
    for _ in range(25):
        flood.refill()
        passes.append(service.step())
    for one, other in itertools.combinations(service.shares, 2):
        slack = sum(max(flood.patterns[tenant]) / service.shares[tenant] for tenant in (one, other))
        gaps = [0.0]
        for tokens in passes:
            gaps.append(gaps[-1] + tokens[one] / service.shares[one] - tokens[other] / service.shares[other])
        assert max(gaps) - min(gaps) <= (3 * service.token_budget / QUANTA_PER_PASS + slack) * ROUNDING


@checked
@given(floods(backlogged=True), st.lists(st.integers(0, 63), min_size=25, max_size=25))
def test_idle_tenants_gain_no_credit(flood: Flood, pauses: list[int]) -> None:
    """A tenant that comes and goes gets no more than ``flood0``, which always has work, by the same bound."""
    service = flood.service
    steady = TenantId("flood0")
    ahead = {tenant: [0.0] for tenant in service.shares}
    for pause in pauses:
        flood.refill(f"flood{place}" for place in range(1, 6) if pause >> place & 1)
        tokens = service.step()
        for tenant, share in service.shares.items():
            gained = tokens.get(tenant, 0) / share - tokens[steady] / service.shares[steady]
            ahead[tenant].append(ahead[tenant][-1] + gained)
            slack = flood.longest() * (1 / share + 1 / service.shares[steady])
            lead = ahead[tenant][-1] - min(ahead[tenant])
            assert lead <= (3 * service.token_budget / QUANTA_PER_PASS + slack) * ROUNDING
        for tenant in service.shares.keys() - service.busy():
            assert service.fairness.deficits.get(tenant, 0.0) <= service.quantum(tenant)


@checked
@given(workloads())
def test_parts_hold_every_piece_once_by_length_and_keep_each_run_in_order(workload: Workload) -> None:
    service = workload.service
    for plan in workload.plans():
        operations = {queued.id: queued for queued in service.queue}
        parts = parts_by_length(plan.pieces, service.queue)
        runs = [[operations[piece.id].run for piece in part] for part in parts]
        assert all(set(one).isdisjoint(other) for one, other in itertools.combinations(runs, 2))
        for run in {operations[piece.id].run for piece in plan.pieces}:
            mine = [piece for piece in plan.pieces if operations[piece.id].run == run]
            assert [piece for part in parts for piece in part if operations[piece.id].run == run] == mine
        longest = [max(max(operations[piece.id].lengths[: piece.sequences]) for piece in part) for part in parts]
        assert longest == sorted(longest)
        assert len(longest) <= 1 + math.log2(max(longest, default=1))
        service.step()


def test_short_sequences_do_not_wait_for_long_ones_of_the_same_pass() -> None:
    service = Service(1000)
    service.accept("flood", "0", [400])
    service.accept("light", "0", [30])
    service.accept("light", "1", [50])
    plan = service.plan()
    assert parts_by_length(plan.pieces, service.queue) == [[Piece("1", 1), Piece("2", 1)], [Piece("0", 1)]]


def test_an_empty_queue_gives_an_empty_pass_and_forgets() -> None:
    memory = Fairness({TenantId("a"): 3.0}, (TenantId("a"),))
    assert plan_pass([], memory, shares={}, token_budget=16) == PassPlan((), 0, Fairness())


def test_passes_are_divided_by_shares_however_much_one_tenant_has_queued() -> None:
    service = Service(1600, {TenantId("large"): 3.0})
    for _ in range(50):
        service.accept("flood", "0", [10] * 100)
    service.accept("small", "0", [10] * 1000)
    service.accept("large", "0", [10] * 1000)
    passes = [service.step() for _ in range(5)]
    assert passes[0] == {"flood": 400, "small": 300, "large": 900}
    totals = {tenant: sum(served[TenantId(tenant)] for served in passes) for tenant in ("flood", "small", "large")}
    assert totals == {"flood": 1600, "small": 1600, "large": 4800}


def test_a_sequence_longer_than_the_budget_goes_alone() -> None:
    service = Service(100)
    service.accept("a", "0", [250, 10])
    service.accept("a", "1", [10])
    assert service.step() == {"a": 250}
    assert service.step() == {"a": 20}


def test_the_next_pass_starts_with_what_did_not_fit() -> None:
    service = Service(100)
    service.accept("a", "0", [60, 60, 1])
    assert pieces(service.plan()) == {"0": 1}
    service.step()
    service.accept("joining", "0", [50])
    assert pieces(service.plan()) == {"0": 2}


def test_the_smallest_share_costs_no_time() -> None:
    """Millions of turns pass before the tenant's deficit covers the sequence."""
    service = Service(16, {TenantId("a"): 1e-9, TenantId("b"): 1e-6})
    service.accept("a", "0", [1000])
    service.accept("b", "0", [10**6])
    assert service.step() == {"a": 1000, "b": 0}
    assert service.step() == {"b": 10**6}


@pytest.mark.parametrize(
    ("lengths", "share", "token_budget", "message"),
    [
        ([1], 0.0, 16, "not above 0"),
        ([1], -1.0, 16, "not above 0"),
        ([1], math.nan, 16, "not above 0"),
        ([1], 1.0, 0, "holds nothing"),
        ([], 1.0, 16, "no sequences left"),
    ],
)
def test_what_cannot_be_planned_is_refused(lengths: list[int], share: float, token_budget: int, message: str) -> None:
    service = Service(token_budget, {TenantId("a"): share})
    service.accept("a", "0", lengths)
    with pytest.raises(ValueError, match=message):
        service.plan()
