"""Adapter weights in memory for the in-process replica: each version read once, the least recently used evicted first."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from contracts.errors import EngineFailure
from engine.model.lora import LoraWeights
from engine.sampling.engine_failure import as_weft_error
from engine.sampling.load_turns import LoadTurns
from engine.sampling.replica import AdapterVersion


@dataclass(slots=True, eq=False)
class _Entry:
    version: AdapterVersion
    owner: str
    """Owner whose place the version takes while it is in use."""
    weights: Future[LoraWeights] = field(default_factory=Future)
    pins: int = 0

    @property
    def is_idle(self) -> bool:
        return self.pins == 0 and self.weights.done()


class Pin:
    """A claim that keeps a version resident until ``release``. ``weights`` resolves once the version is loaded."""

    def __init__(self, entry: _Entry, unpin: Callable[[_Entry], None]) -> None:
        self._entry: _Entry | None = entry
        self._unpin = unpin
        self.weights = entry.weights

    def release(self) -> None:
        """Allow the version's eviction again. Safe to repeat."""
        entry, self._entry = self._entry, None
        if entry is not None:
            self._unpin(entry)


class AdapterStore:
    """At most ``capacity`` adapter versions, resident or loading. Others are queued, and their owners take turns.

    Callable from any thread. ``read`` runs on the store's own loader thread.
    """

    def __init__(self, read: Callable[[AdapterVersion], LoraWeights], capacity: int) -> None:
        self._read = read
        self._capacity = capacity
        self._lock = threading.Lock()
        self._resident: OrderedDict[AdapterVersion, _Entry] = OrderedDict()
        self._queued: dict[AdapterVersion, _Entry] = {}
        self._turns: LoadTurns[_Entry] = LoadTurns(capacity)
        self._is_loading = False
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weft-adapter-loader")
        self._closed = False

    def pin(self, version: AdapterVersion, owner: str, share: float = 1.0) -> Pin:
        """Pin ``version``, loading it in the owner's turn if it is not resident. Raises ``EngineFailure`` after ``close``."""
        with self._lock:
            if self._closed:
                raise EngineFailure("the sampler is closed")
            entry = self._resident.get(version) or self._queued.get(version)
            if entry is None:
                entry = self._queued[version] = _Entry(version, owner)
                # Marked as running at once: a waiter that is cancelled must not cancel the load for other waiters.
                entry.weights.set_running_or_notify_cancel()
            if version in self._queued:
                self._turns.add(entry, owner, share)
            else:
                self._resident.move_to_end(version)
                entry.owner = owner if entry.is_idle else entry.owner
            entry.pins += 1
            self._start_loads()
        return Pin(entry, self._unpin)

    def forget(self, name: str) -> None:
        """Drop the loaded versions called ``name``. A request that pinned one keeps its tensors until it ends."""
        with self._lock:
            for version in [v for v, entry in self._resident.items() if v.name == name and entry.weights.done()]:
                del self._resident[version]
            self._start_loads()

    def names(self) -> tuple[str, ...]:
        """Return the names of the loaded versions, least recently used first."""
        with self._lock:
            return tuple(v.name for v, entry in self._resident.items() if entry.weights.done())

    def close(self) -> None:
        """Wait for the load in progress, fail the queued ones with ``EngineFailure`` and free all weights."""
        with self._lock:
            self._closed = True
            abandoned = list(self._queued.values())
            self._queued.clear()
            for entry in abandoned:
                self._turns.discard(entry)
        for entry in abandoned:
            entry.weights.set_exception(EngineFailure("the sampler is closed"))
        self._loader.shutdown(wait=True)
        with self._lock:
            self._resident.clear()

    def _unpin(self, entry: _Entry) -> None:
        with self._lock:
            entry.pins -= 1
            self._start_loads()

    def _start_loads(self) -> None:
        """Hand the next queued version to the loader, evicting a loaded one without a pin for it. Needs the lock.

        The loader has one at a time, because it would read several in the order in which it got them.
        """
        if self._is_loading or self._closed:
            return
        taken = self._turns.take(Counter(entry.owner for entry in self._resident.values() if not entry.is_idle))
        if taken is None:
            return
        entry, owner = taken
        entry.owner = owner
        if len(self._resident) >= self._capacity:
            del self._resident[next(version for version, one in self._resident.items() if one.is_idle)]
        self._resident[entry.version] = self._queued.pop(entry.version)
        self._is_loading = True
        self._loader.submit(self._load, entry)

    def _load(self, entry: _Entry) -> None:
        try:
            weights = self._read(entry.version)
        except Exception as error:  # noqa: BLE001 - the loader task's edge: only requests for this version fail
            with self._lock:
                if self._resident.get(entry.version) is entry:
                    del self._resident[entry.version]
                self._end_load()
            entry.weights.set_exception(as_weft_error(error, "loading an adapter"))
        else:
            entry.weights.set_result(weights)
            with self._lock:
                # Every pin may have been released during the load, so this version may be the one to evict now.
                self._end_load()

    def _end_load(self) -> None:
        self._is_loading = False
        self._start_loads()
