"""Pages of checkpoints: list, time to live, sharing, links to files, and deletion by name or by ticks."""

from collections.abc import Mapping
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response

from api.checkpoint_records import CheckpointType
from api.dashboard.form_values import body_of, integer, text
from api.dashboard.forms import Form, see
from api.dashboard.rendering import page
from api.dashboard.web_session import COUNTED, PageCheckpointWriter, PageDownloader, PageReader
from api.json_body import PathId
from api.paging import PageRequest
from api.route_bounds import bounded
from api.services import ApiServices, Services
from api.tinker.checkpoints import TtlRequest, set_ttl
from api.tinker.downloads import archive
from api.tinker.sharing import publish, unpublish
from api.weft.checkpoints import CheckpointPaths, KeptCheckpoint, KeptFilter, delete_many, kept_checkpoints
from api.wire.request_model import NO_NUL
from contracts.errors import InvalidRequest, NotFound
from contracts.paths import parse_path
from tenants.checkpoint_lists import unlisted_storage
from tenants.list_places import Place
from tenants.rights import Principal

router = APIRouter(prefix="/checkpoints", tags=["checkpoints"])

_DAY_SECONDS = 86_400
_SHOWN = 50
_TICK = "tick:"
_ONE = "/{run_id}/{segment}/{name}"
_TYPES: Mapping[str, CheckpointType] = {"training": "training", "sampler": "sampler", "external": "external"}
Text = Annotated[str, Query(max_length=200, pattern=NO_NUL)]


@router.get("")
async def checkpoints_page(
    caller: PageReader,
    services: Services,
    request: Request,
    run: Text = "",
    type: Text = "",
    show: Text = "",
    cursor: Text = "",
) -> Response:
    """Show a page of checkpoints: of one run or type; ``show`` is ``public``, or ``expiring`` for those with a day left."""
    asked = KeptFilter(
        run=run or None,
        type=_TYPES.get(type),
        public=True if show == "public" else None,
        expires_within=_DAY_SECONDS if show == "expiring" else None,
    )
    place = PageRequest(_SHOWN, 0, Place.parse(cursor) if cursor else None)
    found = await kept_checkpoints(caller, services, place, asked)
    given = {"run": run, "type": type, "show": show, "cursor": cursor}
    beside = None
    if not any(given.values()):
        async with services.runtime.database.survey() as session:
            beside = await unlisted_storage(session, caller.reach, services.runtime.clock())
    return page(request, "tenant/checkpoints.html", found=found, given=given, beside=beside)


@router.post("/delete")
@bounded(goes_on=True)
async def delete_ticked(caller: PageCheckpointWriter, services: Services, request: Request, form: Form) -> Response:
    """Delete the ticked checkpoints, once the form tells how many they are; without that, ask."""
    paths = [name.removeprefix(_TICK) for name in form if name.startswith(_TICK)]
    if not paths:
        raise InvalidRequest("no checkpoint is ticked; go back and tick those that are to be deleted")
    if text(form, "confirmed") != str(len(paths)):
        return page(request, "tenant/checkpoints_delete.html", paths=paths)
    await delete_many(caller, services, body_of(CheckpointPaths, paths=paths))
    return see("/ui/checkpoints")


@router.get(_ONE)
async def checkpoint_page(
    caller: PageReader, services: Services, request: Request, run_id: PathId, segment: PathId, name: PathId
) -> Response:
    """Show one checkpoint with the forms that change it. Raises ``NotFound``."""
    return page(
        request,
        "tenant/checkpoint.html",
        one=await _found(caller, services, run_id, f"{segment}/{name}"),
        link=None,
        problem="",
    )


@router.post(_ONE + "/ttl")
async def set_time_to_live(
    caller: PageCheckpointWriter, services: Services, run_id: PathId, segment: PathId, name: PathId, form: Form
) -> Response:
    """Let the checkpoint expire after so many hours, or keep it if the field is empty."""
    hours = integer(form, "hours")
    body = TtlRequest(ttl_seconds=None if hours is None else 3600 * hours)
    await set_ttl(caller, services, run_id, f"{segment}/{name}", body)
    return see(_address(run_id, segment, name))


@router.post(_ONE + "/publish")
async def publish_one(
    caller: PageCheckpointWriter, services: Services, run_id: PathId, segment: PathId, name: PathId
) -> Response:
    """Let every tenant sample and train from the checkpoint."""
    await publish(caller, services, run_id, segment, name)
    return see(_address(run_id, segment, name))


@router.post(_ONE + "/unpublish")
@bounded(goes_on=True)
async def unpublish_one(
    caller: PageCheckpointWriter, services: Services, run_id: PathId, segment: PathId, name: PathId
) -> Response:
    """Take the publication back."""
    await unpublish(caller, services, run_id, segment, name)
    return see(_address(run_id, segment, name))


@router.post(_ONE + "/download", dependencies=[COUNTED])
@bounded(goes_on=True)
async def download(
    caller: PageDownloader, services: Services, request: Request, run_id: PathId, segment: PathId, name: PathId
) -> Response:
    """Make a link to the checkpoint's files as one tar, and show it: it needs no key, and ends after an hour."""
    made = await archive(caller, services, request, run_id, segment, name)
    one = await _found(caller, services, run_id, f"{segment}/{name}")
    return page(request, "tenant/checkpoint.html", one=one, link=made.headers["location"], problem="")


@router.post(_ONE + "/delete")
@bounded(goes_on=True)
async def delete_one(
    caller: PageCheckpointWriter, services: Services, run_id: PathId, segment: PathId, name: PathId, form: Form
) -> Response:
    """Delete the checkpoint, if its name was typed. Raises ``InvalidRequest``, ``NotFound``."""
    if text(form, "name") != name:
        raise InvalidRequest(
            "the name that was typed is not the checkpoint's, so nothing was deleted; go back and type it"
        )
    path = f"tinker://{run_id}/{segment}/{name}"
    deleted = await delete_many(caller, services, body_of(CheckpointPaths, paths=[path]))
    if not deleted.deleted:
        raise NotFound(f"no checkpoint {path[:300]!r}")
    return see("/ui/checkpoints")


async def _found(caller: Principal, services: ApiServices, run_id: str, checkpoint_id: str) -> KeptCheckpoint:
    """Return the caller's checkpoint. Raises ``NotFound``, ``InvalidRequest``."""
    path = parse_path(f"tinker://{run_id}/{checkpoint_id}", field="checkpoint_id")
    asked = KeptFilter(run=path.run_id, name=path.name)
    found = await kept_checkpoints(caller, services, PageRequest(3, 0), asked)
    for one in found.checkpoints:
        if one.checkpoint_id == path.checkpoint_id:
            return one
    raise NotFound(f"no checkpoint {str(path)[:300]!r}")


def _address(run_id: str, segment: str, name: str) -> str:
    return f"/ui/checkpoints/{quote(run_id, safe=':')}/{quote(segment)}/{quote(name)}"
