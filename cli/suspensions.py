"""``weft tenant suspend`` and ``weft tenant resume``: a tenant's accepted work waits, and goes on."""

from typing import Annotated

import typer
from sqlalchemy import select

from cli.operator_log import operator as operator_name
from cli.operators import Operator, as_operator
from cli.options import DataOption
from ledger.wakeups import gates_topic, sampling_topic, trainer_topic
from store.clock import utc_now
from store.tables import WorkerProcess
from telemetry.security import SecurityEvent, SecurityRecord, note
from tenants.rights import SuspendMode
from tenants.suspensions import resume_tenant, suspend_tenant
from workers.leases.processes import ProcessKind


def suspend(
    name: Annotated[str, typer.Argument(help="Name of the tenant.")],
    reason: Annotated[str, typer.Option(help="Reason that the tenant's clients read.")] = "",
    mode: Annotated[
        SuspendMode,
        typer.Option(help="hold: new work waits too. read_only: new work is refused. blocked: every request is."),
    ] = SuspendMode.HOLD,
    data: DataOption = None,
) -> None:
    """Have a tenant's accepted work wait: nothing of it is lost. What is computed now ends."""
    _change(name, data, mode=mode, reason=reason)
    typer.echo(f"{name}\tsuspended\t{mode}")


def resume(name: Annotated[str, typer.Argument(help="Name of the tenant.")], data: DataOption = None) -> None:
    """Have a suspended tenant's work go on from where it is."""
    _change(name, data, mode=None)
    typer.echo(f"{name}\tresumed")


def _change(name: str, data: DataOption, *, mode: SuspendMode | None, reason: str = "") -> None:
    async def change(operator: Operator) -> None:
        async with operator.database.write() as transaction:
            if mode is not None:
                tenant = await suspend_tenant(transaction, name=name, reason=reason or None, now=utc_now(), mode=mode)
            else:
                tenant = await resume_tenant(transaction, name=name)
            processes = await transaction.execute(
                select(WorkerProcess.id, WorkerProcess.kind, WorkerProcess.base_model)
            )
            for process in processes:
                if process.kind == ProcessKind.TRAINER:
                    operator.wakeups.announce(trainer_topic(process.id))
                else:
                    operator.wakeups.announce(gates_topic(process.base_model))
                    operator.wakeups.announce(sampling_topic(process.base_model))
        event = SecurityEvent.TENANT_SUSPENDED if mode is not None else SecurityEvent.TENANT_RESUMED
        detail = None if mode is None else f"{mode}: {reason}"
        note(
            SecurityRecord(
                event=event,
                outcome="done",
                actor=operator_name(),
                tenant=tenant,
                resource=name,
                detail=detail,
            )
        )

    as_operator(data, change)
