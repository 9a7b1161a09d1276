"""``weft base``: an operator looks at the weights that base models stand for, and accepts others under a name."""

from typing import Annotated

import typer

from api.admin.bases import AcceptedWeights, BaseBody
from api.admin.bodies import MOST_ROWS
from cli.admin_client import AdminClient, segment
from cli.admin_command import Shown, admin_command
from cli.base_models import read_base_models
from cli.options import BaseOption, load_settings
from contracts.errors import UnknownBaseModel
from engine.model.fingerprint import weights_fingerprint

app = typer.Typer()

FingerprintOption = Annotated[
    str | None, typer.Option(help="The weights' fingerprint, where their folder is not on this machine.")
]


@admin_command(app, "list")
def list_all(admin: AdminClient) -> Shown:
    """List the base models that were ever served: name, fingerprint of its weights, time of their acceptance."""
    found = admin.page("/bases", BaseBody, limit=MOST_ROWS)
    return Shown(
        found, [f"{one.base_model}\t{one.fingerprint}\t{one.accepted_at:%Y-%m-%d %H:%M}" for one in found.items]
    )


@admin_command(app, "accept")
def accept(
    admin: AdminClient, name: str, base_model: BaseOption = None, fingerprint: FingerprintOption = None
) -> Shown:
    """Have NAME stand for the weights in its folder from now on.

    Processes with other weights get no work of it any more. Its runs go on from their adapters, which were trained on the
    weights before. The folder is read on this machine, also with ``--url``.
    """
    told = AcceptedWeights(fingerprint=_of_folder(name, base_model) if fingerprint is None else fingerprint)
    made = admin.send("PUT", f"/bases/{segment(name)}", BaseBody, told)
    return Shown(made, [f"{name} stands for the weights {made.fingerprint[:12]} from now on"])


def _of_folder(name: str, base_models: list[str] | None) -> str:
    settings = load_settings(base_models=base_models)
    facts = read_base_models(settings).get(name)
    if facts is None:
        raise UnknownBaseModel(f"no base model {name!r}; name its folder with --base-model {name}=PATH")
    return weights_fingerprint(facts.path, dtype=settings.base_dtype)
