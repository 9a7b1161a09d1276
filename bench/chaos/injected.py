"""Faults inside a process of the cluster. Each process that finds ``FOLDER_VARIABLE`` in its environment imports this module.

A file in the folder orders a fault. The first process that can commit it takes the order, so that one process has it:

- ``sick``: the device fails at every computation of the process from then on.
- ``hung``: the next pass never ends.
- ``skew``: the process that starts next has a clock that is an hour ahead.

A batch that begins with ``DEADLY`` kills every trainer that computes it.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER_VARIABLE = "WEFT_BENCH_FAULTS"
SICK, HUNG, SKEW = "sick", "hung", "skew"
DEADLY = (317, 318, 319)
"""Tokens that no batch of the honest tenants begins with."""
_SKEW = timedelta(hours=1)


def _take(order: str) -> bool:
    """Return whether this process takes the order, which no other then gets."""
    path = Path(os.environ[FOLDER_VARIABLE]) / order
    try:
        path.rename(path.with_name(f"{order}.{os.getpid()}"))
    except FileNotFoundError:
        return False
    return True


def _make_sick() -> None:
    import torch

    def fail(*_arguments: object, **_options: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    setattr(torch.nn.functional, "linear", fail)  # noqa: B010 - another type than its own, on purpose


def _patch_trainer(module: ModuleType) -> None:
    whole = module.Trainer.compute

    def compute(self: object, pieces: Sequence[Any], **options: Any) -> object:
        for piece in pieces:
            for datum in piece.operation.batch.data:
                if tuple(datum.tokens[: len(DEADLY)].tolist()) == DEADLY:
                    os.kill(os.getpid(), signal.SIGKILL)
        if _take(SICK):
            _make_sick()
        if _take(HUNG):
            threading.Event().wait()
        return whole(self, pieces, **options)

    module.Trainer.compute = compute


def _patch_clock(module: ModuleType) -> None:
    if _take(SKEW):
        vars(module)["utc_now"] = lambda: datetime.now(UTC) + _SKEW


_PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "engine.training.trainer": _patch_trainer,
    "store.clock": _patch_clock,
}


class _PatchedLoader(Loader):
    """Loads a module, then changes it."""

    def __init__(self, loader: Loader, patch: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._patch = patch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module as its own loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then change it."""
        self._loader.exec_module(module)
        self._patch(module)


class _Finder(MetaPathFinder):
    """Finds the modules that are to be changed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own spec with a loader that changes the module; None for other modules."""
        if fullname not in _PATCHES:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _PatchedLoader(spec.loader, _PATCHES[fullname])
                return spec
        return None


def install() -> None:
    """Change the modules when they are imported."""
    sys.meta_path.insert(0, _Finder())


def environment(folder: Path) -> dict[str, str]:
    """Return the environment that brings this module into every Python process; ``folder`` takes the orders."""
    start = folder / "start"
    start.mkdir(parents=True)
    (start / "sitecustomize.py").write_text("from bench.chaos.injected import install\n\ninstall()\n")
    paths = [str(start), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {FOLDER_VARIABLE: str(folder), "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
