"""Takes in adapters that others made, as hostile input: a folder or a tar, checked before anything is built from it.

Only two files of it are read, PEFT's config and PEFT's safetensors. Pickles are refused and never opened. What is stored is
written anew from checked numbers, so no byte of the input itself is kept.
"""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from contracts.errors import InvalidRequest
from contracts.operations import LoraSettings
from engine.model.adapter_archive import MOST_MEMBERS, PIECE_BYTES, Entry, Progress, archive_files, readable_archive
from engine.model.adapter_folder import CONFIG, WEIGHTS, read_lora_weights, write_adapter_files
from engine.model.atomic_folder import write_atomically
from engine.model.base_outline import AdapterBase
from engine.model.lora import LoraLayout, LoraWeights
from engine.model.plain_lora import check_config

_CONFIG_BYTES = 2**20
_HEADER_BYTES = 8 * 2**20
_MOST_TENSORS = 20_000
_WIDTHS = {"F32": 4, "F16": 2, "BF16": 2}
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_WANTED = {CONFIG: _CONFIG_BYTES, WEIGHTS: None}
"""Files that are read, and the most bytes of each; None: the limit of the import."""


def _untold(_done: int, _total: int) -> None:
    """Leave the progress untold."""


@dataclass(frozen=True, slots=True)
class ImportBounds:
    """Most bytes of an import once unpacked, and the largest LoRA rank."""

    most_bytes: int
    max_rank: int


def import_adapter(
    source: Path, work: Path, base: AdapterBase, bounds: ImportBounds, progress: Progress = _untold
) -> LoraWeights:
    """Read the adapter in ``source``, a folder or a tar (plain or gzip), for ``base``; ``work`` is an empty folder for it.

    The result covers every layer of the groups that the adapter is on; a layer that it leaves out has B zero, which changes
    nothing. It is on the CPU, wherever the base is. Raises ``InvalidRequest`` that says what is wrong with the adapter,
    ``OSError`` of the disk, and what ``progress`` raises.
    """
    if source.is_dir():
        _take(_of_folder(source), work, bounds)
    else:
        files = archive_files(source, bounds.most_bytes, _too_large(bounds), progress)
        # Closed also where a check ends the reading.
        with readable_archive(), closing(files):
            _take(files, work, bounds)
    rank = _check_config(work / CONFIG, bounds)
    _check_safetensors(work / WEIGHTS)
    found = read_lora_weights(work, base, "cpu")
    if found.settings.rank != rank:
        raise InvalidRequest(f"{CONFIG}: r is {rank}, and the matrices are of rank {found.settings.rank}")
    if not bool(torch.isfinite(found.vector).all()):
        raise InvalidRequest("the adapter holds NaN or infinite numbers")
    return _whole(found, base)


def write_imported(directory: Path, base: AdapterBase, weights: LoraWeights) -> int:
    """Write the adapter as a checkpoint and return the folder's size in bytes. Raises ``OSError``, leaving nothing behind."""
    return write_atomically(directory, lambda folder: write_adapter_files(folder, base, weights))


def _of_folder(folder: Path) -> Iterator[Entry]:
    with os.scandir(folder) as entries:
        for count, entry in enumerate(entries, start=1):
            if count > MOST_MEMBERS:
                raise InvalidRequest(f"the folder holds more than {MOST_MEMBERS} entries")
            if not entry.is_file():
                continue
            with open(entry.path, "rb") as content:
                yield Entry(entry.name, os.fstat(content.fileno()).st_size, content)


def _take(entries: Iterator[Entry], work: Path, bounds: ImportBounds) -> None:
    """Copy the wanted files into ``work``, within their bounds, and refuse the input that holds pickled weights instead."""
    taken: set[str] = set()
    pickled = ""
    total = 0
    for entry in entries:
        name = PurePosixPath(entry.name).name
        pickled = name if name.startswith("adapter_model") and name.endswith(_PICKLES) else pickled
        if name not in _WANTED:
            continue
        most = _WANTED[name] or bounds.most_bytes
        total += entry.size
        if entry.size > most or total > bounds.most_bytes:
            raise _too_large(bounds)
        if name in taken:
            raise InvalidRequest(f"the input holds {name} twice")
        taken.add(name)
        _copy(entry, work / name, most)
    if missing := [name for name in _WANTED if name not in taken]:
        if pickled:
            raise InvalidRequest(f"{pickled[:100]} is a pickle, which could run code; save the adapter as safetensors")
        raise InvalidRequest(f"the input holds no {missing[0]}; give the folder that PEFT's save_pretrained wrote")


def _copy(entry: Entry, target: Path, most: int) -> None:
    size = 0
    with target.open("xb") as file:
        while chunk := entry.content.read(PIECE_BYTES):
            size += len(chunk)
            if size > most:
                raise InvalidRequest(f"{target.name} is larger than it says")
            file.write(chunk)
    target.chmod(stat.S_IRUSR | stat.S_IWUSR)


def _too_large(bounds: ImportBounds) -> InvalidRequest:
    return InvalidRequest(
        f"the adapter is too large: an import may hold {bounds.most_bytes} bytes in {MOST_MEMBERS} entries, and "
        f"{_CONFIG_BYTES} bytes of {CONFIG}"
    )


def _check_config(path: Path, bounds: ImportBounds) -> int:
    """Check the config and return its rank. Raises ``InvalidRequest``."""
    try:
        config = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{CONFIG} is no JSON") from error
    if not isinstance(config, dict):
        raise InvalidRequest(f"{CONFIG} is no JSON object")
    check_config(config)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= bounds.max_rank:
        raise InvalidRequest(f"{CONFIG}: r must be 1 to {bounds.max_rank}, the largest rank here; got {str(rank)[:50]}")
    # NaN is within no bounds.
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha <= 1e6:
        raise InvalidRequest(f"{CONFIG}: lora_alpha must be a number over 0, at most 1e6; got {str(alpha)[:50]}")
    return rank


def _check_safetensors(path: Path) -> None:
    """Check the header against the file's own size before any tensor is built from it. Raises ``InvalidRequest``."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_HEADER_BYTES, size - 8):
            raise InvalidRequest(f"{WEIGHTS}: its header is cut short, or longer than {_HEADER_BYTES} bytes")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{WEIGHTS}: its header is no JSON") from error
    if not isinstance(header, dict):
        raise InvalidRequest(f"{WEIGHTS}: its header is no JSON object")
    header.pop("__metadata__", None)
    if not 0 < len(header) <= _MOST_TENSORS:
        raise InvalidRequest(f"{WEIGHTS} must hold 1 to {_MOST_TENSORS} tensors; got {len(header)}")
    if sum(_tensor_bytes(name, one) for name, one in header.items()) != size - 8 - length:
        raise InvalidRequest(f"{WEIGHTS}: its tensors are not as large as the file")


def _tensor_bytes(name: str, described: Any) -> int:
    told = described if isinstance(described, dict) else {}
    dtype, shape, offsets = told.get("dtype"), told.get("shape"), told.get("data_offsets")
    if dtype not in _WIDTHS:
        raise InvalidRequest(f"{WEIGHTS}: {name[:200]} must be F32, F16 or BF16; got {str(dtype)[:20]}")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and 0 < n < 2**31 for n in shape):
        raise InvalidRequest(f"{WEIGHTS}: {name[:200]} must be a matrix")
    size: int = shape[0] * shape[1] * _WIDTHS[dtype]
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int and n >= 0 for n in offsets):
        raise InvalidRequest(f"{WEIGHTS}: {name[:200]} has no place in the file")
    if offsets[1] - offsets[0] != size:
        raise InvalidRequest(f"{WEIGHTS}: {name[:200]} is not as large as its shape")
    return size


def _whole(found: LoraWeights, base: AdapterBase) -> LoraWeights:
    """Return the weights on every layer of their groups, so that they train like weft's own."""
    settings = LoraSettings(
        rank=found.settings.rank,
        alpha=found.settings.alpha,
        seed=0,
        train_attn=found.settings.train_attn,
        train_mlp=found.settings.train_mlp,
        train_unembed=found.settings.train_unembed,
    )
    layout: LoraLayout = base.layout(settings)
    whole = LoraWeights.initialise(settings, layout, found.vector.device)
    for name, pair in found.tensors.items():
        whole.tensors[name].a.copy_(pair.a)
        whole.tensors[name].b.copy_(pair.b)
    return whole
