"""Adapter weights in memory for the in-process replica: each version read once, the least recently used evicted first."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from contracts.errors import EngineFailure
from engine.model.lora import LoraWeights
from engine.sampling.engine_failure import as_weft_error
from engine.sampling.replica import AdapterVersion


@dataclass(slots=True, eq=False)
class _Entry:
    version: AdapterVersion
    weights: Future[LoraWeights] = field(default_factory=Future)
    pins: int = 0


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
    """At most ``capacity`` adapter versions, resident or loading. A version that finds all of them pinned is queued.

    Callable from any thread. ``read`` runs on the store's own loader thread.
    """

    def __init__(self, read: Callable[[AdapterVersion], LoraWeights], capacity: int) -> None:
        self._read = read
        self._capacity = capacity
        self._lock = threading.Lock()
        self._resident: OrderedDict[AdapterVersion, _Entry] = OrderedDict()
        self._queued: OrderedDict[AdapterVersion, _Entry] = OrderedDict()
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weft-adapter-loader")
        self._closed = False

    def pin(self, version: AdapterVersion) -> Pin:
        """Pin ``version``, loading it if it is not resident. Raises ``EngineFailure`` after ``close``."""
        with self._lock:
            if self._closed:
                raise EngineFailure("the sampler is closed")
            entry = self._resident.get(version) or self._queued.get(version)
            if entry is None:
                entry = self._queued[version] = _Entry(version)
                # Marked as running at once: a waiter that is cancelled must not cancel the load for other waiters.
                entry.weights.set_running_or_notify_cancel()
            elif version in self._resident:
                self._resident.move_to_end(version)
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
            entry.weights.set_exception(EngineFailure("the sampler is closed"))
        self._loader.shutdown(wait=True)
        with self._lock:
            self._resident.clear()

    def _unpin(self, entry: _Entry) -> None:
        with self._lock:
            entry.pins -= 1
            self._start_loads()

    def _start_loads(self) -> None:
        """Hand queued versions to the loader, evicting loaded versions without a pin for them. Needs the lock."""
        while self._queued and not self._closed:
            if len(self._resident) >= self._capacity:
                idle = next((v for v, e in self._resident.items() if e.pins == 0 and e.weights.done()), None)
                if idle is None:
                    return
                del self._resident[idle]
            version, entry = self._queued.popitem(last=False)
            self._resident[version] = entry
            self._loader.submit(self._load, entry)

    def _load(self, entry: _Entry) -> None:
        try:
            weights = self._read(entry.version)
        except Exception as error:  # noqa: BLE001 - the loader task's edge: only requests for this version fail
            with self._lock:
                if self._resident.get(entry.version) is entry:
                    del self._resident[entry.version]
                self._start_loads()
            entry.weights.set_exception(as_weft_error(error, "loading an adapter"))
        else:
            entry.weights.set_result(weights)
            with self._lock:
                # Every pin may have been released during the load, so this version may be the one to evict now.
                self._start_loads()
