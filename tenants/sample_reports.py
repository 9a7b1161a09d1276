"""Sample reports: for each finished sample, a row that says which replicas and weights made it.

A report is written in the transaction of the sample's result and pruned with the result.
"""

from collections.abc import Collection

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import NotFound
from contracts.ids import RequestId, TenantId
from contracts.sample_report import SampleReport, decode_report, encode_report
from store.inserts import insert_unless_present
from store.tables import Checkpoint
from store.tables import SampleReport as Row


async def record_reports(
    transaction: AsyncSession, reports: Collection[tuple[TenantId, RequestId, SampleReport]]
) -> None:
    """Insert the samples' reports. A report that is there already stays."""
    rows = [
        {"operation_id": operation, "tenant_id": tenant, "body": encode_report(report)}
        for tenant, operation, report in reports
    ]
    if rows:
        await transaction.execute(insert_unless_present(transaction, Row), rows)


async def report_of(session: AsyncSession, tenant: TenantId, operation: str) -> tuple[SampleReport, list[str]]:
    """Return the report and the versions that it names: deleted versions first, then the others, oldest first.

    Raises ``NotFound``.
    """
    body = await session.scalar(select(Row.body).where(Row.operation_id == operation, Row.tenant_id == tenant))
    if body is None:
        raise NotFound(f"no report of a sample {operation[:100]!r}: unknown, not finished or pruned")
    report = decode_report(body)
    named = [version for version in report.versions() if version is not None]
    rows = await session.scalars(
        select(Checkpoint.id).where(Checkpoint.id.in_(named)).order_by(Checkpoint.created_at, Checkpoint.id)
    )
    found = list(rows)
    return report, [*(version for version in named if version not in found), *found]


async def prune_reports(transaction: AsyncSession, operations: Collection[str]) -> None:
    """Delete the operations' reports."""
    await transaction.execute(delete(Row).where(Row.operation_id.in_(operations)))
