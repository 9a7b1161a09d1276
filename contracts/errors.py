"""Every error that weft raises on purpose, drawn as a tree.

``tests/contracts/test_errors.py`` compares the tree with the classes. A line has the class, its HTTP status, its code, a remark.

    WeftError                  500  weft_error
    ├── Unauthenticated        401  unauthenticated      no API key, an unknown one or a revoked one
    ├── Forbidden              403  forbidden            the key's role, scopes or bounds do not allow it
    │   └── Suspended          403  suspended            an operator has suspended the tenant
    ├── NotFound               404  not_found            unknown, or another tenant's: indistinguishable
    ├── NotImplementedHere     404  not_implemented      a Tinker endpoint or feature that weft does not offer
    ├── InvalidRequest         400  invalid_request      the message names the field and what to change
    │   ├── SequenceConflict   400  sequence_conflict    a seq_id was used again with another body
    │   ├── UnknownBaseModel   400  unknown_base_model   no base model of that name is served
    │   ├── RunUnloaded        400  run_unloaded         the model was unloaded, or its creation failed
    │   ├── SessionEnded       400  session_ended        the session was finished or timed out
    │   ├── StorageFull        400  storage_full         a save or an import beyond the tenant's storage
    │   ├── TooManyFields      400  invalid_request      a protobuf message of more fields than a request may have
    │   └── CannotListen       400  cannot_listen        a server's address is taken; ends `weft serve`, never an answer
    ├── EditConflict           412  edit_conflict        the admin API: the resource has changed since it was read
    ├── HeartbeatRefused       410  session_gone         the SDK stops its heartbeat quietly
    ├── FutureGone             410  future_gone          result pruned after its grace time
    ├── OverLimit              429  over_limit           a limit of the tenant is reached; the SDK repeats the request
    │   ├── TooManySamples     429  too_many_samples     the SDK repeats the request until others have ended
    │   ├── TooManyOperations  429  too_many_operations  the same for training
    │   ├── TooManySessions    429  too_many_sessions    the same for sessions
    │   ├── TooManyRequests    429  too_many_requests    the same for requests in progress
    │   └── OverRate           429  over_rate            beyond a rate of requests, or of tokens on OpenAI's routes
    ├── TenantHeld             429  tenant_held          an OpenAI request of a tenant whose suspension is `hold`
    ├── BudgetSpent            402  budget_spent         a budget is spent; new SDKs wait and send the request again
    ├── PollAgain              408  poll_again           more polls than the tenant may have held; every SDK polls again
    ├── BodyTooSlow            408  body_too_slow        the body stopped coming; the SDK repeats the request
    ├── StaleSample            400  stale_sample         the sample fell too many versions behind its run
    ├── Cancelled              400  cancelled            ended from outside; the message says by whom and why
    │   └── ClientSilent       400  client_silent        a sample whose client sent no heartbeat; polls are answered 410
    ├── PayloadTooLarge        413  payload_too_large    the body, or what it decompresses to
    │   └── OversizedBody      413  payload_too_large    carries the body's first bytes, which name the failed operation
    ├── EngineFailure          500  engine_failure       weft's own fault; only ever stored as a failed operation
    │   ├── UnreadableOperation  500  unreadable_operation  what was recorded of it cannot be read back
    │   ├── OutOfMemory        500  out_of_memory        the device had no memory for the operation; nothing was changed
    │   ├── StateUnrestored    500  state_unrestored     a model's training state could not be brought back
    │   ├── AdapterLost        500  engine_failure       a vLLM server forgot an adapter; weft loads it again
    │   └── PoisonOperation    500  poison_operation     processes ended each time they computed the operation
    ├── LeaseLost              503  lease_lost           never leaves a trainer: another one has the run now
    ├── OutcomeConflict        503  outcome_conflict     never leaves a trainer: the operation has ended otherwise
    └── Unavailable            503  unavailable          no database; repeating the request finds what was recorded
        └── FilesUnread        503  unavailable          files of the data folder cannot be read now

Errors that never become an HTTP answer have no status and no code. Each is drawn with the module that defines it.

    Exception
    ├── NotReady               telemetry.readiness           a part of the process cannot work; `/readyz` says why
    ├── HeldBack               workers.sampling.claims       a sample cannot run now; it is given back
    ├── AttemptEnds            workers.jobs.attempt          a job's attempt ends before it is done; never leaves the runner
    ├── JobProcessEnded        workers.jobs.job_process      a job's process ended while it worked; the job is tried again
    ├── WorkFailed             workers.jobs.job_process      a job's work failed in an unforeseen way; the job has failed
    ├── WorkPostponed          workers.jobs.job_process      a job's work cannot read a file now; the job is tried again
    ├── CheckpointUnread       workers.training.adapter_restorer  a checkpoint cannot be read now; the load is tried again
    │   └── SnapshotUnread     workers.training.adapter_restorer  what a run is restored from cannot be read now; tried again
    ├── HeadTooLarge           cli.http_protocol             a request has too much beside its body; answered 431, or cut off
    ├── BrokenOff              api.endable_response          an answer ends between two pieces; never leaves it
    ├── Unreachable            workers.webhooks.sender       a webhook's host has no address that may be reached; never leaves it
    ├── HangingLookups         workers.webhooks.sender       a tenant's look-ups hang, and one more may not begin; never leaves it
    └── TakesNoWrites          store.database_health         the database answers, but is read-only or a standby
    BaseException
    └── ProcessMustEnd         contracts.errors             its work stays pending for another process
        ├── GroupLost          engine.training.executors.group  a rank of a trainer is gone
        └── DeviceFailed       engine.model.device          the device fails or hangs

The SDK retries 408, 409, 429 and 5xx for minutes, so no final answer uses them (decision 2).
Messages never carry a path, a traceback or another tenant's data.
"""

from typing import ClassVar, Literal

ErrorCategory = Literal["user", "server", "unknown"]


class WeftError(Exception):
    """Root of every error that becomes an HTTP answer or a failed operation."""

    code: ClassVar[str] = "weft_error"
    """Stable and machine-readable."""
    status: ClassVar[int] = 500
    """HTTP status."""
    retryable: ClassVar[bool] = False
    """True when the same request may succeed later."""
    category: ClassVar[ErrorCategory] = "server"
    """Party at fault, as a failed future reports it."""
    retry_after: int | None = None
    """Seconds after which to send the request again (``Retry-After``); None leaves it to the client."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Unauthenticated(WeftError):
    """No API key, an unknown one or a revoked one."""

    code = "unauthenticated"
    status = 401
    category = "user"


class Forbidden(WeftError):
    """The key's role, scopes or bounds do not allow the request; the message names which."""

    code = "forbidden"
    status = 403
    category = "user"


class Suspended(Forbidden):
    """An operator has suspended the tenant in a mode that refuses the request."""

    code = "suspended"


class NotFound(WeftError):
    """The id is unknown to this tenant. ``is_foreign``: it is known to be another's, for the security log only."""

    code = "not_found"
    status = 404
    category = "user"

    def __init__(self, message: str, *, is_foreign: bool = False) -> None:
        super().__init__(message)
        self.is_foreign = is_foreign


class NotImplementedHere(WeftError):
    """A known Tinker endpoint or feature that this weft does not offer."""

    code = "not_implemented"
    status = 404
    category = "user"


class InvalidRequest(WeftError):
    """The request can never succeed as it is; the message names the field and what to change."""

    code = "invalid_request"
    status = 400
    category = "user"


class SequenceConflict(InvalidRequest):
    """The same key (run and seq_id, or another pair that names a request) came again with another body."""

    code = "sequence_conflict"


class UnknownBaseModel(InvalidRequest):
    """No base model of that name is served."""

    code = "unknown_base_model"


class RunUnloaded(InvalidRequest):
    """The model was unloaded, or was never created successfully."""

    code = "run_unloaded"


class SessionEnded(InvalidRequest):
    """The session was finished or timed out."""

    code = "session_ended"


class EditConflict(WeftError):
    """A change of the admin API names an older state of the resource than the present one, in ``If-Match``."""

    code = "edit_conflict"
    status = 412
    category = "user"


class HeartbeatRefused(WeftError):
    """The session has ended, so the SDK should stop its heartbeats."""

    code = "session_gone"
    status = 410
    category = "user"


class FutureGone(WeftError):
    """The operation's result was pruned after its grace time."""

    code = "future_gone"
    status = 410
    category = "user"


class StorageFull(InvalidRequest):
    """The tenant's checkpoints and snapshots take as much room as they may. Training goes on."""

    code = "storage_full"


class OverLimit(WeftError):
    """The tenant uses as much of something as it may. The same request succeeds once there is room."""

    code = "over_limit"
    status = 429
    retryable = True
    category = "user"
    retry_after = 1


class TooManySamples(OverLimit):
    """The tenant has as many samples pending as it may have."""

    code = "too_many_samples"


class TooManyOperations(OverLimit):
    """The tenant has as much training pending as it may have."""

    code = "too_many_operations"
    retry_after = 5


class TooManySessions(OverLimit):
    """The tenant has as many sessions open as it may have."""

    code = "too_many_sessions"
    retry_after = 10


class TooManyRequests(OverLimit):
    """The tenant has as many requests in progress as it may have."""

    code = "too_many_requests"


class OverRate(OverLimit):
    """A rate lets the request through only later, and its client cannot be told to wait for it."""

    code = "over_rate"

    def __init__(self, message: str, *, seconds: int) -> None:
        super().__init__(message)
        self.retry_after = seconds


class TenantHeld(WeftError):
    """An operator holds the tenant's work, and the request's client cannot be told that it waits. Nothing was recorded."""

    code = "tenant_held"
    status = 429
    retryable = True
    category = "user"
    retry_after = 10


class BudgetSpent(WeftError):
    """A budget of the tenant or of the key is spent. The same request succeeds once it is raised, or its period has ended."""

    code = "budget_spent"
    status = 402
    retryable = True
    category = "user"


class PollAgain(WeftError):
    """The tenant has as many polls held as it may have, and no place was free in time. Its operations go on."""

    code = "poll_again"
    status = 408
    retryable = True
    category = "user"


class BodyTooSlow(WeftError):
    """The request's body stopped coming, or came byte by byte. Sending it again is safe: nothing was recorded."""

    code = "body_too_slow"
    status = 408
    retryable = True
    category = "user"


class StaleSample(WeftError):
    """A live sampler's sample fell further behind its run's newest version than the sampler allows."""

    code = "stale_sample"
    status = 400
    category = "user"


class Cancelled(WeftError):
    """The operation was ended from outside before it was done: by its client, an operator, or the end of its session or key."""

    code = "cancelled"
    status = 400
    category = "user"


class ClientSilent(Cancelled):
    """The sample was ended because its client had sent no heartbeat for a while. A poll for it is answered with 410."""

    code = "client_silent"


CANCELLED_CODES = (Cancelled.code, ClientSilent.code)
"""Codes of operations that were ended from outside: what they had used by then is counted."""


class PayloadTooLarge(WeftError):
    """The body, or what it decompresses to, is over the limit."""

    code = "payload_too_large"
    status = 413
    category = "user"


class EngineFailure(WeftError):
    """Running an operation failed inside weft."""

    code = "engine_failure"


class PoisonOperation(EngineFailure):
    """The processes that computed the operation ended, time and again. It is not computed any more."""

    code = "poison_operation"


class UnreadableOperation(EngineFailure):
    """The recorded payload or result of an operation is damaged, gone, or of a kind that this version does not know."""

    code = "unreadable_operation"


class OutOfMemory(EngineFailure):
    """The device had no memory to compute the operation, or to bring its adapter in. Nothing was changed."""

    code = "out_of_memory"


class StateUnrestored(EngineFailure):
    """The training state of the operation's run could not be brought back: a file or an operation that it needs is lost."""

    code = "state_unrestored"


class ProcessMustEnd(BaseException):
    """The process cannot do its work any more and must end at once. Its work stays pending for another process.

    It is no ``Exception``, so that code which catches the failure of an operation does not catch it: no operation has failed.
    """


class LeaseLost(WeftError):
    """A trainer tried to write for a run that another trainer leases by now. Nothing was written."""

    code = "lease_lost"
    status = 503
    retryable = True


class OutcomeConflict(WeftError):
    """A trainer tried to end an operation that has ended already, in another way. Nothing was written."""

    code = "outcome_conflict"
    status = 503
    retryable = True


class Unavailable(WeftError):
    """The database does not answer now. Repeating the request is safe: it finds whatever was recorded."""

    code = "unavailable"
    status = 503
    retryable = True


class FilesUnread(Unavailable):
    """Files of the data folder are there, or may be, and cannot be read now."""
