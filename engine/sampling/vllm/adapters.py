"""Adapter versions on a vLLM server: each loaded once however many ask, the least recently used leave first."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from contracts.errors import EngineFailure, InvalidRequest, WeftError
from engine.sampling.background_tasks import Background
from engine.sampling.replica import AdapterVersion
from engine.sampling.vllm.adapter_files import check_adapter
from engine.sampling.vllm.http import Answer, VllmHttp
from engine.sampling.vllm.messages import ModelList
from engine.sampling.vllm.settings import VllmSettings

LOAD, UNLOAD, MODELS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/models"
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Entry:
    """``loading`` is the latest load. One that is ``pinned`` neither counts nor leaves."""

    version: AdapterVersion
    pinned: bool = False
    loading: asyncio.Task[None] | None = None
    has_place: bool = False
    is_forgotten: bool = False
    holders: int = 0
    prolonging: "set[asyncio.Task[Any]]" = field(default_factory=set)

    @property
    def is_loaded(self) -> bool:
        task = self.loading
        return task is not None and task.done() and not task.cancelled() and task.exception() is None


class Hold:
    """A version that stays on the server until let go; ``name`` is its model name there."""

    def __init__(self, entry: _Entry) -> None:
        self.entry = entry
        self.seen = entry.loading
        self.name = entry.version.name


class VllmAdapters:
    """At most ``max_resident`` versions are listed; one that finds them all held waits its turn.

    A name stands for one directory, for vLLM keeps its prefix cache by both; nothing is ever loaded in place.
    """

    def __init__(self, http: VllmHttp, settings: VllmSettings, background: Background) -> None:
        self._http = http
        self._settings = settings
        self._background = background
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._admission = asyncio.Lock()
        self._let_go = asyncio.Event()

    def names(self) -> tuple[str, ...]:
        """Names of the loaded versions, least recently used first."""
        listed = (entry for entry in self._entries.values() if entry.is_loaded and not entry.is_forgotten)
        return tuple(entry.version.name for entry in listed if not entry.pinned)

    @asynccontextmanager
    async def hold(self, version: AdapterVersion, *, pinned: bool = False) -> AsyncIterator[Hold]:
        """Keep ``version`` on the server meanwhile, loading it if need be; ``pinned``, also after that.

        Raises ``InvalidRequest`` for an adapter that the server cannot serve, ``EngineFailure`` when it does not load.
        """
        entry = self._entries.get(version.name)
        if entry is None:
            entry = self._entries[version.name] = _Entry(version, pinned)
        elif entry.version.directory != version.directory:
            raise InvalidRequest(f"adapter {version.name} is loaded from another folder; a version needs its own name")
        self._entries.move_to_end(version.name)
        entry.is_forgotten = False
        entry.holders += 1
        try:
            if entry.loading is None:
                entry.loading = self._background.start(self._load(entry, again=False))
            await asyncio.shield(entry.loading)
            yield Hold(entry)
        finally:
            self._release(entry)

    def prolong(self, hold: Hold, task: "asyncio.Task[Any]") -> None:
        """Hold it until ``task``, which nobody waits for, is done, too."""
        entry = hold.entry
        entry.holders += 1
        entry.prolonging.add(task)

        def end(_: "asyncio.Task[Any]") -> None:
            entry.prolonging.discard(task)
            self._release(entry)

        task.add_done_callback(end)

    async def load_again(self, hold: Hold) -> None:
        """Load what the server has lost since ``hold`` began, once however many find out. Raises as ``hold`` does."""
        entry = hold.entry
        if entry.loading is hold.seen:
            entry.loading = self._background.start(self._load(entry, again=True))
        hold.seen = entry.loading
        if entry.loading is not None:
            await asyncio.shield(entry.loading)

    async def unload(self, name: str) -> None:
        """Forget ``name``; who holds it goes on, and the server after them. Returns once what was left is over."""
        entry = self._entries.get(name)
        if entry is not None and not entry.pinned:
            entry.is_forgotten = True
            self._leave_if_forgotten(entry)
            if entry.prolonging:
                await asyncio.wait(entry.prolonging)
        leaving = self._leaving.get(name)
        if leaving is not None:
            await asyncio.shield(leaving)

    async def _load(self, entry: _Entry, *, again: bool) -> None:
        is_done = False
        try:
            version, settings = entry.version, self._settings
            # First, so that what cannot be served makes no other version leave.
            await asyncio.to_thread(
                check_adapter, version, max_rank=settings.max_lora_rank, head_adapters=settings.head_adapters
            )
            if not (again or entry.pinned):
                await self._find_place(entry)
            await self._post_load(version)
            is_done = True
        finally:
            if not is_done and self._entries.get(entry.version.name) is entry:
                del self._entries[entry.version.name]
            self._let_go.set()
            # Later, when this task counts as done: only then can the entry leave.
            asyncio.get_running_loop().call_soon(self._leave_if_forgotten, entry)

    async def _find_place(self, entry: _Entry) -> None:
        """Wait for one of the places, making the least recently used idle version leave."""
        # The lock is first come, first served: so are the places.
        async with self._admission:
            while sum(other.has_place for other in self._entries.values()) >= self._settings.max_resident:
                idle = next((other for other in self._entries.values() if other.has_place and _is_idle(other)), None)
                if idle is None:
                    self._let_go.clear()
                    await self._let_go.wait()
                else:
                    self._leave(idle)
            itself, leaving = self._leaving.get(entry.version.name), set(self._leaving.values())
            entry.has_place = True
        if itself is not None:
            await asyncio.wait([itself])
        while len(leaving := {task for task in leaving if not task.done()}) > self._settings.spare_places:
            await asyncio.wait(leaving, return_when=asyncio.FIRST_COMPLETED)

    def _release(self, entry: _Entry) -> None:
        entry.holders -= 1
        self._leave_if_forgotten(entry)
        self._let_go.set()

    def _leave_if_forgotten(self, entry: _Entry) -> None:
        if entry.is_forgotten and _is_idle(entry) and self._entries.get(entry.version.name) is entry:
            self._leave(entry)

    def _leave(self, entry: _Entry) -> None:
        name = entry.version.name
        del self._entries[name]
        self._leaving[name] = self._background.start(self._post_unload(name))

    async def _post_load(self, version: AdapterVersion) -> None:
        body = {"lora_name": version.name, "lora_path": _path(version)}
        answer = await self._http.post(LOAD, body, self._settings.load_deadline_s)
        if answer.ok or (answer.status == 400 and await self._is_there(version)):
            return
        raise self._refused(version, answer)

    async def _is_there(self, version: AdapterVersion) -> bool:
        """Whether the server has just this version: of a load whose answer was lost, or of an earlier weft."""
        answer = await self._http.get(MODELS, self._settings.load_deadline_s)
        cards = self._http.decode(answer.body, ModelList).data if answer.ok else []
        return any(card.id == version.name and card.root == _path(version) for card in cards)

    def _refused(self, version: AdapterVersion, answer: Answer) -> WeftError:
        _log.warning("adapter %s was not loaded: %d %s", version.name, answer.status, answer.message)
        if answer.status == 500 and "add_lora" in answer.message:
            return InvalidRequest(f"adapter {version.name} does not fit the sampler's base model")
        if answer.status == 400:
            return EngineFailure(f"the replica has something else under adapter {version.name}'s name")
        if answer.status == 404:
            return EngineFailure(
                f"the replica cannot load adapter {version.name}: it must see weft's folders under the same paths, and "
                "run with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
            )
        return EngineFailure(f"the replica did not load adapter {version.name} (status {answer.status})")

    async def _post_unload(self, name: str) -> None:
        try:
            answer = await self._http.post(UNLOAD, {"lora_name": name}, self._settings.load_deadline_s)
            if not answer.ok and answer.status != 404:
                _log.warning("adapter %s was not unloaded: %d %s", name, answer.status, answer.message)
        except EngineFailure as error:
            # Whether it is listed any more matters to nobody: under its name it can only be what it was.
            _log.warning("adapter %s was not unloaded: %s", name, error.message)
        finally:
            del self._leaving[name]


def _is_idle(entry: _Entry) -> bool:
    return entry.is_loaded and not entry.holders


def _path(version: AdapterVersion) -> str:
    return str(version.directory.absolute())
