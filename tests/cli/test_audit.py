"""Commands and the audit log: each change has its entry with who made it; ``weft audit`` reads and verifies the log."""

import getpass
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
import numpy as np
import pytest
import typer

from cli.administration import on_database
from cli.main import app
from contracts.ledger_records import NewOperation
from contracts.operations import LoraSettings, OperationKind, SampleRequest
from contracts.paths import Segment
from store.clock import utc_now
from store.database import Database
from store.settings import Settings
from store.tables import Run, WorkerProcess
from tenants.audit_digests import begin_digest, close_day, store_digest
from tenants.checkpoints import NewCheckpoint, new_checkpoint_id, record_checkpoint
from tenants.runs import NewRun
from tenants.samplers import NewSampler, create_sampler
from tenants.sessions import NewSession, create_session
from tenants.tenant_names import find_tenant
from testing.operator_command import weft
from testing.runs import create_run
from tests.payloads import digest, stored
from tests.workers.runtimes import make_runtime

BASE = "test/tiny"
AUDITED = {
    "weft tenant create": ["tenant_create", "key_create"],
    "weft tenant set": ["tenant_set"],
    "weft tenant budget": ["tenant_budget"],
    "weft tenant suspend": ["tenant_suspend"],
    "weft tenant resume": ["tenant_resume"],
    "weft tenant delete": ["tenant_delete"],
    "weft tenant restore": ["tenant_restore"],
    "weft operator create": ["operator_create"],
    "weft operator revoke": ["operator_revoke"],
    "weft key create": ["key_create"],
    "weft key set": ["key_set"],
    "weft key rotate": ["key_rotate"],
    "weft key revoke": ["key_revoke"],
    "weft ui open": ["login_invite"],
    "weft project create": ["project_create"],
    "weft project set": ["project_set"],
    "weft gate pause": ["gate_pause"],
    "weft gate resume": ["gate_resume"],
    "weft session end": ["session_end"],
    "weft operation cancel": ["operation_cancel"],
    "weft operation fail": ["operation_fail"],
    "weft operation requeue": ["operation_requeue"],
    "weft run move": ["run_move"],
    "weft run weigh": ["run_weigh"],
    "weft run evict": ["run_evict"],
    "weft trainer drain": ["trainer_drain"],
    "weft trainer work": ["trainer_work"],
    "weft replica drain": ["replica_direct"],
    "weft replica sleep": ["replica_direct"],
    "weft replica work": ["replica_direct"],
    "weft base accept": ["base_accept"],
    "weft price add": ["price_add"],
    "weft tenant usage": ["usage_read"],
    "weft usage show": ["usage_read"],
    "weft usage export": ["usage_read"],
    "weft audit list": ["audit_read"],
    "weft checkpoint delete": ["checkpoint_delete"],
    "weft webhook set": ["webhook_set"],
    "weft webhook secret": ["webhook_read"],
    "weft webhook test": ["webhook_test"],
    "weft webhook retry": ["webhook_retry"],
    "weft webhook delete": ["webhook_delete"],
}
"""Entries that each command makes."""
ELSEWHERE = {"weft checkpoint import", "weft checkpoint merge"}
"""Commands whose entries ``tests/e2e/test_imports_and_merges.py`` looks at, since they need a base and an adapter."""
_LOOKS = "it changes nothing of a tenant's"
UNAUDITED = {
    **dict.fromkeys(("serve", "api", "worker", "pool", "beat", "up", "doctor"), "it is the service, or looks at it"),
    "grafana": "it writes files for another program",
    "model tiny": "it makes a folder",
    "db upgrade": "the schema has its own record of what was applied",
    "housekeeping run": "it does what housekeeping does anyway",
    **dict.fromkeys(("tenant list", "tenant limits", "key list", "project list", "gate show"), _LOOKS),
    **dict.fromkeys(("operation list", "operation show", "run show", "trainer list", "replica show"), _LOOKS),
    **dict.fromkeys(
        ("gate list", "operator list", "process list", "queue placements", "queue show", "replica list"), _LOOKS
    ),
    **dict.fromkeys(("alert list", "process apis", "process ended"), _LOOKS),
    **dict.fromkeys(("run list", "session list", "session show", "tenant shares", "tenant show", "top"), _LOOKS),
    **dict.fromkeys(("housekeeping status", "audit verify", "usage verify", "price list"), _LOOKS),
    **dict.fromkeys(("checkpoint list", "checkpoint show", "base list", "webhook list", "webhook events"), _LOOKS),
}
"""Reason of each command without an entry."""


@dataclass
class Place:
    """A data folder with a tenant, whose key, session, run and samples the commands name."""

    data: Path
    key: str
    session: str
    run: str
    samples: list[str]

    def told(self) -> list[dict]:
        """Return the entries, oldest first, as ``weft audit list`` prints them."""
        found = json.loads(weft(self.data, "audit", "list", "--json", "--limit", "1000"))
        return list(reversed(found["items"]))

    def count(self) -> int:
        with closing(sqlite3.connect(self.data / "weft.db")) as database:
            (count,) = database.execute("SELECT count(*) FROM audit_entries").fetchone()
            return int(count)

    def rows(self) -> list[str]:
        """Return all that the database holds."""
        with closing(sqlite3.connect(self.data / "weft.db")) as database:
            return list(database.iterdump())

    def execute(self, statement: str) -> None:
        with closing(sqlite3.connect(self.data / "weft.db")) as database:
            database.execute(statement)
            database.commit()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    data = tmp_path / "data"
    key = weft(data, "tenant", "create", "cats").strip()
    weft(data, "tenant", "create", "dogs")

    async def fill(database: Database) -> tuple[str, str, list[str]]:
        runtime = make_runtime(database, data, utc_now)
        samples = []
        async with database.write() as transaction:
            tenant = await find_tenant(transaction, name="cats")
            session = await create_session(transaction, tenant, NewSession([], None, "raw", None, None), utc_now)
            run = await create_run(
                transaction, tenant, NewRun(session, 0, BASE, LoraSettings(4, seed=1), None), utc_now
            )
            sampler = await create_sampler(transaction, tenant, NewSampler(session, 1, BASE), utc_now)
            now = utc_now()
            for name in ("trainer-1", "trainer-2"):
                lease = {"started_at": now, "expires_at": now + timedelta(hours=1)}
                transaction.add(
                    WorkerProcess(id=name, kind="trainer", base_model=BASE, host="h", pid=1, drained_at=None, **lease)
                )
                await transaction.flush()
            (await transaction.get_one(Run, run)).trainer_id = "trainer-1"
            kept = NewCheckpoint(new_checkpoint_id(), run, Segment.WEIGHTS, "one", 7, None, True, None)
            await record_checkpoint(transaction, tenant, kept, utc_now)
            await transaction.flush()
            for number in range(3):
                payload = SampleRequest(np.arange(4, dtype=np.int64))
                kind = OperationKind.SAMPLE
                new = NewOperation(tenant, sampler, number, kind, BASE, stored(payload), digest(payload), tokens=4)
                samples.append(str(await runtime.ledger.accept(transaction, new)))
        return session, run, samples

    session, run, samples = on_database(Settings(data_dir=data), fill)
    return Place(data, key, session, run, samples)


def _leaves(group: click.Command, above: str = "weft") -> Iterator[str]:
    inner = getattr(group, "commands", None)
    if inner is None:
        yield above
    for name, command in (inner or {}).items():
        yield from _leaves(command, f"{above} {name}")


def test_each_command_is_audited_or_says_why_not() -> None:
    known = set(_leaves(typer.main.get_command(app)))
    assert known == AUDITED.keys() | ELSEWHERE | {f"weft {name}" for name in UNAUDITED}


@dataclass
class Made:
    """Keys and an event that the commands name, made before them."""

    rotated: str
    second: str
    event: str


def prepared(place: Place, tiny_model_dir: Path) -> tuple[Made, dict[str, list[str]]]:
    """Make what the commands name, and return each command's arguments, in an order in which each has something to do."""
    made = Made(
        rotated=weft(place.data, "key", "create", "--tenant", "cats").strip(),
        second=weft(place.data, "operator", "create").strip(),
        event="",
    )
    weft(place.data, "webhook", "set", "bell", "--tenant", "cats", "--url", "https://bell.example/")
    made.event = weft(place.data, "webhook", "test", "bell", "--tenant", "cats").strip()
    base, of_cats = ("--base", BASE), ("--tenant", "cats")
    return made, {
        "weft tenant create": ["birds"],
        "weft tenant set": ["cats", "--share", "2", "--limit", "open_runs=3"],
        "weft tenant budget": ["cats", "--day", "1000"],
        "weft tenant suspend": ["cats", "--reason", "unpaid", "--mode", "read_only"],
        "weft tenant resume": ["cats"],
        "weft tenant delete": ["cats", "--grace", "1h"],
        "weft tenant restore": ["cats"],
        "weft operator create": [],
        "weft operator revoke": [made.second],
        "weft key create": ["--tenant", "cats", "--role", "viewer", "--note", f"was {place.key}"],
        "weft key set": [made.rotated, "--limit", "train_tokens_per_minute=60"],
        "weft key rotate": [made.rotated],
        "weft key revoke": [made.rotated],
        "weft ui open": [place.key],
        "weft project create": ["archive", "--tenant", "cats"],
        "weft project set": ["archive", "--tenant", "cats", "--limit", "sessions=9"],
        "weft gate pause": ["--adapter", place.run],
        "weft gate resume": ["--adapter", place.run],
        "weft operation cancel": [place.samples[0]],
        "weft operation fail": [place.samples[1]],
        "weft operation requeue": [place.samples[2]],
        "weft run weigh": [place.run, "3"],
        "weft run evict": [place.run],
        "weft run move": [place.run, "--to", "trainer-2", "--reason", "closer"],
        "weft session end": [place.session],
        "weft trainer drain": ["trainer-1"],
        "weft trainer work": ["trainer-1"],
        "weft replica drain": ["vllm-0", *base],
        "weft replica sleep": ["vllm-0", *base],
        "weft replica work": ["vllm-0", *base],
        "weft base accept": [BASE, "--base-model", f"{BASE}={tiny_model_dir}"],
        "weft price add": ["train_tokens", "0.5"],
        "weft tenant usage": ["--tenant", "cats"],
        "weft usage show": ["--tenant", "cats"],
        "weft usage export": ["--tenant", "cats", "--since", str(datetime.now(UTC).date())],
        "weft audit list": ["--tenant", "cats"],
        "weft checkpoint delete": [f"tinker://{place.run}/weights/one"],
        "weft webhook set": ["bell", *of_cats, "--disabled"],
        "weft webhook secret": ["bell", *of_cats],
        "weft webhook test": ["bell", *of_cats],
        "weft webhook retry": ["bell", made.event, *of_cats],
        "weft webhook delete": ["bell", *of_cats],
    }


def test_each_command_that_changes_something_makes_its_entries(place: Place, tiny_model_dir: Path) -> None:
    named, commands = prepared(place, tiny_model_dir)
    assert commands.keys() == AUDITED.keys()
    made = {}
    for command, arguments in commands.items():
        before = place.count()
        weft(place.data, *command.split()[1:], *arguments)
        made[command] = place.count() - before
    assert made == {command: len(actions) for command, actions in AUDITED.items()}
    # Before them the tenants' two each, the key that is rotated, the operator's that is revoked, and the webhook's two.
    told = place.told()[8:]
    assert [entry["action"] for entry in told] == [action for command in commands for action in AUDITED[command]]
    assert {entry["door"] for entry in told} == {"cli"}
    assert all(entry["actor"].startswith(f"{getpass.getuser()}@") for entry in told)
    by_action = {entry["action"]: entry for entry in told}
    assert by_action["tenant_set"]["before"] == {"limits": {}, "share": 1.0, "service_class": "standard"}
    assert by_action["tenant_set"]["after"]["limits"] == {"open_runs": 3}
    assert by_action["tenant_suspend"]["after"] == {"mode": "read_only", "reason": "unpaid"}
    assert by_action["run_move"]["after"] == {"from": "trainer-1", "to": "trainer-2", "reason": "closer"}
    assert [secret for secret in (place.key, named.second, named.rotated) if secret[17:] in json.dumps(told)] == []
    service = {
        "trainer_drain",
        "trainer_work",
        "replica_direct",
        "base_accept",
        "price_add",
        "operator_create",
        "operator_revoke",
    }
    assert {entry["action"] for entry in told if entry["tenant_id"] is None} == service
    assert {entry["project"] for entry in told if entry["action"].startswith(("gate_", "run_", "session_"))} == {
        by_action["tenant_set"]["tenant_id"]
    }


def test_what_a_command_changes_is_not_changed_without_its_entry(place: Place, tiny_model_dir: Path) -> None:
    """Each fails as a whole while no entry can be written, and changes no row of any table; then it does its work."""
    _, commands = prepared(place, tiny_model_dir)
    refuse = "CREATE TRIGGER refuse BEFORE INSERT ON audit_entries BEGIN SELECT RAISE(ABORT, 'no room'); END"
    for command, arguments in commands.items():
        before = place.rows()
        place.execute(refuse)
        with pytest.raises(RuntimeError):
            weft(place.data, *command.split()[1:], *arguments)
        place.execute("DROP TRIGGER refuse")
        assert place.rows() == before, command
        weft(place.data, *command.split()[1:], *arguments)


def test_a_command_that_is_refused_or_repeated_makes_none(place: Place) -> None:
    before = place.count()
    for arguments in (["tenant", "set", "nobody", "--share", "2"], ["key", "revoke", "tml-000000000000"]):
        with pytest.raises(RuntimeError):
            weft(place.data, *arguments)
    weft(place.data, "project", "create", "one", "--tenant", "cats")
    weft(place.data, "project", "create", "one", "--tenant", "cats")
    weft(place.data, "key", "revoke", place.key)
    weft(place.data, "key", "revoke", place.key)
    assert place.count() == before + 2


def test_the_list_is_filtered_and_readable(place: Place) -> None:
    lines = weft(place.data, "audit", "list", "--tenant", "dogs").splitlines()
    assert [line.split("\t")[4] for line in lines] == ["key_create", "tenant_create"]
    assert all(line.split("\t")[1] == "dogs" for line in lines)
    today = datetime.now(UTC).date()
    assert len(weft(place.data, "audit", "list", "--day", str(today), "--action", "tenant_create").splitlines()) == 2
    assert weft(place.data, "audit", "list", "--day", str(today - timedelta(days=2))) == ""
    assert len(weft(place.data, "audit", "list", "--resource", "key", "--limit", "1").splitlines()) == 1
    for wrong in ("yesterday", "9999-12-31"):
        with pytest.raises(RuntimeError, match="--day takes a day"):
            weft(place.data, "audit", "list", "--day", wrong)


def test_verify_finds_what_was_removed_with_the_trigger_off(place: Place) -> None:
    assert "as written\tdays=0 entries=0" in weft(place.data, "audit", "verify")

    async def close(database: Database) -> None:
        async with database.write() as transaction:
            day = await close_day(transaction, now=utc_now() + timedelta(days=1))
            assert day is not None
            await store_digest(transaction, await (await begin_digest(transaction, day)).finish(transaction))

    on_database(Settings(data_dir=place.data), close)
    found = weft(place.data, "audit", "verify")
    assert "as written\tdays=1 entries=4" in found
    assert "newest digest" in found
    with closing(sqlite3.connect(place.data / "weft.db")) as database:
        with pytest.raises(sqlite3.DatabaseError, match="only grows"):
            database.execute("DELETE FROM audit_entries WHERE id = 2")
        database.execute("DROP TRIGGER audit_entries_delete")
        database.execute("DELETE FROM audit_entries WHERE id = 2")
        database.commit()
    with pytest.raises(RuntimeError, match="made of 4 entries, and there are 3"):
        weft(place.data, "audit", "verify")
