"""Models that the playground offers, each with a label that begins with what tells it apart from the others."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from api.dashboard.rendering import short_id
from api.services import ApiServices
from contracts.paths import Segment
from tenants.checkpoint_lists import CheckpointFilter, list_checkpoints
from tenants.checkpoints import path_of, sampled_runs
from tenants.rights import Principal
from tenants.run_lists import listed_runs
from tenants.runs import run_pages
from tenants.version_facts import version_facts

_SHOWN = 100
_ENTRIES = 3
"""Entries of a run's metadata in a label."""
_LONGEST = 30
"""Characters of a name, and of an entry, in a label."""
_SCHEME = "tinker://"


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A model: ``name`` is what a request sends, ``label`` is what people read."""

    name: str
    label: str


async def model_choices(caller: Principal, services: ApiServices) -> dict[str, list[ModelChoice]]:
    """Return the caller's newest adapters and versions and the served bases, by the headings of their groups.

    A run without sampler weights, or of a base that is not served, cannot be sampled and is left out.
    """
    async with services.runtime.database.survey() as session:
        pages = run_pages(session, caller.reach, limit=_SHOWN, bases=services.bases)
        newest = [run async for some in pages for run in some]
        ready = await sampled_runs(session, caller.tenant, {run.id for run in newest}, services.runtime.clock)
        runs = [run for run in newest if run.id in ready]
        which = CheckpointFilter(
            caller.reach, services.runtime.clock(), (Segment.SAMPLER_WEIGHTS,), bases=services.bases
        )
        saved = await list_checkpoints(session, which, limit=_SHOWN)
        facts = await version_facts(session, caller.reach, [one.id for one in saved])
        missing = {one.run_id for one in saved} - {run.id for run in runs}
        others = await listed_runs(session, caller.reach, sorted(missing))
    told = {run.id: run.user_metadata for run in (*runs, *(one.run for one in others))}
    groups = {
        "Adapters (live)": [ModelChoice(run.id, _joined([short_id(run.id)], run.user_metadata)) for run in runs],
        "Versions": [
            _version(str(path_of(one)), facts[one.id].step if one.id in facts else None, told.get(one.run_id))
            for one in saved
        ],
        "Base models": [ModelChoice(name, name) for name in services.bases],
    }
    return {heading: choices for heading, choices in groups.items() if choices}


def label_of(name: str, known: Iterable[ModelChoice]) -> str:
    """Return a model's label: the one it is offered with, or what its name alone tells."""
    for one in known:
        if one.name == name:
            return one.label
    return _version(name, None, None).label if name.startswith(_SCHEME) else short_id(name)


def _version(path: str, step: int | None, metadata: Mapping[str, str] | None) -> ModelChoice:
    run, _, rest = path.removeprefix(_SCHEME).partition("/")
    parts = [_cut(rest.rpartition("/")[2])] if rest else []
    if step is not None:
        parts.append(f"step {step}")
    return ModelChoice(path, _joined([*parts, short_id(run)], metadata))


def _joined(parts: list[str], metadata: Mapping[str, str] | None) -> str:
    entries = list((metadata or {}).items())
    told = [_cut(f"{name}={value}") for name, value in entries[:_ENTRIES]]
    more = [f"+{len(entries) - _ENTRIES}"] if len(entries) > _ENTRIES else []
    return " · ".join([*parts, *told, *more])


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
