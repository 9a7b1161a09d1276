"""``weft checkpoint``: an operator merges an adapter into its base, and takes in adapters that were trained elsewhere."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from cli.administration import on_database
from cli.options import DataOption, load_settings, run_or_explain
from contracts.base_model import BaseModelFacts
from contracts.errors import InvalidRequest, Unavailable
from contracts.operations import LoraSettings
from contracts.paths import Segment, check_name, parse_path
from store.clock import utc_now
from store.data_folder import DataFolder
from store.database import Database
from store.settings import Settings
from tenants.checkpoints import checkpoint_folder, directory_of, new_checkpoint_id
from tenants.imported_checkpoints import ImportedCheckpoint, record_import
from tenants.keys import find_tenant
from tenants.limits import Limits

app = typer.Typer(help="Merge checkpoints into their base, and import adapters.", no_args_is_help=True)

SourceArgument = Annotated[str, typer.Argument(help="A PEFT folder, or tinker://RUN/SEGMENT/NAME of the data folder.")]
BaseFolder = Annotated[Path, typer.Option("--base", help="The base's Hugging Face model folder.")]
DtypeOption = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: the base's own.")]


@app.command("merge")
def merge(
    source: SourceArgument, output: Path, base: BaseFolder, dtype: DtypeOption = None, data: DataOption = None
) -> None:
    """Write base and adapter as one Hugging Face model folder OUTPUT, which must not exist."""
    run_or_explain(lambda: _merge(load_settings(data=data), source, output, base, dtype))
    typer.echo(f"wrote {output}")


@app.command("import")
def import_checkpoint(
    source: Annotated[Path, typer.Argument(help="A folder as PEFT wrote it, or a tar of it, plain or gzip.")],
    tenant: Annotated[str, typer.Option(help="Name of the tenant that is to own the checkpoint.")],
    base_model: Annotated[str, typer.Option("--base-model", metavar="[NAME=]PATH", help="The base, as it is served.")],
    name: Annotated[str, typer.Option(help="Name of the checkpoint.")] = "imported",
    sampler: Annotated[
        bool, typer.Option("--sampler", help="Import sampler weights; default: a training checkpoint.")
    ] = False,
    data: DataOption = None,
) -> None:
    """Take in an adapter as a tenant's checkpoint, checked as if a stranger had sent it. Prints its tinker:// path."""
    segment = Segment.SAMPLER_WEIGHTS if sampler else Segment.WEIGHTS
    settings = load_settings(data=data)
    typer.echo(run_or_explain(lambda: _import(settings, source, tenant, base_model, check_name(name, "name"), segment)))


def _merge(settings: Settings, source: str, output: Path, base: Path, dtype: str | None) -> None:
    # Imported late, so that `weft --help` stays quick.
    from engine.model.atomic_folder import write_atomically
    from engine.model.merged_model import DTYPES, MergeSource

    if output.exists():
        raise InvalidRequest(f"{output} exists already; name a folder that does not")
    if dtype is not None and dtype not in DTYPES:
        raise InvalidRequest(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    adapter = Path(source)
    if source.startswith("tinker://"):
        path = parse_path(source)

        async def look(database: Database) -> str:
            async with database.read() as session:
                return await checkpoint_folder(session, path)

        adapter = DataFolder(settings.data_dir).path(on_database(settings, look))
    merged = MergeSource(base, adapter, dtype)

    def tell(done: int, total: int) -> None:
        typer.echo(f"{done} of {total} bytes", err=True)

    write_atomically(output.absolute(), lambda folder: merged.write(folder, tell))


def _import(settings: Settings, source: Path, tenant: str, spec: str, name: str, segment: Segment) -> str:
    # Imported late, so that `weft --help` stays quick.
    from cli.base_models import read_base_models

    if not source.exists():
        raise InvalidRequest(f"{source} is not there")
    (facts,) = read_base_models(settings.model_copy(update={"base_models": (spec,)})).values()
    folder, checkpoint = DataFolder(settings.data_dir), new_checkpoint_id()
    size, lora = _taken_in(settings, source, facts, folder.path(directory_of(checkpoint)))

    async def record(database: Database) -> str:
        async with database.write() as transaction:
            owner = await find_tenant(transaction, name=tenant)
            new = ImportedCheckpoint(checkpoint, facts.name, lora, segment, name, size, ttl_seconds=None)
            return str(await record_import(transaction, owner, new, utc_now, Limits.of(settings)))

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
        with tempfile.TemporaryDirectory(dir=settings.data_dir) as work:
            weights = import_adapter(source, Path(work), base, bounds)
    except OSError as error:
        raise InvalidRequest(f"{source} cannot be taken in: {error}") from error
    return write_imported(directory, base, weights), weights.settings
