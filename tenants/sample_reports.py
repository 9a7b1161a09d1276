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
from store.tables import Checkpoint, Operation
from store.tables import SampleReport as Row
from tenants.reach import Owner, check_lane, tenant_of


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


async def report_of(session: AsyncSession, owner: Owner, operation: str) -> tuple[SampleReport, list[str]]:
    """Return the report and the versions that it names: deleted versions first, then the others, oldest first.

    Raises ``NotFound``.
    """
    of_sample = select(Row.body, Operation.lane).join(Operation, Operation.id == Row.operation_id)
    own = (Row.operation_id == operation, Row.tenant_id == tenant_of(owner))
    row = (await session.execute(of_sample.where(*own))).one_or_none()
    missing = NotFound(f"no report of a sample {operation[:100]!r}: unknown, not finished or pruned")
    if row is None:
        raise missing
    await check_lane(session, owner, row.lane, missing)
    report = decode_report(row.body)
    named = [version for version in report.versions() if version is not None]
    rows = await session.scalars(
        select(Checkpoint.id).where(Checkpoint.id.in_(named)).order_by(Checkpoint.created_at, Checkpoint.id)
    )
    found = list(rows)
    return report, [*(version for version in named if version not in found), *found]


async def prune_reports(transaction: AsyncSession, operations: Collection[str]) -> None:
    """Delete the operations' reports."""
    await transaction.execute(delete(Row).where(Row.operation_id.in_(operations)))
