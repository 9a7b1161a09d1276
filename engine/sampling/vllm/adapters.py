"""Adapter versions on a vLLM server: each loaded once for all its requests, the least recently used evicted first.

Owners of requests take turns at the places, because the server itself loads what it is sent in the order in which it came.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from contracts.errors import EngineFailure, InvalidRequest, WeftError
from engine.sampling.background_tasks import BackgroundTasks
from engine.sampling.load_turns import LoadTurns
from engine.sampling.replica import AdapterVersion
from engine.sampling.vllm.adapter_files import check_adapter
from engine.sampling.vllm.http import Answer, VllmHttp
from engine.sampling.vllm.messages import ModelList
from engine.sampling.vllm.settings import VllmReplicaSettings

LOAD, UNLOAD, MODELS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/models"
_LOADS_AT_ONCE = 4
"""Most loads that wait for the server, which makes one after the other."""
_log = logging.getLogger(__name__)
_Unloads = set["asyncio.Task[None]"]


@dataclass(slots=True, eq=False)
class _Entry:
    """A version and its latest load. A ``permanent`` one takes no place and is never evicted."""

    version: AdapterVersion
    owner: str
    """Owner whose place the version takes while it is in use."""
    permanent: bool = False
    loading: asyncio.Task[None] | None = None
    askers: dict[str, float] = field(default_factory=dict)
    """Owners in whose turns the version is loaded, with their shares."""
    place: "asyncio.Future[_Unloads] | None" = None
    """Done once the version has a place, with the unloads that were under way then."""
    has_place: bool = False
    is_forgotten: bool = False
    pins: int = 0
    prolonging: "set[asyncio.Task[Any]]" = field(default_factory=set)

    @property
    def is_loaded(self) -> bool:
        task = self.loading
        return task is not None and task.done() and not task.cancelled() and task.exception() is None


class Pin:
    """A claim that keeps a version on the server. ``name`` is the version's model name there."""

    def __init__(self, entry: _Entry) -> None:
        self.entry = entry
        self.load = entry.loading
        self.name = entry.version.name


class VllmAdapters:
    """At most ``max_resident`` versions on one server. A version that finds all places pinned waits for its owner's turn.

    A name stands for one folder for ever, because vLLM keys its prefix cache by name and folder. No version replaces
    another in place.
    """

    def __init__(self, http: VllmHttp, settings: VllmReplicaSettings, background: BackgroundTasks) -> None:
        self._http = http
        self._settings = settings
        self._background = background
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._unloading: dict[str, asyncio.Task[None]] = {}
        self._turns: LoadTurns[_Entry] = LoadTurns(settings.max_resident)

    def names(self) -> tuple[str, ...]:
        """Return the names of the loaded versions, least recently used first."""
        listed = (entry for entry in self._entries.values() if entry.is_loaded and not entry.is_forgotten)
        return tuple(entry.version.name for entry in listed if not entry.permanent)

    @asynccontextmanager
    async def pin(
        self, version: AdapterVersion, owner: str, share: float = 1.0, *, permanent: bool = False
    ) -> AsyncIterator[Pin]:
        """Keep ``version`` on the server inside the context, or for good if ``permanent``. Load it if it is not there.

        The load waits for a turn of ``owner``. Raises ``InvalidRequest`` for an adapter that the server cannot serve,
        ``EngineFailure`` when it does not load.
        """
        entry = self._entries.get(version.name)
        if entry is None:
            entry = self._entries[version.name] = _Entry(version, owner, permanent)
        elif entry.version.directory != version.directory:
            raise InvalidRequest(f"adapter {version.name} is loaded from another folder; a version needs its own name")
        self._entries.move_to_end(version.name)
        entry.is_forgotten = False
        self._note_owner(entry, owner, share)
        entry.pins += 1
        try:
            if entry.loading is None:
                entry.loading = self._background.start(self._load(entry, again=False))
            await asyncio.shield(entry.loading)
            yield Pin(entry)
        finally:
            self._release(entry)

    def prolong(self, pin: Pin, task: "asyncio.Task[Any]") -> None:
        """Keep the version of ``pin`` on the server at least until ``task`` is done."""
        entry = pin.entry
        entry.pins += 1
        entry.prolonging.add(task)

        def end(_: "asyncio.Task[Any]") -> None:
            entry.prolonging.discard(task)
            self._release(entry)

        task.add_done_callback(end)

    async def load_again(self, pin: Pin) -> None:
        """Load a version that the server has lost since ``pin`` last saw it loaded. Raises as ``pin`` does.

        All requests that find the loss share one load.
        """
        entry = pin.entry
        if entry.loading is pin.load:
            entry.loading = self._background.start(self._load(entry, again=True))
        pin.load = entry.loading
        if entry.loading is not None:
            await asyncio.shield(entry.loading)

    async def unload(self, name: str) -> None:
        """Forget ``name``, and unload it once no request uses it. Returns after the aborts and the unload under way."""
        entry = self._entries.get(name)
        if entry is not None and not entry.permanent:
            entry.is_forgotten = True
            self._evict_if_forgotten(entry)
            if entry.prolonging:
                await asyncio.wait(entry.prolonging)
        unloading = self._unloading.get(name)
        if unloading is not None:
            await asyncio.shield(unloading)

    async def _load(self, entry: _Entry, *, again: bool) -> None:
        is_done = False
        try:
            version, settings = entry.version, self._settings
            # The check comes first, so that an adapter that cannot be served evicts no other version.
            await asyncio.to_thread(
                check_adapter, version, max_rank=settings.max_lora_rank, head_adapters=settings.head_adapters
            )
            if not (again or entry.permanent):
                await self._find_place(entry)
            await self._post_load(version)
            is_done = True
        finally:
            if not is_done and self._entries.get(entry.version.name) is entry:
                del self._entries[entry.version.name]
            self._turns.discard(entry)
            # In the next turn of the event loop: an entry can be evicted only once this task is done.
            asyncio.get_running_loop().call_soon(self._loaded, entry)

    def _loaded(self, entry: _Entry) -> None:
        self._evict_if_forgotten(entry)
        self._hand_out()

    def _note_owner(self, entry: _Entry, owner: str, share: float) -> None:
        """Charge an idle version to its new owner, and let one that waits for a place wait in this owner's turns, too."""
        if _is_idle(entry):
            entry.owner = owner
        elif not entry.is_loaded:
            entry.askers[owner] = share
            if entry.place is not None and not entry.place.done():
                self._turns.add(entry, owner, share)

    async def _find_place(self, entry: _Entry) -> None:
        """Wait for a place, and until few enough of the versions that were evicted before it are left on the server."""
        entry.place = asyncio.get_running_loop().create_future()
        for owner, share in entry.askers.items():
            self._turns.add(entry, owner, share)
        self._hand_out()
        unloads = await entry.place
        same_name = self._unloading.get(entry.version.name)
        if same_name is not None:
            await asyncio.wait([same_name])
        while len(unloads := {task for task in unloads if not task.done()}) > self._settings.spare_places:
            await asyncio.wait(unloads, return_when=asyncio.FIRST_COMPLETED)

    def _hand_out(self) -> None:
        """Give places to versions in their owners' turns, evicting the least recently used version without a pin."""
        while self._turns:
            placed = [entry for entry in self._entries.values() if entry.has_place]
            if sum(not entry.is_loaded for entry in placed) >= _LOADS_AT_ONCE:
                return
            idle = [entry for entry in placed if _is_idle(entry)]
            taken = self._turns.take(Counter(entry.owner for entry in placed if entry not in idle))
            if taken is None:
                return
            entry, owner = taken
            if entry.place is None or entry.place.done():
                # The load was cancelled, and has not ended yet.
                continue
            if len(placed) >= self._settings.max_resident:
                self._evict(idle[0])
            entry.owner, entry.has_place = owner, True
            entry.place.set_result(set(self._unloading.values()))

    def _release(self, entry: _Entry) -> None:
        entry.pins -= 1
        self._evict_if_forgotten(entry)
        self._hand_out()

    def _evict_if_forgotten(self, entry: _Entry) -> None:
        if entry.is_forgotten and _is_idle(entry) and self._entries.get(entry.version.name) is entry:
            self._evict(entry)

    def _evict(self, entry: _Entry) -> None:
        name = entry.version.name
        del self._entries[name]
        self._unloading[name] = self._background.start(self._post_unload(name))

    async def _post_load(self, version: AdapterVersion) -> None:
        body = {"lora_name": version.name, "lora_path": self._settings.seen_path(version.directory)}
        answer = await self._http.post(LOAD, body, self._settings.load_deadline_s)
        if answer.ok or (answer.status == 400 and await self._is_there(version)):
            return
        raise self._refused(version, answer)

    async def _is_there(self, version: AdapterVersion) -> bool:
        """Tell whether the server already has ``version``: an earlier weft loaded it, or the answer to a load was lost."""
        answer = await self._http.get(MODELS, self._settings.load_deadline_s)
        cards = self._http.decode(answer.body, ModelList).data if answer.ok else []
        path = self._settings.seen_path(version.directory)
        return any(card.id == version.name and card.root == path for card in cards)

    def _refused(self, version: AdapterVersion, answer: Answer) -> WeftError:
        _log.warning("adapter %s was not loaded: %d %s", version.name, answer.status, answer.message)
        if answer.status == 500 and "add_lora" in answer.message:
            return InvalidRequest(f"adapter {version.name} does not fit the sampler's base model")
        if answer.status == 400:
            return EngineFailure(f"the replica has something else under adapter {version.name}'s name")
        if answer.status == 404:
            return EngineFailure(
                f"the replica cannot load adapter {version.name}: it must see weft's data folder, under the same path or the one "
                "that WEFT_VLLM_DATA_DIR names, and run with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
            )
        return EngineFailure(f"the replica did not load adapter {version.name} (status {answer.status})")

    async def _post_unload(self, name: str) -> None:
        try:
            answer = await self._http.post(UNLOAD, {"lora_name": name}, self._settings.load_deadline_s)
            if not answer.ok and answer.status != 404:
                _log.warning("adapter %s was not unloaded: %d %s", name, answer.status, answer.message)
        except EngineFailure as error:
            # A version left on the server does no harm: its name stands for the same folder for ever.
            _log.warning("adapter %s was not unloaded: %s", name, error.message)
        finally:
            del self._unloading[name]


def _is_idle(entry: _Entry) -> bool:
    return entry.is_loaded and not entry.pins
