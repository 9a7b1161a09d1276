"""Adapter versions in memory: each loaded once however many ask; the least recently used leave first."""

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
    leases: int = 0


class Pin:
    """A hold on a version. ``weights`` resolves when it is loaded; the version stays resident until ``release``."""

    def __init__(self, entry: _Entry, release: Callable[[_Entry], None]) -> None:
        self._entry: _Entry | None = entry
        self._release = release
        self.weights = entry.weights

    def release(self) -> None:
        """Let go; once is enough, more is harmless."""
        entry, self._entry = self._entry, None
        if entry is not None:
            self._release(entry)


class AdapterStore:
    """At most ``capacity`` versions are resident or loading; a version that finds them all held waits its turn.

    Callable from any thread.
    """

    def __init__(self, read: Callable[[AdapterVersion], LoraWeights], capacity: int) -> None:
        self._read = read
        self._capacity = capacity
        self._lock = threading.Lock()
        self._resident: OrderedDict[AdapterVersion, _Entry] = OrderedDict()
        self._queued: OrderedDict[AdapterVersion, _Entry] = OrderedDict()
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weft-adapter-loader")
        self._closed = False

    def lease(self, version: AdapterVersion) -> Pin:
        """Hold ``version``, loading it if need be. Raises ``EngineFailure`` after ``close``."""
        with self._lock:
            if self._closed:
                raise EngineFailure("the sampler is closed")
            entry = self._resident.get(version) or self._queued.get(version)
            if entry is None:
                entry = self._queued[version] = _Entry(version)
                # Running from the start: a cancelled waiter must not cancel the load for the others.
                entry.weights.set_running_or_notify_cancel()
            elif version in self._resident:
                self._resident.move_to_end(version)
            entry.leases += 1
            self._start_loads()
        return Pin(entry, self._let_go)

    def forget(self, name: str) -> None:
        """Drop the loaded versions called ``name``; whoever holds one keeps the tensors until done."""
        with self._lock:
            for version in [v for v, entry in self._resident.items() if v.name == name and entry.weights.done()]:
                del self._resident[version]
            self._start_loads()

    def names(self) -> tuple[str, ...]:
        """Names of the loaded versions, least recently used first."""
        with self._lock:
            return tuple(v.name for v, entry in self._resident.items() if entry.weights.done())

    def close(self) -> None:
        """Wait for the load in progress, fail the others and free everything."""
        with self._lock:
            self._closed = True
            abandoned = list(self._queued.values())
            self._queued.clear()
        for entry in abandoned:
            entry.weights.set_exception(EngineFailure("the sampler is closed"))
        self._loader.shutdown(wait=True)
        with self._lock:
            self._resident.clear()

    def _let_go(self, entry: _Entry) -> None:
        with self._lock:
            entry.leases -= 1
            self._start_loads()

    def _start_loads(self) -> None:
        """Move queued versions to the loader as far as evicting what nobody holds makes room. Needs the lock."""
        while self._queued and not self._closed:
            if len(self._resident) >= self._capacity:
                idle = next((v for v, e in self._resident.items() if e.leases == 0 and e.weights.done()), None)
                if idle is None:
                    return
                del self._resident[idle]
            version, entry = self._queued.popitem(last=False)
            self._resident[version] = entry
            self._loader.submit(self._load, entry)

    def _load(self, entry: _Entry) -> None:
        try:
            weights = self._read(entry.version)
        except Exception as error:  # noqa: BLE001 - the loader's edge: only those who wait for this version fail
            with self._lock:
                if self._resident.get(entry.version) is entry:
                    del self._resident[entry.version]
                self._start_loads()
            entry.weights.set_exception(as_weft_error(error, "loading an adapter"))
        else:
            entry.weights.set_result(weights)
            with self._lock:
                # Whoever asked may have left while it loaded, so this may be what makes room.
                self._start_loads()
