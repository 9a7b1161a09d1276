"""Names of what the audit log tells of, each with its meaning for the page of the reference."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class Action(StrEnum):
    """Kind of an entry: ``<resource>_<action>``."""

    TENANT_CREATE = "tenant_create"
    TENANT_SET = "tenant_set"
    TENANT_BUDGET = "tenant_budget"
    TENANT_SUSPEND = "tenant_suspend"
    TENANT_RESUME = "tenant_resume"
    TENANT_DELETE = "tenant_delete"
    TENANT_RESTORE = "tenant_restore"
    TENANT_LOOK = "tenant_look"
    OPERATOR_CREATE = "operator_create"
    OPERATOR_REVOKE = "operator_revoke"
    PROJECT_CREATE = "project_create"
    PROJECT_SET = "project_set"
    KEY_CREATE = "key_create"
    KEY_ROTATE = "key_rotate"
    KEY_REVOKE = "key_revoke"
    KEY_SET = "key_set"
    LOGIN_BEGIN = "login_begin"
    LOGIN_END = "login_end"
    LOGIN_INVITE = "login_invite"
    SESSION_END = "session_end"
    SESSION_MOVE = "session_move"
    RUN_CREATE = "run_create"
    RUN_UNLOAD = "run_unload"
    RUN_DELETE = "run_delete"
    RUN_RELOAD = "run_reload"
    RUN_LOAD = "run_load"
    RUN_WEIGH = "run_weigh"
    RUN_MOVE = "run_move"
    RUN_EVICT = "run_evict"
    SAMPLER_CREATE = "sampler_create"
    SAMPLER_SET = "sampler_set"
    CHECKPOINT_CREATE = "checkpoint_create"
    CHECKPOINT_READ = "checkpoint_read"
    CHECKPOINT_SET = "checkpoint_set"
    CHECKPOINT_DELETE = "checkpoint_delete"
    CHECKPOINT_EXPIRE = "checkpoint_expire"
    CHECKPOINT_PUBLISH = "checkpoint_publish"
    CHECKPOINT_UNPUBLISH = "checkpoint_unpublish"
    GATE_PAUSE = "gate_pause"
    GATE_RESUME = "gate_resume"
    JOB_CREATE = "job_create"
    JOB_CANCEL = "job_cancel"
    OPERATION_CANCEL = "operation_cancel"
    OPERATION_FAIL = "operation_fail"
    OPERATION_REQUEUE = "operation_requeue"
    TRAINER_DRAIN = "trainer_drain"
    TRAINER_WORK = "trainer_work"
    REPLICA_DIRECT = "replica_direct"
    BASE_ACCEPT = "base_accept"
    PRICE_ADD = "price_add"
    WEBHOOK_SET = "webhook_set"
    WEBHOOK_DELETE = "webhook_delete"
    WEBHOOK_ROTATE = "webhook_rotate"
    WEBHOOK_READ = "webhook_read"
    WEBHOOK_TEST = "webhook_test"
    WEBHOOK_RETRY = "webhook_retry"
    REQUEST_REFUSE = "request_refuse"
    USAGE_READ = "usage_read"
    AUDIT_READ = "audit_read"

    @property
    def resource(self) -> str:
        """Kind of thing that it is done to."""
        return self.partition("_")[0]


MEANINGS: Mapping[Action, str] = MappingProxyType(
    {
        Action.TENANT_CREATE: "a tenant was made",
        Action.TENANT_SET: "a tenant got other limits or another share",
        Action.TENANT_BUDGET: "a tenant, or one of its keys or projects, got another budget",
        Action.TENANT_SUSPEND: "a tenant was suspended, or its suspension got another mode or reason",
        Action.TENANT_RESUME: "a tenant's suspension was ended",
        Action.TENANT_DELETE: "a tenant was marked to be deleted at the time in `after`",
        Action.TENANT_RESTORE: "the deletion of a tenant was taken back in time",
        Action.TENANT_LOOK: "an operator began to look at the tenant's pages as a viewer, for 15 minutes",
        Action.OPERATOR_CREATE: "an operator's key was made",
        Action.OPERATOR_REVOKE: "an operator's key was revoked",
        Action.PROJECT_CREATE: "a project was made",
        Action.PROJECT_SET: "a project's limits were changed",
        Action.KEY_CREATE: "a key was made",
        Action.KEY_ROTATE: "a key was made in place of another, which ends",
        Action.KEY_REVOKE: "a key was revoked",
        Action.KEY_SET: "a key was given rates of its own, or other ones",
        Action.LOGIN_BEGIN: "a web session of the dashboard was begun with a key",
        Action.LOGIN_END: "a web session of the dashboard was ended by a logout, a new login in its browser, or its tenant",
        Action.LOGIN_INVITE: "a one-time code for the dashboard was made for a key",
        Action.SESSION_END: "a client, or an operator, ended a session",
        Action.SESSION_MOVE: "a session, with its runs and samplers, went to another project",
        Action.RUN_CREATE: "a run was made; `after` names the checkpoint that it begins with",
        Action.RUN_UNLOAD: "a run was unloaded at its tenant's request",
        Action.RUN_DELETE: "housekeeping deleted an ended run that had no checkpoints",
        Action.RUN_RELOAD: "the live samplers of a run were pointed at a version",
        Action.RUN_LOAD: "a load of another tenant's checkpoint, named in `after`, into an existing run was accepted",
        Action.RUN_WEIGH: "a run got another weight among its tenant's runs",
        Action.RUN_MOVE: "an operator had a run handed to another trainer",
        Action.RUN_EVICT: "an operator had a run's adapter paged out",
        Action.SAMPLER_CREATE: "a request made a sampler",
        Action.SAMPLER_SET: "a live sampler got another staleness bound or swap policy",
        Action.CHECKPOINT_CREATE: "a checkpoint with a name was saved, merged, imported or copied",
        Action.CHECKPOINT_READ: (
            "a link to a checkpoint's files was made or followed, an operator merged it, or another tenant has used it (`load`, "
            "`copy`, `sample`; one entry a minute for each key): see `purpose` or `cause`"
        ),
        Action.CHECKPOINT_SET: "a checkpoint got another time to live",
        Action.CHECKPOINT_DELETE: "a checkpoint was deleted",
        Action.CHECKPOINT_EXPIRE: "housekeeping deleted a checkpoint with a name whose time to live was over",
        Action.CHECKPOINT_PUBLISH: "a checkpoint was opened to every tenant",
        Action.CHECKPOINT_UNPUBLISH: "a publication was taken back",
        Action.GATE_PAUSE: "sampling from an adapter, or from a base with all its adapters, was paused",
        Action.GATE_RESUME: "a pause was ended",
        Action.JOB_CREATE: "a merge or an import was asked for",
        Action.JOB_CANCEL: "a merge or an import was cancelled",
        Action.OPERATION_CANCEL: "an operator cancelled an operation",
        Action.OPERATION_FAIL: "an operator failed an operation",
        Action.OPERATION_REQUEUE: "an operator had an operation begun anew",
        Action.TRAINER_DRAIN: "an operator had a trainer give up its runs",
        Action.TRAINER_WORK: "an operator had a drained trainer work again",
        Action.REPLICA_DIRECT: "an operator had a replica drain, sleep or work",
        Action.BASE_ACCEPT: "an operator accepted other weights under a base's name",
        Action.PRICE_ADD: "an operator added a price",
        Action.WEBHOOK_SET: "a webhook was made, or got another address or other events, or was switched off or on",
        Action.WEBHOOK_DELETE: "a webhook was deleted, with the events that waited for it",
        Action.WEBHOOK_ROTATE: "a webhook got another secret; the one before signs beside it for a day",
        Action.WEBHOOK_READ: "the secret of a webhook was read",
        Action.WEBHOOK_TEST: "a test event was sent to a webhook",
        Action.WEBHOOK_RETRY: "an event was sent to a webhook once more",
        Action.REQUEST_REFUSE: "requests were refused for their key; one entry a minute for each key and cause",
        Action.USAGE_READ: "usage or billing was read; one entry a minute for each key",
        Action.AUDIT_READ: "the audit log was read; one entry a minute for each key",
    }
)
