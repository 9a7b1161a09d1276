"""The database's tables as SQLAlchemy classes, a module for each noun.

Alembic makes the schema (``migrations/``); ``tests/migrations`` proves that both agree. Every row that belongs to a tenant
names it. Times are UTC. ``Base.metadata`` knows every table once this package is imported.
"""

from store.tables.audit import AuditDigest, AuditEntry
from store.tables.base import Base
from store.tables.bases import BaseWeights
from store.tables.client_exceptions import ClientException
from store.tables.folders import CheckpointHold, DeletedCheckpoint, DiscardedFolder
from store.tables.housekeeping import ServicePresence, StepRun
from store.tables.jobs import WeightJob
from store.tables.limits import Budget, BudgetAlert, Rate, RateLineRow, RatePlace
from store.tables.operations import Operation, OperationPayload, OperationResult
from store.tables.operator_answers import OperatorAnswer
from store.tables.operator_sessions import OperatorCode, OperatorSession
from store.tables.points import RunMetric, RunPoint
from store.tables.prices import Price, TenantPrice
from store.tables.processes import EndedProcess, PoolState, ProcessKind, ReplicaCondition, WorkerProcess
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
from store.tables.tenancy import ApiKey, OperatorKey, Tenant
from store.tables.usage import StorageHour, UsageDay, UsageHour
from store.tables.web_sessions import LoginCode, WebSession
from store.tables.webhooks import Webhook, WebhookEvent

__all__ = [
    "AdapterGate",
    "ApiKey",
    "AuditDigest",
    "AuditEntry",
    "Base",
    "BaseWeights",
    "Budget",
    "BudgetAlert",
    "Checkpoint",
    "CheckpointHold",
    "ClientException",
    "DeletedCheckpoint",
    "DirectedReplica",
    "DirectedRun",
    "DiscardedFolder",
    "DownloadLink",
    "EndedProcess",
    "LoginCode",
    "Operation",
    "OperationPayload",
    "OperationResult",
    "OperatorAnswer",
    "OperatorCode",
    "OperatorKey",
    "OperatorSession",
    "Placement",
    "PoolState",
    "Price",
    "ProcessKind",
    "Project",
    "Rate",
    "RateLineRow",
    "RatePlace",
    "ReplicaCondition",
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
    "TenantPrice",
    "UsageDay",
    "UsageHour",
    "VersionCommand",
    "WebSession",
    "Webhook",
    "WebhookEvent",
    "WeightJob",
    "WorkerProcess",
]
