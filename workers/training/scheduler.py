"""Choice of the sequences in the next fused pass: deficit round robin by tokens between tenants.

``engine.round_robin`` has the rule. A sequence that is covered but does not fit into the rest of the pass ends the pass, and
the next pass starts with that sequence.

Passes are planned one after another, though several may be under way at once. Each has a token budget of its own: B tokens,
or down to B / 4 where a pass of B would take too long (``engine.piece_size``). The quanta stay those of B.

Bounds, for sequences of at most L tokens, and a tenant of share s with the quantum Q = s * B / 16; n other tenants have work
meanwhile, whose shares add up to S:

- Waiting: with T tokens of its tenant up to and including it, in order of acceptance, a sequence is served within
  2 + 8 * ((K + 1) * S / 16 + (n * L + T) / B) passes, K = ceil(T / Q). Proof: K turns cover T. To each of these turns
  another tenant has one turn of its quantum, and one more if it joins, and less than L saved up. Two passes in a row
  serve more than B / 4 tokens, because the second pass starts with the sequence that the first could not hold.
- Joining: a tenant new in the circle whose work is within Q and B / 4 is served in the next pass or the one after, unless
  others that join at the same time use up the room: only one sequence goes before them.
- Fairness: over any passes through which two tenants of shares s and s' have work, the tokens served to each, divided by its
  share, differ by less than 3 * B / 16 + L / s + L / s'.
- Runs of a tenant: where it gives them weights, its sequences go in the order of ``engine.weighted_order`` instead of the order
  of acceptance. Over any passes through which two of its runs of weights w and w' have work, the tokens served to each,
  divided by its weight, differ by less than L / w + L / w'. Which of a tenant's sequences is next changes nothing for other
  tenants but where a turn ends: their bounds hold as they are. What is before a sequence of its own tenant is then at most
  ``contracts.turn_bounds.own_tokens_before``.
- Work: a pass is never empty while there is work, and leaves less than L of its budget unused unless it took all there was.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from contracts.ids import RequestId, RunId, TenantId
from contracts.turn_bounds import QUANTA_PER_PASS
from engine.round_robin import Fairness, Verdict, take_turns
from engine.weighted_order import Tags, in_weighted_order, tags_after, tags_now

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
    weight: float = 1.0
    """Weight of the run among the runs of its tenant."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The next ``sequences`` sequences of an operation, which go into the pass."""

    id: RequestId
    sequences: int


@dataclass(frozen=True, slots=True)
class PassPlan:
    """The next pass: at most one piece of each operation, in order of acceptance, and the sum of the pieces' tokens."""

    pieces: tuple[Piece, ...]
    tokens: int
    fairness: Fairness
    tags: Mapping[TenantId, Tags] = field(default_factory=dict)
    """Tags of the runs of tenants that give weights, for the next pass."""


def plan_pass(
    queue: Sequence[QueuedPass],
    fairness: Fairness,
    *,
    shares: Mapping[TenantId, float],
    token_budget: int,
    full_budget: int | None = None,
    tags: Mapping[TenantId, Tags] = MappingProxyType({}),
) -> PassPlan:
    """Choose the sequences of the next pass: at least one while there is work.

    ``queue`` is in order of acceptance, except that each run's operations are in order of ``seq_id``. ``shares`` are the
    tenants' weights; a tenant that is missing has 1.0. ``fairness`` and ``tags`` are of the plan before. The pass holds at
    most ``token_budget`` tokens, or one longer sequence alone. ``full_budget`` is the token budget B of a full pass; None:
    this one is full.

    Raises ``ValueError`` for a share or a weight that is not above 0, a budget below 1 and an operation without sequences.
    """
    _check(queue, shares, token_budget)
    if not queue:
        return PassPlan((), 0, Fairness())
    tenants: dict[TenantId, list[_Sequence]] = {}
    for operation in queue:
        waiting = tenants.setdefault(operation.tenant, [])
        waiting.extend(_Sequence(operation.id, operation.run, length) for length in operation.lengths)
    weights: dict[str, float] = {operation.run: operation.weight for operation in queue}
    weighted = {operation.tenant for operation in queue if operation.weight != 1.0 or operation.tenant in tags}
    tagged = {tenant: tags_now(tenants[tenant], tags.get(tenant, {})) for tenant in weighted}
    ordered: dict[str, Iterable[_Sequence]] = {
        tenant: in_weighted_order(waiting, tagged[tenant], weights) if tenant in tagged else waiting
        for tenant, waiting in tenants.items()
    }
    of_runs: Counter[str] = Counter()
    turn = (full_budget or token_budget) / QUANTA_PER_PASS
    quanta: dict[str, float] = {name: shares.get(name, 1.0) * turn for name in tenants}
    taken = dict.fromkeys((operation.id for operation in queue), 0)
    tokens = 0

    def offer(_: str, sequence: _Sequence) -> Verdict:
        nonlocal tokens
        if tokens and tokens + sequence.cost > token_budget:
            return Verdict.FULL
        taken[sequence.operation] += 1
        of_runs[sequence.run] += sequence.cost
        tokens += sequence.cost
        return Verdict.TAKEN

    after = take_turns(ordered, fairness, quanta=quanta, offer=offer)
    pieces = tuple(Piece(operation, sequences) for operation, sequences in taken.items() if sequences)
    following = {tenant: tags_after(found, of_runs, weights) for tenant, found in tagged.items()}
    return PassPlan(pieces, tokens, after, following)


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


@dataclass(frozen=True, slots=True)
class _Sequence:
    """A sequence that waits: its operation, its run and its tokens."""

    operation: RequestId
    run: RunId
    cost: int


def _check(queue: Sequence[QueuedPass], shares: Mapping[TenantId, float], token_budget: int) -> None:
    if token_budget < 1:
        raise ValueError(f"a pass of {token_budget} tokens holds nothing")
    for tenant, share in shares.items():
        if not share > 0:
            raise ValueError(f"tenant {tenant}: share {share} is not above 0")
    for operation in queue:
        if not operation.weight > 0:
            raise ValueError(f"run {operation.run}: weight {operation.weight} is not above 0")
        if not operation.lengths:
            raise ValueError(f"operation {operation.id} has no sequences left")
