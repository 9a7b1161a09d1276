"""The one error root.

    WeftError
    ├── Unauthenticated        401  unauthenticated
    ├── NotFound               404  not_found            unknown, or another tenant's: indistinguishable
    ├── InvalidRequest         400  invalid_request      the caller must change something; text names the field and limit
    │   ├── SequenceConflict   400  sequence_conflict    a seq_id was used again with another body
    │   ├── UnknownBaseModel   400  unknown_base_model
    │   ├── RunUnloaded        400  run_unloaded
    │   └── SessionEnded       400  session_ended
    ├── HeartbeatRefused       410  session_gone         the SDK stops its heartbeat quietly
    ├── FutureGone             410  future_gone          result pruned after its grace time
    ├── PayloadTooLarge        413  payload_too_large
    ├── NotImplementedHere     404  not_implemented
    ├── LeaseLost              503  lease_lost           never leaves a trainer: another one has the run now
    ├── Unavailable            503  unavailable          the database cannot be had now; the same again finds what was done
    └── EngineFailure          500  engine_failure       weft's own fault; only ever stored as a failed operation

The SDK retries 408, 409, 429 and 5xx for minutes, so no final answer uses them (decision 2).
Messages never carry a path, a traceback or another tenant's data.
"""

from typing import ClassVar, Literal

ErrorCategory = Literal["user", "server", "unknown"]


class WeftError(Exception):
    """Root of every error weft raises on purpose.

    ``code`` is stable and machine-readable, ``status`` the HTTP status, ``retryable`` says whether the same request may
    succeed later, ``category`` is what a failed future reports.
    """

    code: ClassVar[str] = "weft_error"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    category: ClassVar[ErrorCategory] = "server"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Unauthenticated(WeftError):
    """No API key, an unknown one or a revoked one."""

    code = "unauthenticated"
    status = 401
    category = "user"


class NotFound(WeftError):
    """The id is unknown to this tenant."""

    code = "not_found"
    status = 404
    category = "user"


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
    """The same key (run and seq_id, or its siblings) came again with another body."""

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


class HeartbeatRefused(WeftError):
    """The session is over: the SDK stops its heartbeats."""

    code = "session_gone"
    status = 410
    category = "user"


class FutureGone(WeftError):
    """The result was delivered or waited for too long, and was pruned."""

    code = "future_gone"
    status = 410
    category = "user"


class TooManySamples(WeftError):
    """The tenant has as many samples pending as it may: the same request is good once some have ended."""

    code = "too_many_samples"
    status = 429
    retryable = True
    category = "user"


class StaleSample(WeftError):
    """A live sampler's sample fell further behind its run's newest version than the sampler allows."""

    code = "stale_sample"
    status = 400
    category = "user"


class PayloadTooLarge(WeftError):
    """The body, or what it decompresses to, is over the limit."""

    code = "payload_too_large"
    status = 413
    category = "user"


class EngineFailure(WeftError):
    """Something failed inside weft while it ran an operation."""

    code = "engine_failure"


class LeaseLost(WeftError):
    """A trainer wrote for a run that is another's by now; nothing was written."""

    code = "lease_lost"
    status = 503
    retryable = True


class Unavailable(WeftError):
    """The database cannot be had now. The same request, repeated, is answered: what was recorded is found again."""

    code = "unavailable"
    status = 503
    retryable = True
