"""Choice of the device of a base whose settings leave it to weft."""

import logging
from pathlib import Path

import torch

_ROOT = Path("/")
_CONTROL = "dev/nvidiactl"
log = logging.getLogger(__name__)


def choose_device(root: Path = _ROOT) -> str:
    """Return ``cuda`` where torch can compute there, else ``cpu``, with a warning beside an NVIDIA GPU.

    ``root`` is the folder that has ``dev``.
    """
    if torch.cuda.is_available():
        return "cuda"
    if (root / _CONTROL).exists():
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        log.warning(
            "there is an NVIDIA GPU here, and torch %s, %s, cannot compute on it: the base goes to the CPU. Look at the driver's "
            "version, CUDA_VISIBLE_DEVICES and the build of torch, or set WEFT_DEVICE=cpu",
            torch.__version__,
            build,
        )
    return "cpu"
