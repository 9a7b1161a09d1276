"""``weft checkpoint``: lists and deletes checkpoints, merges an adapter into its base, and takes in ones trained elsewhere."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel, ConfigDict

from api.admin.checkpoints import CheckpointBody
from cli.acting import record_command
from cli.admin_client import AdminClient, segment
from cli.admin_command import Done, Shown, admin_command, local_command
from cli.administration import check_is_made, on_database
from cli.options import AfterOption, LimitOption
from cli.tenants import find_tenant as find_tenant_by_name
from cli.times import span
from contracts.base_model import BaseModelFacts
from contracts.errors import InvalidRequest, Unavailable
from contracts.operations import LoraSettings
from contracts.paths import Segment, check_name, parse_path
from store.clock import utc_now
from store.data_folder import DataFolder
from store.database import Database
from store.settings import Settings
from tenants.audit import session_of
from tenants.audit_actions import Action
from tenants.checkpoints import checkpoint_folder, directory_of, new_checkpoint_id
from tenants.imported_checkpoints import ImportedCheckpoint, record_import
from tenants.limits import Limits
from tenants.tenant_names import find_tenant
from tenants.weight_jobs import IMPORTS

app = typer.Typer()

SourceArgument = Annotated[str, typer.Argument(help="A PEFT folder, or tinker://RUN/SEGMENT/NAME of the data folder.")]
BaseFolder = Annotated[Path, typer.Option("--base", help="The base's Hugging Face model folder.")]
DtypeOption = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: the base's own.")]


PathArgument = Annotated[str, typer.Argument(help="tinker://RUN/SEGMENT/NAME.")]


@admin_command(app, "list")
def list_all(
    admin: AdminClient,
    tenant: Annotated[str | None, typer.Option(help="Name of their tenant.")] = None,
    run: Annotated[str | None, typer.Option(help="Their run's id.")] = None,
    expires: Annotated[str | None, typer.Option(help="Only those that expire within a time such as 24h.")] = None,
    most: LimitOption = 50,
    after: AfterOption = None,
) -> Shown:
    """List checkpoints: path, size in bytes, time, end."""
    owner = None if tenant is None else find_tenant_by_name(admin, tenant).id
    within = None if expires is None else int(span(expires, "--expires").total_seconds())
    found = admin.page(
        "/checkpoints", CheckpointBody, tenant_id=owner, run=run, expires_within=within, limit=most, after=after
    )
    return Shown(found, ["\t".join(_cells(one)) for one in found.items])


@admin_command(app, "show")
def show(admin: AdminClient, path: PathArgument) -> Shown:
    """Show a checkpoint, also one that has expired and is not removed yet."""
    found = admin.get(_below(path), CheckpointBody)
    cells = zip(("path", "size", "created", "expires"), _cells(found), strict=True)
    lines = [f"{name}\t{cell}" for name, cell in cells]
    return Shown(found, [*lines, f"id\t{found.id}", f"tenant\t{found.tenant_id}", f"published\t{found.public}"])


@admin_command(app, "delete")
def delete(admin: AdminClient, path: PathArgument) -> Shown:
    """Delete a checkpoint, as its tenant may. Its files go once no sample and no replay reads them."""
    admin.delete(_below(path))
    return Shown(Done(done="deleted"), [f"{path}\tdeleted"])


def _below(text: str) -> str:
    path = parse_path(text)
    return f"/checkpoints/{segment(path.run_id)}/{path.segment}/{segment(path.name)}"


def _cells(one: CheckpointBody) -> list[str]:
    kept = "no end" if one.listed else "until unused"
    end = kept if one.expires_at is None else f"until {one.expires_at:%Y-%m-%d %H:%M}"
    return [one.path, str(one.size_bytes), f"{one.created_at:%Y-%m-%d %H:%M}", end]


class MergedFolder(BaseModel):
    """A folder that was written."""

    model_config = ConfigDict(frozen=True)

    output: str


class ImportedPath(BaseModel):
    """A checkpoint that was taken in."""

    model_config = ConfigDict(frozen=True)

    path: str


@local_command(app, "merge", needs="the data folder's files")
def merge(
    settings: Settings, source: SourceArgument, output: Path, base: BaseFolder, dtype: DtypeOption = None
) -> Shown:
    """Write base and adapter as one Hugging Face model folder OUTPUT, which must not exist. On the service's machine only."""
    _merge(settings, source, output, base, dtype)
    return Shown(MergedFolder(output=str(output)), [f"wrote {output}"])


@local_command(app, "import", needs="the data folder's files")
def import_checkpoint(
    settings: Settings,
    source: Annotated[Path, typer.Argument(help="A folder as PEFT wrote it, or a tar of it, plain or gzip.")],
    tenant: Annotated[str, typer.Option(help="Name of the tenant that is to own the checkpoint.")],
    base_model: Annotated[str, typer.Option("--base-model", metavar="[NAME=]PATH", help="The base, as it is served.")],
    name: Annotated[str, typer.Option(help="Name of the checkpoint.")] = "imported",
    sampler: Annotated[
        bool, typer.Option("--sampler", help="Import sampler weights; default: a training checkpoint.")
    ] = False,
) -> Shown:
    """Take in an adapter as a tenant's checkpoint, checked as if a stranger had sent it. Prints its tinker:// path.

    On the service's machine only; a tenant's own key may import over HTTP.
    """
    segment = Segment.SAMPLER_WEIGHTS if sampler else Segment.WEIGHTS
    path = _import(settings, source, tenant, base_model, check_name(name, "name"), segment)
    return Shown(ImportedPath(path=path), [path])


def _merge(settings: Settings, source: str, output: Path, base: Path, dtype: str | None) -> None:
    # Imported late, so that `weft --help` stays quick.
    from engine.model.atomic_folder import write_atomically
    from engine.model.merged_model import DTYPES, MergeSource
    from engine.model.skeleton import read_names

    if output.exists():
        raise InvalidRequest(f"{output} exists already; name a folder that does not")
    if dtype is not None and dtype not in DTYPES:
        raise InvalidRequest(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    adapter = Path(source)
    if source.startswith("tinker://"):
        path = parse_path(source)

        async def look(database: Database) -> str:
            async with database.write() as transaction:
                found = await checkpoint_folder(transaction, path)
                await record_command(
                    transaction,
                    Action.CHECKPOINT_READ,
                    str(path),
                    tenant=found.tenant,
                    session_id=session_of(path.run_id),
                    after={"purpose": "merge"},
                )
                return found.directory

        adapter = DataFolder(settings.data_dir).path(on_database(settings, look))
    merged = MergeSource(base, read_names(base), adapter, dtype)

    def tell(done: int, total: int) -> None:
        typer.echo(f"{done} of {total} bytes", err=True)

    write_atomically(output.absolute(), lambda folder: merged.write(folder, tell))


def _import(settings: Settings, source: Path, tenant: str, spec: str, name: str, segment: Segment) -> str:
    # Imported late, so that `weft --help` stays quick.
    from cli.base_models import read_base_models

    check_is_made(settings)
    if not source.exists():
        raise InvalidRequest(f"{source} is not there")
    (facts,) = read_base_models(settings.model_copy(update={"base_models": (spec,)})).values()
    folder, checkpoint = DataFolder(settings.data_dir), new_checkpoint_id()
    size, lora = _taken_in(settings, source, facts, folder.path(directory_of(checkpoint)))

    async def record(database: Database) -> str:
        async with database.write() as transaction:
            owner = await find_tenant(transaction, name=tenant)
            new = ImportedCheckpoint(checkpoint, facts.name, lora, segment, name, size, ttl_seconds=None)
            path = await record_import(transaction, owner, new, utc_now, Limits.of(settings))
            await record_command(
                transaction,
                Action.CHECKPOINT_CREATE,
                str(path),
                tenant=owner,
                session_id=session_of(path.run_id),
                after={"size_bytes": size},
            )
            return str(path)

    try:
        return on_database(settings, record)
    except Unavailable:
        # The checkpoint may have been recorded. Housekeeping removes the folder if not.
        raise
    except BaseException:
        folder.remove(directory_of(checkpoint))
        raise


def _taken_in(settings: Settings, source: Path, facts: BaseModelFacts, directory: Path) -> tuple[int, LoraSettings]:
    """Write the checked adapter into ``directory``; return its size in bytes and its settings."""
    from engine.model.adapter_import import ImportBounds, import_adapter, write_imported
    from engine.model.base import BaseModel

    base = BaseModel.load(facts, device="cpu")
    bounds = ImportBounds(settings.max_import_bytes, settings.max_rank)
    try:
        # Where housekeeping finds what a command leaves that is killed.
        staged = DataFolder(settings.data_dir).path(IMPORTS)
        staged.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=staged) as work:
            weights = import_adapter(source, Path(work), base, bounds)
    except OSError as error:
        raise InvalidRequest(f"{source} cannot be taken in: {error}") from error
    return write_imported(directory, base, weights), weights.settings
