"""Choice of the sequences in the next fused pass: deficit round robin by tokens between tenants.

The tenants with work stand in a circle that keeps its order. In its turn a tenant takes sequences, oldest operation
first, while its deficit covers them. When the deficit does not cover the next sequence, the turn ends and the quantum of
the tenant's next turn is added (Shreedhar and Varghese 1996, "Efficient Fair Queuing Using Deficit Round-Robin"). A
sequence that is covered but does not fit into the rest of the pass ends the pass, and the next pass starts with that
sequence. A tenant without work leaves the circle when its turn comes.
A tenant that joins enters at the front, so light work does not wait behind a flood. No tenant gains by leaving and coming
back: its old place stays taken until the circle reaches it.

Passes are planned one after another, though several may be under way at once. Each has a token budget of its own.

Bounds, for a pass of B tokens, sequences of at most L tokens, and a tenant of share s with the quantum Q = s * B / 16;
n other tenants have work meanwhile, whose shares add up to S:

- Waiting: with T tokens of its tenant up to and including it, in order of acceptance, a sequence is served within
  2 + 2 * ((K + 1) * S / 16 + (n * L + T) / B) passes, K = ceil(T / Q). Proof: K turns cover T. To each of these turns
  another tenant has one turn of its quantum, and one more if it joins, and less than L saved up. Two passes in a row
  serve more than B tokens, because the second pass starts with the sequence that the first could not hold.
- Joining: a tenant new in the circle whose work is within Q and B is served in the next pass or the one after, unless
  others that join at the same time use up the room: only one sequence goes before them.
- Fairness: over any passes through which two tenants of shares s and s' have work, the tokens served to each, divided by its
  share, differ by less than 3 * B / 16 + L / s + L / s'.
- Work: a pass is never empty while there is work, and leaves less than L of its budget unused unless it took all there was.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from contracts.ids import RequestId, RunId, TenantId

QUANTA_PER_PASS = 16
"""Turns of a tenant of share 1 that fill a pass: many enough that a pass serves many tenants, few enough that a turn is a
handful of sequences."""

LENGTH_RATIO = 2
"""Longest to shortest length in one part of a pass, at most."""


@dataclass(frozen=True, slots=True)
class QueuedPass:
    """A ``forward`` or ``forward_backward`` operation that may run now, or the part of one that is still to compute.

    ``lengths`` are the tokens of each sequence still to compute, in order: never empty, each at least 1.
    """

    id: RequestId
    run: RunId
    tenant: TenantId
    lengths: Sequence[int]


@dataclass(frozen=True, slots=True)
class Piece:
    """The next ``sequences`` sequences of an operation, which go into the pass."""

    id: RequestId
    sequences: int


def _nothing() -> Mapping[TenantId, float]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Fairness:
    """State of the scheduler between passes, immutable. ``Fairness()`` is the beginning.

    ``deficits`` are the tokens each tenant may take in its next turn, or in the rest of the turn under way.
    ``turn`` is the circle, beginning with the tenant whose turn it is.
    """

    deficits: Mapping[TenantId, float] = field(default_factory=_nothing)
    turn: tuple[TenantId, ...] = ()


@dataclass(frozen=True, slots=True)
class PassPlan:
    """The next pass: at most one piece of each operation, in order of acceptance, and the sum of the pieces' tokens."""

    pieces: tuple[Piece, ...]
    tokens: int
    fairness: Fairness


def plan_pass(
    queue: Sequence[QueuedPass], fairness: Fairness, *, shares: Mapping[TenantId, float], token_budget: int
) -> PassPlan:
    """Choose the sequences of the next pass: at least one while there is work.

    ``queue`` is in order of acceptance, except that each run's operations are in order of ``seq_id``. ``shares`` are the
    tenants' weights; a tenant that is missing has 1.0. The pass holds at most ``token_budget`` tokens, or one longer sequence
    alone. Raises ``ValueError`` for a share that is not above 0, a budget below 1 and an operation without sequences.
    """
    _check(queue, shares, token_budget)
    if not queue:
        return PassPlan((), 0, Fairness())
    circle = _circle(queue, fairness, shares, token_budget)
    taken = dict.fromkeys((operation.id for operation in queue), 0)
    tokens = _go_round(circle, taken, token_budget)
    return PassPlan(
        pieces=tuple(Piece(operation, sequences) for operation, sequences in taken.items() if sequences),
        tokens=tokens,
        fairness=Fairness(
            deficits=MappingProxyType({account.tenant: account.deficit for account in circle}),
            turn=tuple(account.tenant for account in circle),
        ),
    )


def parts_by_length(pieces: Sequence[Piece], queue: Sequence[QueuedPass]) -> list[list[Piece]]:
    """Split a pass into parts that are computed one after another, short sequences first.

    Long and short sequences go into different micro-batches anyway, so short sequences need not wait for long ones. A
    part holds runs whose longest sequences differ by at most the factor ``LENGTH_RATIO``. Pieces of one run stay in one
    part, in order.
    """
    operations = {operation.id: operation for operation in queue}
    longest: dict[RunId, int] = {}
    for piece in pieces:
        operation = operations[piece.id]
        length = max(operation.lengths[: piece.sequences])
        longest[operation.run] = max(longest.get(operation.run, 0), length)
    parts: list[list[Piece]] = []
    shortest = 0
    for piece in sorted(pieces, key=lambda piece: longest[operations[piece.id].run]):
        length = longest[operations[piece.id].run]
        if not parts or length > LENGTH_RATIO * shortest:
            parts.append([])
            shortest = length
        parts[-1].append(piece)
    return parts


@dataclass(slots=True)
class _Account:
    """A tenant's deficit while a pass is planned, and its sequences: operation and length."""

    tenant: TenantId
    quantum: float
    deficit: float
    sequences: deque[tuple[RequestId, int]] = field(default_factory=deque)

    def end_turns(self, turns: int) -> None:
        """Add the quanta of the next turns. The deficit of a tenant without sequences is cut to one quantum."""
        self.deficit = self.deficit + turns * self.quantum if self.sequences else self.quantum

    def turns_missing(self) -> int:
        """Return the number of turns until the deficit covers the next sequence."""
        return math.ceil((self.sequences[0][1] - self.deficit) / self.quantum)


def _check(queue: Sequence[QueuedPass], shares: Mapping[TenantId, float], token_budget: int) -> None:
    if token_budget < 1:
        raise ValueError(f"a pass of {token_budget} tokens holds nothing")
    for tenant, share in shares.items():
        if not share > 0:
            raise ValueError(f"tenant {tenant}: share {share} is not above 0")
    for operation in queue:
        if not operation.lengths:
            raise ValueError(f"operation {operation.id} has no sequences left")


def _circle(
    queue: Iterable[QueuedPass], fairness: Fairness, shares: Mapping[TenantId, float], token_budget: int
) -> deque[_Account]:
    """Return an account for each tenant in the order of turns; tenants that join now come first."""
    joining = dict.fromkeys(operation.tenant for operation in queue)
    for tenant in fairness.turn:
        joining.pop(tenant, None)
    accounts: dict[TenantId, _Account] = {}
    for tenant in (*joining, *fairness.turn):
        quantum = shares.get(tenant, 1.0) * token_budget / QUANTA_PER_PASS
        accounts[tenant] = _Account(tenant, quantum, fairness.deficits.get(tenant, quantum))
    for operation in queue:
        accounts[operation.tenant].sequences.extend((operation.id, length) for length in operation.lengths)
    return deque(accounts.values())


def _go_round(circle: deque[_Account], taken: dict[RequestId, int], token_budget: int) -> int:
    """Turn the circle until a covered sequence does not fit or no sequence is left. Return the tokens taken."""
    tokens = fruitless = 0
    left = sum(len(account.sequences) for account in circle)
    while left:
        account = circle[0]
        if not account.sequences:
            circle.popleft()
            continue
        fruitless += 1
        while account.sequences and account.sequences[0][1] <= account.deficit:
            operation, length = account.sequences[0]
            if tokens and tokens + length > token_budget:
                return tokens
            account.sequences.popleft()
            account.deficit -= length
            taken[operation] += 1
            tokens += length
            left -= 1
            fruitless = 0
        account.end_turns(1)
        circle.rotate(-1)
        if fruitless >= len(circle):
            _pass_over_fruitless_rounds(circle)
            fruitless = 0
    return tokens


def _pass_over_fruitless_rounds(circle: Iterable[_Account]) -> None:
    """Skip the rounds in which no deficit covers a sequence, at once, however small the quanta are."""
    working = [account for account in circle if account.sequences]
    rounds = min(account.turns_missing() for account in working)
    for account in working:
        account.end_turns(max(rounds, 0))
