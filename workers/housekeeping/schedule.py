"""The names of housekeeping's steps and how often each runs."""

from datetime import timedelta
from enum import StrEnum

from store.settings import Settings


class StepName(StrEnum):
    """Name of a step: in the database, in metrics, as an option of `weft housekeeping` and in a Celery task."""

    END_SESSIONS = "end-sessions"
    DELETE_TENANTS = "delete-tenants"
    CANCEL_SAMPLES = "cancel-samples"
    CANCEL_SILENT_SAMPLES = "cancel-silent-samples"
    END_RUNS = "end-runs"
    CLOSE_GAPS = "close-gaps"
    OPEN_GATES = "open-gates"
    REAP_PROCESSES = "reap-processes"
    EXPIRE_LINKS = "expire-links"
    END_LOGINS = "end-logins"
    EXPIRE_COMMANDS = "expire-commands"
    EXPIRE_CHECKPOINTS = "expire-checkpoints"
    FORGET_DELETIONS = "forget-deletions"
    RETIRE_VERSIONS = "retire-versions"
    REMOVE_SNAPSHOTS = "remove-snapshots"
    RELEASE_CHECKPOINTS = "release-checkpoints"
    EMPTY_TRASH = "empty-trash"
    PRUNE_RESULTS = "prune-results"
    DROP_PAYLOADS = "drop-payloads"
    REMOVE_PAYLOAD_FILES = "remove-payload-files"
    FORGET_OPERATIONS = "forget-operations"
    FORGET_SAMPLE_RECORDS = "forget-sample-records"
    FORGET_SESSIONS = "forget-sessions"
    FORGET_RUNS = "forget-runs"
    FORGET_EVENTS = "forget-events"
    METER_STORAGE = "meter-storage"
    FORGET_USAGE = "forget-usage"
    DIGEST_AUDIT = "digest-audit"
    FORGET_AUDIT = "forget-audit"
    TELL_EXPIRIES = "tell-expiries"
    SEND_WEBHOOKS = "send-webhooks"
    FORGET_WEBHOOKS = "forget-webhooks"
    REMOVE_ORPHANS = "remove-orphans"


_SELDOM = {
    StepName.END_LOGINS: timedelta(minutes=5),
    StepName.FORGET_DELETIONS: timedelta(minutes=5),
    StepName.REMOVE_PAYLOAD_FILES: timedelta(minutes=5),
    StepName.FORGET_OPERATIONS: timedelta(minutes=5),
    StepName.FORGET_SAMPLE_RECORDS: timedelta(minutes=5),
    StepName.FORGET_SESSIONS: timedelta(minutes=10),
    StepName.FORGET_RUNS: timedelta(minutes=10),
    StepName.FORGET_EVENTS: timedelta(minutes=10),
    StepName.METER_STORAGE: timedelta(minutes=10),
    StepName.FORGET_USAGE: timedelta(hours=1),
    StepName.DIGEST_AUDIT: timedelta(minutes=10),
    StepName.FORGET_AUDIT: timedelta(hours=1),
    StepName.TELL_EXPIRIES: timedelta(minutes=5),
    StepName.FORGET_WEBHOOKS: timedelta(hours=1),
    StepName.REMOVE_ORPHANS: timedelta(hours=1),
}
"""Steps that walk over rows or folders which are kept for long, or that have work once an hour."""


def interval(step: StepName, settings: Settings) -> timedelta:
    """Return the time between two runs of the step."""
    return max(settings.housekeeping_interval, _SELDOM.get(step, timedelta(0)))
