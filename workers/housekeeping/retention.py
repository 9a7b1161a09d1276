"""The end of everything that is stored: for each table and each folder the step that ends it, or why it stays small."""

from collections.abc import Mapping
from dataclasses import dataclass

from ledger.payload_files import PAYLOADS
from store.tables import (
    AdapterGate,
    ApiKey,
    AuditDigest,
    AuditEntry,
    Base,
    BaseWeights,
    Budget,
    BudgetAlert,
    Checkpoint,
    CheckpointHold,
    ClientException,
    DeletedCheckpoint,
    DirectedReplica,
    DirectedRun,
    DiscardedFolder,
    DownloadLink,
    EndedProcess,
    LoginCode,
    Operation,
    OperationPayload,
    OperationResult,
    OperatorAnswer,
    OperatorCode,
    OperatorKey,
    OperatorSession,
    Placement,
    Price,
    Project,
    Rate,
    RateLineRow,
    RatePlace,
    Run,
    RunEvent,
    RunMetric,
    RunPoint,
    SampleInFlight,
    SampleProgress,
    Sampler,
    SampleRecord,
    SampleReport,
    ServicePresence,
    Session,
    StepRun,
    StorageHour,
    Tenant,
    TenantPrice,
    UsageDay,
    UsageHour,
    VersionCommand,
    Webhook,
    WebhookEvent,
    WebSession,
    WeightJob,
    WorkerProcess,
)
from tenants.checkpoints import CHECKPOINTS, SNAPSHOTS
from tenants.trainers import RECORDS
from tenants.weight_jobs import IMPORTS
from workers.housekeeping.schedule import StepName


@dataclass(frozen=True, slots=True)
class Ends:
    """Rows or folders that the ``steps`` delete."""

    steps: tuple[StepName, ...]


@dataclass(frozen=True, slots=True)
class Bounded:
    """Rows that stay, or go without housekeeping, and why they do not grow for ever."""

    reason: str


Retention = Ends | Bounded

_TABLES: Mapping[type[Base], Retention] = {
    AdapterGate: Ends((StepName.FORGET_RUNS,)),
    ApiKey: Bounded("at most 2,000 rows of each tenant, of which ended ones make room; those of looks go after a day"),
    AuditDigest: Bounded("one row a day, by which the days that are kept are verified"),
    AuditEntry: Ends((StepName.FORGET_AUDIT,)),
    BaseWeights: Bounded("one row for each base model"),
    Budget: Bounded("one row for each budget that an operator sets"),
    BudgetAlert: Bounded("two rows at most for each budget and period"),
    Checkpoint: Ends((StepName.EXPIRE_CHECKPOINTS, StepName.RETIRE_VERSIONS)),
    CheckpointHold: Ends((StepName.RELEASE_CHECKPOINTS,)),
    ClientException: Ends((StepName.FORGET_SESSIONS,)),
    DeletedCheckpoint: Ends((StepName.FORGET_DELETIONS,)),
    DirectedReplica: Bounded("one row for each replica that an operator names"),
    DirectedRun: Ends((StepName.FORGET_EVENTS,)),
    DiscardedFolder: Ends((StepName.EMPTY_TRASH,)),
    DownloadLink: Ends((StepName.EXPIRE_LINKS,)),
    EndedProcess: Ends((StepName.FORGET_EVENTS,)),
    LoginCode: Ends((StepName.END_LOGINS,)),
    Operation: Ends((StepName.FORGET_OPERATIONS,)),
    OperationPayload: Ends((StepName.PRUNE_RESULTS, StepName.DROP_PAYLOADS)),
    OperationResult: Ends((StepName.PRUNE_RESULTS,)),
    OperatorAnswer: Ends((StepName.FORGET_DELETIONS,)),
    OperatorCode: Ends((StepName.END_LOGINS,)),
    OperatorKey: Bounded("one row for each key that is made on the command line for an operator"),
    OperatorSession: Ends((StepName.END_LOGINS,)),
    Placement: Ends((StepName.END_RUNS, StepName.FORGET_RUNS)),
    Price: Bounded("at most 500 rows, which an operator adds"),
    Project: Bounded("at most 1,000 rows for each tenant, which its administrator makes"),
    Rate: Bounded("two rows at most for each tenant that has had a rate"),
    RateLineRow: Bounded("two rows at most for each project, and for each key that is kept, that has had a rate"),
    RatePlace: Ends((StepName.PRUNE_RESULTS,)),
    Run: Ends((StepName.END_RUNS, StepName.FORGET_RUNS)),
    RunEvent: Ends((StepName.FORGET_EVENTS,)),
    RunMetric: Ends((StepName.FORGET_RUNS,)),
    RunPoint: Ends((StepName.FORGET_RUNS,)),
    SampleInFlight: Ends((StepName.REAP_PROCESSES,)),
    SampleProgress: Ends((StepName.PRUNE_RESULTS,)),
    SampleRecord: Ends((StepName.FORGET_SAMPLE_RECORDS,)),
    SampleReport: Ends((StepName.PRUNE_RESULTS,)),
    Sampler: Ends((StepName.FORGET_SESSIONS, StepName.FORGET_OPERATIONS, StepName.FORGET_RUNS)),
    ServicePresence: Bounded("a single row"),
    Session: Ends((StepName.END_SESSIONS, StepName.FORGET_SESSIONS)),
    StepRun: Bounded("one row for each step"),
    Tenant: Bounded("one row for each tenant that an operator makes"),
    TenantPrice: Bounded("at most 500 rows of each tenant, which an operator adds"),
    StorageHour: Ends((StepName.FORGET_USAGE,)),
    UsageHour: Ends((StepName.FORGET_USAGE,)),
    UsageDay: Bounded("one row a day for each tenant, base model and kind of operation, kept for the accounts"),
    VersionCommand: Ends((StepName.EXPIRE_COMMANDS,)),
    Webhook: Bounded("at most `WEFT_LIMIT_WEBHOOKS` rows for each tenant"),
    WebhookEvent: Ends((StepName.FORGET_WEBHOOKS,)),
    WebSession: Ends((StepName.END_LOGINS,)),
    WeightJob: Ends((StepName.FORGET_OPERATIONS,)),
    WorkerProcess: Ends((StepName.REAP_PROCESSES,)),
}
RETENTION_OF_TABLES: Mapping[str, Retention] = {table.__tablename__: end for table, end in _TABLES.items()}

RETENTION_OF_FOLDERS: Mapping[str, Retention] = {
    CHECKPOINTS: Ends((StepName.EMPTY_TRASH, StepName.REMOVE_ORPHANS)),
    SNAPSHOTS: Ends((StepName.REMOVE_SNAPSHOTS, StepName.REMOVE_ORPHANS)),
    IMPORTS: Ends((StepName.REMOVE_ORPHANS,)),
    PAYLOADS: Ends((StepName.REMOVE_PAYLOAD_FILES,)),
    RECORDS: Ends((StepName.REMOVE_ORPHANS,)),
    "handshakes": Bounded("random adapters of rank 4, one set for each base model that is sampled"),
    "zero-adapters": Bounded("an adapter of rank 1 for each base model that vLLM samples"),
    "logs": Bounded(
        "a vLLM server's file is bounded, and goes a year after its last line; a host's security files likewise"
    ),
}
"""Folders by their names in the data folder."""
