"""The computing device's health: the error of a device that cannot be trusted any more, and a self-test that finds one."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from contracts.errors import ProcessMustEnd
from engine.model.base import BaseModel

log = logging.getLogger(__name__)

_ROWS, _LENGTH = 2, 16
_TOLERANCE = 1e-2
"""Largest difference from the first result, relative to the largest logit. Kernels may be chosen anew, so equal bits are not
asked for; a sick device is far off, or fails."""


_LACKS = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    # Of a handle that is made on a device without free memory.
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Texts of errors of a lack of memory, after which the device works."""


class DeviceFailed(ProcessMustEnd):
    """The device fails or hangs."""


@contextmanager
def device_errors() -> Iterator[None]:
    """Turn an error of the accelerator itself into ``DeviceFailed``. A lack of memory is none.

    After such an error every later call on the device fails as well, whatever it computes.
    """
    try:
        yield
    except torch.AcceleratorError as error:
        if is_lack_of_memory(error):
            raise
        raise DeviceFailed(f"the accelerator failed: {_first_line(error)}") from error


def is_lack_of_memory(error: BaseException | None) -> bool:
    """Tell whether the error is that of an allocation for which the device, or the host, has no memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # Where the driver or cuBLAS allocates for itself, or the host does, torch has no error class of its own.
    return isinstance(error, RuntimeError) and any(told in str(error) for told in _LACKS)


class SelfTest:
    """A small forward pass over the bare base, whose numbers are known from the start of the process."""

    def __init__(self, base: BaseModel) -> None:
        """Compute the known numbers, twice. Raises ``DeviceFailed`` when they differ."""
        self._base = base
        tokens = torch.arange(_ROWS * _LENGTH, device=base.device) % base.facts.vocabulary_size
        self._tokens = tokens.view(_ROWS, _LENGTH)[:, : base.facts.context_length]
        self._known = self._logits()
        self.check()

    def check(self) -> None:
        """Compute the numbers again. Raises ``DeviceFailed`` when they differ or cannot be computed. For any thread.

        A device without free memory passes: the numbers are not known to be wrong.
        """
        try:
            found = self._logits()
        except (RuntimeError, MemoryError) as error:
            if is_lack_of_memory(error):
                log.warning("self-test: no free memory on %s; taken for passed", self._base.device)
                return
            raise DeviceFailed(f"the self-test could not be computed: {_first_line(error)}") from error
        # Some bases have tokens whose numbers are not finite, also on a device that works.
        is_finite = torch.isfinite(self._known)
        if not torch.equal(torch.isfinite(found), is_finite):
            raise DeviceFailed("the self-test gave numbers that are not finite")
        known, found = self._known[is_finite], found[is_finite]
        if not known.numel():
            return
        largest = float(known.abs().max())
        if (off := float((found - known).abs().max())) > _TOLERANCE * max(largest, 1.0):
            raise DeviceFailed(f"the self-test gave other numbers than at the start: off by {off:.3g} of {largest:.3g}")

    @torch.inference_mode()
    def _logits(self) -> Tensor:
        return self._base.logits(self._tokens).cpu()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
