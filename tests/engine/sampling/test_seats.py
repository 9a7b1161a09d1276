"""Seats of a replica or a pool: the order by tokens, and the room that is always left for a tenant that comes."""

from collections import Counter, deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.turn_bounds import SAMPLE_QUANTUM, Queue, tokens_before
from engine.round_robin import Fairness
from engine.sampling.seats import Seats, hand_out

checked = settings(max_examples=60, derandomize=True)
SHARES = st.sampled_from([0.25, 1.0, 1.0, 1.0, 2.0, 8.0])


@dataclass(frozen=True)
class Item:
    """Something that waits for a seat."""

    tenant: str
    cost: int


@dataclass
class Hall:
    """Seats with tenants whose items hold a seat until the test ends them."""

    seats: Seats
    shares: dict[str, float]
    waiting: dict[str, deque[Item]] = field(default_factory=dict)
    sitting: deque[Item] = field(default_factory=deque)
    fairness: Fairness = field(default_factory=Fairness)
    served: Counter[str] = field(default_factory=Counter)

    def add(self, tenant: str, cost: int) -> None:
        """Have an item wait."""
        self.waiting.setdefault(tenant, deque()).append(Item(tenant, cost))

    def hand_out(self) -> list[Item]:
        """Hand out what is free."""
        held = Counter(item.tenant for item in self.sitting)
        given, self.fairness = hand_out(
            {tenant: queue for tenant, queue in self.waiting.items() if queue},
            held,
            self.fairness,
            seats=self.seats,
            shares=self.shares,
        )
        for item in given:
            assert self.waiting[item.tenant].popleft() is item
            self.sitting.append(item)
            self.served[item.tenant] += item.cost
        assert len(self.sitting) <= self.seats.total
        return given


@checked
@given(st.integers(1, 40), st.integers(1, 3000), st.sampled_from([0.01, 0.5, 1.0, 10.0]))
def test_one_tenant_alone_gets_every_seat_but_the_spare_ones(seats: int, cost: int, share: float) -> None:
    """A small share counts beside others only."""
    hall = Hall(Seats.of(seats), {"flood": share})
    for _ in range(3 * seats):
        hall.add("flood", cost)
    assert len(hall.hand_out()) == seats
    assert hall.hand_out() == []
    assert Seats.within(seats).total == seats


@checked
@given(st.integers(1, 40), st.lists(st.integers(1, 3000), min_size=1, max_size=4), st.integers(1, 100_000))
def test_a_tenant_that_comes_beside_a_flood_sits_at_once(seats: int, costs: list[int], light: int) -> None:
    hall = Hall(Seats.of(seats), {})
    for number in range(4 * seats):
        hall.add("flood", costs[number % len(costs)])
    hall.hand_out()
    hall.add("light", light)
    assert [item.tenant for item in hall.hand_out()] == ["light"]


@checked
@given(
    st.integers(1, 12),
    st.lists(st.tuples(SHARES, st.lists(st.integers(1, 5000), min_size=1, max_size=3)), min_size=2, max_size=5),
    st.integers(0, 200),
    st.integers(30, 200),
)
def test_tokens_of_tenants_with_work_differ_by_less_than_the_bound_over_any_window(
    seats: int, tenants: list[tuple[float, list[int]]], begin: int, length: int
) -> None:
    """Without spare seats nobody is put off, so the bound of ``engine.round_robin`` holds as it stands."""
    shares = {f"t{place}": share for place, (share, _) in enumerate(tenants)}
    hall = Hall(Seats(seats, 0), shares)
    costs = {f"t{place}": pattern for place, (_, pattern) in enumerate(tenants)}
    before: Counter[str] = Counter()
    for turn in range(begin + length):
        if turn == begin:
            before = Counter(hall.served)
        for tenant, pattern in costs.items():
            while len(hall.waiting.get(tenant, ())) < seats + 1:
                hall.add(tenant, pattern[turn % len(pattern)])
        hall.hand_out()
        hall.sitting.popleft()
    longest = max(max(pattern) for pattern in costs.values())
    rates = {tenant: (hall.served[tenant] - before[tenant]) / shares[tenant] for tenant in shares}
    for one in shares:
        for other in shares:
            bound = 3 * SAMPLE_QUANTUM + longest / shares[one] + longest / shares[other]
            assert abs(rates[one] - rates[other]) < bound


@checked
@given(
    st.integers(1, 12),
    st.lists(st.tuples(SHARES, st.lists(st.integers(1, 5000), min_size=1, max_size=3)), min_size=1, max_size=4),
    st.lists(st.integers(1, 5000), min_size=1, max_size=6),
    SHARES,
    st.integers(0, 100),
)
def test_no_more_tokens_of_others_go_before_an_item_than_the_bound_that_is_told(
    seats: int, others: list[tuple[float, list[int]]], mine: list[int], share: float, begin: int
) -> None:
    """The tenant comes beside floods with several items, and is told the bound of its last one."""
    shares = {f"t{place}": one for place, (one, _) in enumerate(others)} | {"late": share}
    costs = {f"t{place}": pattern for place, (_, pattern) in enumerate(others)}
    hall = Hall(Seats(seats, 0), shares)

    def turn(number: int) -> None:
        for tenant, pattern in costs.items():
            while len(hall.waiting.get(tenant, ())) < seats + 1:
                hall.add(tenant, pattern[number % len(pattern)])
        hall.hand_out()
        hall.sitting.popleft()

    for number in range(begin):
        turn(number)
    for cost in mine:
        hall.add("late", cost)
    longest = max(max(pattern) for pattern in [mine, *costs.values()])
    queue = Queue(share, [one for one, _ in others], sum(mine), longest)
    before = sum(hall.served.values())
    while hall.served["late"] < sum(mine):
        assert sum(hall.served.values()) - hall.served["late"] - before <= tokens_before(queue, SAMPLE_QUANTUM)
        turn(begin)


def test_floods_come_to_hold_the_seats_by_their_shares() -> None:
    hall = Hall(Seats.of(64), {"half": 0.5})
    for tenant in ("first", "half", "second"):
        for _ in range(3000):
            hall.add(tenant, 100)
        for _ in range(50):
            hall.hand_out()
            hall.sitting.popleft()
    for _ in range(1000):
        hall.hand_out()
        hall.sitting.popleft()
    held = Counter(item.tenant for item in hall.sitting)
    assert 0.8 <= held["first"] / held["second"] <= 1.25
    assert 0.4 <= held["half"] / held["first"] <= 0.65


def test_what_was_not_used_is_given_back() -> None:
    """Tenants that ask for much and use little get as many tokens as those that ask for what they use."""
    hall = Hall(Seats(4, 0), {})
    used: Counter[str] = Counter()
    for _ in range(4000):
        for tenant, asked in (("modest", 50), ("careful", 4000)):
            while len(hall.waiting.get(tenant, ())) < 5:
                hall.add(tenant, asked)
        hall.hand_out()
        done = hall.sitting.popleft()
        used[done.tenant] += 50
        hall.fairness = hall.fairness.credit(done.tenant, done.cost - 50)
    assert 0.8 <= used["modest"] / used["careful"] <= 1.25
