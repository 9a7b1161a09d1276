"""``weft base``: an operator accepts other weights under the name of a base model."""

import typer

from cli.administration import on_database
from cli.base_models import read_base_models
from cli.options import BaseOption, DataOption, load_settings, run_or_explain
from contracts.errors import UnknownBaseModel
from engine.model.fingerprint import weights_fingerprint
from store.database import Database
from store.database_clock import clock_of
from tenants.base_weights import accept_weights

app = typer.Typer(help="Accept other weights under a base model's name.", no_args_is_help=True)


@app.command("accept")
def accept(name: str, base_model: BaseOption = None, data: DataOption = None) -> None:
    """Have NAME stand for the weights in its folder from now on.

    Processes with other weights get no work of it any more. Its runs go on from their adapters, which were trained on the
    weights before.
    """
    settings = load_settings(data=data, base_models=base_model)

    async def change(database: Database) -> str:
        facts = read_base_models(settings).get(name)
        if facts is None:
            raise UnknownBaseModel(f"no base model {name!r}; name its folder with --base-model {name}=PATH")
        fingerprint, clock = weights_fingerprint(facts.path, dtype=settings.base_dtype), await clock_of(database)
        async with database.write() as transaction:
            await accept_weights(transaction, name, fingerprint, clock())
        return f"{name} stands for the weights {fingerprint[:12]} from now on"

    typer.echo(run_or_explain(lambda: on_database(settings, change)))
