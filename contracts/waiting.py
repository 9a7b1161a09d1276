"""Waiting: the reasons for which an operation that was accepted does not run now, and what is known of its end."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from contracts.ids import RequestId


class WaitReason(StrEnum):
    """Reason for which a pending operation has not ended.

    - ``running``: a trainer computes it, or a replica draws it or loads its adapter. ``saving``: a trainer writes its checkpoint.
    - ``turn``: it may run, and others come before it by their tenants' shares.
    - ``earlier_operation``: an operation of the same run comes first, and that one waits for the ``cause``.
    - ``missing_seq_id``: a number of the run has not come.
    - ``held``: the operator has suspended the tenant. ``rate_limit``, ``budget``: the tenant is over one.
    - ``open_runs``, ``storage``, ``open_adapters``: the run is created when there is room under that limit.
    - ``no_trainer``: no trainer of the base takes runs. ``not_placed``: one is to take the run. ``moving``: it changes hands.
    - ``trainer_lost``: the run's trainer is not heard of, and its lease decides.
    - ``restoring``: the adapter is brought back from its snapshot. ``replaying``: with operations after it.
    - ``suspect_alone``: a process died at it, so it runs when nothing else does.
    - ``gate_paused``: a gate before the sample is closed.
    - ``no_replica``, ``drained``: no replica of the base answers, or the operator has drained them.
    - ``no_room``: sampling processes hold as many samples as they may.
    - ``claimed``: a sampling process has it, and sends it to a replica once no change of its sampler or gate is under way.
    """

    RUNNING = "running"
    SAVING = "saving"
    TURN = "turn"
    EARLIER_OPERATION = "earlier_operation"
    MISSING_SEQ_ID = "missing_seq_id"
    HELD = "held"
    RATE_LIMIT = "rate_limit"
    BUDGET = "budget"
    OPEN_RUNS = "open_runs"
    STORAGE = "storage"
    OPEN_ADAPTERS = "open_adapters"
    NO_TRAINER = "no_trainer"
    NOT_PLACED = "not_placed"
    MOVING = "moving"
    TRAINER_LOST = "trainer_lost"
    RESTORING = "restoring"
    REPLAYING = "replaying"
    SUSPECT_ALONE = "suspect_alone"
    GATE_PAUSED = "gate_paused"
    NO_REPLICA = "no_replica"
    DRAINED = "drained"
    NO_ROOM = "no_room"
    CLAIMED = "claimed"


_GOES_ON = frozenset(
    {WaitReason.RUNNING, WaitReason.SAVING, WaitReason.TURN, WaitReason.NOT_PLACED, WaitReason.CLAIMED}
)


@dataclass(frozen=True, slots=True)
class Wait:
    """A pending operation's wait, in words for its tenant.

    - ``cause``: the reason of the operation of the same run that comes first; else the reason itself.
    - ``front``: that operation.
    - ``since``: when the reason began, as far as rows tell. ``until``: when it ends at the latest, if that is known.
    - ``seq_id``: number that is missing, or of the operation that comes first.
    """

    reason: WaitReason
    text: str
    cause: WaitReason
    since: datetime
    until: datetime | None = None
    seq_id: int | None = None
    front: RequestId | None = None

    @property
    def queue_state(self) -> str:
        """State of the queue as the SDK reads it: whether its user is to be told the reason."""
        if self.cause is WaitReason.RATE_LIMIT:
            return "paused_rate_limit"
        return "active" if self.cause in _GOES_ON else "paused_capacity"


@dataclass(frozen=True, slots=True)
class Ahead:
    """Work before an operation: its tenant's own, and that of all others as sums, which are rounded up to powers of two.

    - ``bound_passes``: passes within which its sequences are in one. ``bound_tokens``: most tokens of others before it.
      Both hold for the tenants that have work now.
    - ``eta_seconds``: time that the work before it and itself take at ``tokens_per_second``, which was measured; None: unknown.
    """

    own_operations: int
    own_tokens: int
    other_operations: int
    other_tokens: int
    bound_passes: int | None = None
    bound_tokens: int | None = None
    eta_seconds: float | None = None
    tokens_per_second: float | None = None
