"""``weft operator``: makes, lists and revokes operators' keys, on the service's machine only: no API makes one."""

from datetime import datetime
from typing import Annotated, Literal, Self

import typer
from pydantic import BaseModel, ConfigDict

from cli.acting import record_command
from cli.admin_command import Done, Shown, local_command
from cli.administration import on_database
from cli.operator_log import operator
from cli.times import moment
from store.clock import utc_now
from store.database import Database
from store.settings import Settings
from store.tables import OperatorKey
from telemetry.security import SecurityEvent, SecurityRecord, note
from tenants.audit_actions import Action
from tenants.operator_keys import create_operator_key, list_operator_keys, revoke_operator_key

app = typer.Typer()

_NEEDS = "the service's database, since no key may make or end operators' keys"


class OperatorKeyBody(BaseModel):
    """An operator's key, as it is listed. Times are UTC."""

    model_config = ConfigDict(frozen=True)

    prefix: str
    state: Literal["live", "expired", "revoked"]
    note: str
    created_at: datetime
    expires_at: datetime | None
    last_used_at: datetime | None

    @classmethod
    def of(cls, key: OperatorKey) -> Self:
        """Return the body of a row."""
        ended = key.expires_at is not None and key.expires_at <= utc_now()
        return cls(
            prefix=key.prefix,
            state="revoked" if key.revoked_at is not None else "expired" if ended else "live",
            note=key.note,
            created_at=key.created_at,
            expires_at=key.expires_at,
            last_used_at=key.last_used_at,
        )


class OperatorKeyList(BaseModel):
    """Every operator's key."""

    model_config = ConfigDict(frozen=True)

    items: list[OperatorKeyBody]


class NewOperatorKey(BaseModel):
    """A key that was made, with its secret."""

    model_config = ConfigDict(frozen=True)

    prefix: str
    secret: str


@local_command(app, "create", needs=_NEEDS)
def create(
    settings: Settings,
    purpose: Annotated[str, typer.Option("--note", help="Purpose of the key.")] = "",
    expires: Annotated[str, typer.Option(help="End of the key: 30d, or 2027-01-31.")] = "",
) -> Shown:
    """Make an operator's key, which may do everything that `weft` does. It is shown only once."""

    async def make(database: Database) -> NewOperatorKey:
        ends = moment(expires, "--expires", utc_now()) if expires else None
        async with database.write() as transaction:
            made = await create_operator_key(transaction, note=purpose, expires_at=ends, clock=utc_now)
            told = {"note": purpose or None, "expires_at": ends}
            await record_command(transaction, Action.OPERATOR_CREATE, made.prefix, tenant=None, after=told)
        _note(SecurityEvent.KEY_CREATED, made.prefix)
        return NewOperatorKey(prefix=made.prefix, secret=made.secret)

    made = on_database(settings, make)
    return Shown(made, [made.secret])


@local_command(app, "list", needs=_NEEDS)
def list_all(settings: Settings) -> Shown:
    """List operators' keys: first characters, state, creation, end, last use, note."""

    async def look(database: Database) -> list[OperatorKeyBody]:
        async with database.read() as session:
            return [OperatorKeyBody.of(key) for key in await list_operator_keys(session)]

    found = on_database(settings, look)
    return Shown(OperatorKeyList(items=found), [_line(key) for key in found])


@local_command(app, "revoke", needs=_NEEDS)
def revoke(
    settings: Settings,
    key: Annotated[str, typer.Argument(help="The key, or its first part as `weft operator list` shows it.")],
) -> Shown:
    """Revoke an operator's key at once."""

    async def change(database: Database) -> None:
        async with database.write() as transaction:
            prefix = await revoke_operator_key(transaction, key=key, clock=utc_now)
            await record_command(transaction, Action.OPERATOR_REVOKE, prefix, tenant=None)
        _note(SecurityEvent.KEY_REVOKED, prefix)

    on_database(settings, change)
    return Shown(Done(done="revoked"), ["revoked"])


def _note(event: SecurityEvent, prefix: str) -> None:
    note(SecurityRecord(event=event, outcome="done", actor=operator(), resource=prefix, detail="operator's key"))


def _line(key: OperatorKeyBody) -> str:
    end = "no end" if key.expires_at is None else f"until {key.expires_at:%Y-%m-%dT%H:%M:%SZ}"
    used = "never used" if key.last_used_at is None else f"used {key.last_used_at:%Y-%m-%d %H:%M}"
    return "\t".join([f"{key.prefix}-…", key.state, f"{key.created_at:%Y-%m-%d %H:%M}", end, used, key.note])
