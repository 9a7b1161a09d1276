"""``weft session``: an operator ends a client's session."""

from typing import Annotated

import typer

from cli.operators import Operator, as_operator
from cli.options import DataOption
from contracts.errors import Cancelled, NotFound
from contracts.ids import TenantId
from ledger.cancellation import OfSession
from store.clock import utc_now
from store.tables import Session
from tenants.sessions import finish_session

app = typer.Typer(help="End clients' sessions.", no_args_is_help=True)


@app.command("end")
def end(
    session: Annotated[str, typer.Argument(help="The session's id: the beginning of its runs' ids.")],
    reason: Annotated[str, typer.Option(help="Reason that the tenant reads.")] = "",
    data: DataOption = None,
) -> None:
    """End a session: its client is told to stop, and what it has pending is cancelled. Checkpoints stay."""

    async def change(operator: Operator) -> int:
        async with operator.database.write() as transaction:
            found = await transaction.get(Session, session)
            if found is None:
                raise NotFound(f"no session {session[:100]!r}; a run's id begins with its session's")
            await finish_session(
                transaction,
                TenantId(found.tenant_id),
                session,
                reason="ended_by_operator",
                detail=reason or None,
                clock=utc_now,
            )
            told = f"cancelled: the service's operator has ended the session{f': {reason}' if reason else ''}"
            return len(await operator.ledger.cancel(transaction, OfSession(session), Cancelled(told)))

    typer.echo(f"{session}\tended\t{as_operator(data, change)} operations cancelled")
