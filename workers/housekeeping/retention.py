"""The end of everything that is stored: for each table and each folder the step that ends it, or why it stays small."""

from collections.abc import Mapping
from dataclasses import dataclass

from ledger.payload_files import PAYLOADS
from store.tables import (
    AdapterGate,
    ApiKey,
    Base,
    BaseWeights,
    Checkpoint,
    CheckpointHold,
    DeletedCheckpoint,
    DirectedReplica,
    DirectedRun,
    DiscardedFolder,
    DownloadLink,
    Operation,
    OperationPayload,
    OperationResult,
    Placement,
    Project,
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
    UsageDay,
    UsageHour,
    VersionCommand,
    WeightJob,
    WorkerProcess,
)
from tenants.checkpoints import CHECKPOINTS, SNAPSHOTS
from tenants.weight_jobs import IMPORTS
from workers.housekeeping.schedule import StepName
from workers.leases.work_in_hand import RECORDS


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
    ApiKey: Bounded("one row for each key that an operator or a tenant's administrator makes"),
    BaseWeights: Bounded("one row for each base model"),
    Checkpoint: Ends((StepName.EXPIRE_CHECKPOINTS, StepName.RETIRE_VERSIONS)),
    CheckpointHold: Ends((StepName.RELEASE_CHECKPOINTS,)),
    DeletedCheckpoint: Ends((StepName.FORGET_DELETIONS,)),
    DirectedReplica: Bounded("one row for each replica that an operator names"),
    DirectedRun: Ends((StepName.FORGET_EVENTS,)),
    DiscardedFolder: Ends((StepName.EMPTY_TRASH,)),
    DownloadLink: Ends((StepName.EXPIRE_LINKS,)),
    Operation: Ends((StepName.FORGET_OPERATIONS,)),
    OperationPayload: Ends((StepName.PRUNE_RESULTS, StepName.DROP_PAYLOADS)),
    OperationResult: Ends((StepName.PRUNE_RESULTS,)),
    Placement: Ends((StepName.END_RUNS, StepName.FORGET_RUNS)),
    Project: Bounded("one row for each project that a tenant's administrator makes"),
    Run: Ends((StepName.END_RUNS, StepName.FORGET_RUNS)),
    RunEvent: Ends((StepName.FORGET_EVENTS,)),
    RunMetric: Ends((StepName.FORGET_RUNS,)),
    RunPoint: Ends((StepName.FORGET_RUNS,)),
    SampleInFlight: Ends((StepName.REAP_PROCESSES,)),
    SampleProgress: Ends((StepName.PRUNE_RESULTS,)),
    SampleRecord: Ends((StepName.FORGET_SAMPLE_RECORDS,)),
    SampleReport: Ends((StepName.PRUNE_RESULTS,)),
    Sampler: Ends((StepName.FORGET_SESSIONS,)),
    ServicePresence: Bounded("a single row"),
    Session: Ends((StepName.END_SESSIONS, StepName.FORGET_SESSIONS)),
    StepRun: Bounded("one row for each step"),
    Tenant: Bounded("one row for each tenant that an operator makes"),
    StorageHour: Ends((StepName.FORGET_USAGE,)),
    UsageHour: Ends((StepName.FORGET_USAGE,)),
    UsageDay: Bounded("one row a day for each tenant, base model and kind of operation, kept for the accounts"),
    VersionCommand: Ends((StepName.EXPIRE_COMMANDS,)),
    WeightJob: Ends((StepName.FORGET_OPERATIONS,)),
    WorkerProcess: Ends((StepName.REAP_PROCESSES,)),
}
RETENTION_OF_TABLES: Mapping[str, Retention] = {table.__tablename__: end for table, end in _TABLES.items()}

RETENTION_OF_FOLDERS: Mapping[str, Retention] = {
    CHECKPOINTS: Ends((StepName.EMPTY_TRASH, StepName.REMOVE_ORPHANS)),
    SNAPSHOTS: Ends((StepName.REMOVE_SNAPSHOTS, StepName.REMOVE_ORPHANS)),
    IMPORTS: Ends((StepName.REMOVE_ORPHANS,)),
    PAYLOADS: Ends((StepName.REMOVE_PAYLOAD_FILES,)),
    RECORDS: Bounded("a folder for each living trainer; whoever reaps it removes it"),
    "handshakes": Bounded("random adapters of rank 4, one set for each base model that is sampled"),
    "logs": Bounded("each host removes its security files when they are a year old"),
}
"""Folders by their names in the data folder."""
