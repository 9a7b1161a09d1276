"""The database's tables as SQLAlchemy classes, a module for each noun.

Alembic makes the schema (``migrations/``); ``tests/migrations`` proves that both agree. Every row that belongs to a tenant
names it. Times are UTC. ``Base.metadata`` knows every table once this package is imported.
"""

from store.tables.base import Base
from store.tables.bases import BaseWeights
from store.tables.folders import CheckpointHold, DeletedCheckpoint, DiscardedFolder
from store.tables.housekeeping import ServicePresence, StepRun
from store.tables.jobs import WeightJob
from store.tables.operations import Operation, OperationPayload, OperationResult
from store.tables.points import RunMetric, RunPoint
from store.tables.processes import PoolState, WorkerProcess
from store.tables.projects import Project
from store.tables.run_directives import DirectedRun
from store.tables.run_events import RunEvent
from store.tables.runs import Checkpoint, DownloadLink, Placement, Run, RunState
from store.tables.sampling import (
    AdapterGate,
    DirectedReplica,
    SampleInFlight,
    SampleProgress,
    SampleRecord,
    SampleReport,
    VersionCommand,
)
from store.tables.sessions import Sampler, Session
from store.tables.tenancy import ApiKey, Tenant
from store.tables.usage import StorageHour, UsageDay, UsageHour

__all__ = [
    "AdapterGate",
    "ApiKey",
    "Base",
    "BaseWeights",
    "Checkpoint",
    "CheckpointHold",
    "DeletedCheckpoint",
    "DirectedReplica",
    "DirectedRun",
    "DiscardedFolder",
    "DownloadLink",
    "Operation",
    "OperationPayload",
    "OperationResult",
    "Placement",
    "PoolState",
    "Project",
    "Run",
    "RunEvent",
    "RunMetric",
    "RunPoint",
    "RunState",
    "SampleInFlight",
    "SampleProgress",
    "SampleRecord",
    "SampleReport",
    "Sampler",
    "ServicePresence",
    "Session",
    "StepRun",
    "StorageHour",
    "Tenant",
    "UsageDay",
    "UsageHour",
    "VersionCommand",
    "WeightJob",
    "WorkerProcess",
]
