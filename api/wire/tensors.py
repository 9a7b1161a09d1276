"""Tensors of the wire to numpy: dense or CSR, bytes or lists, every size checked before anything is allocated."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from api.wire import weft_wire_pb2 as pb
from engine.contracts.errors import InvalidRequest

MAX_ELEMENTS = 2**24
"""Cells of one tensor once dense."""

_DTYPES: Mapping[int, np.dtype[Any]] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
}
_DTYPE_NAMES: Mapping[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
}


def from_proto(tensor: pb.Tensor, field: str) -> np.ndarray:
    """A dense array of the tensor's dtype; an empty shape means one dimension. Raises ``InvalidRequest`` naming ``field``."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidRequest(f"{field}: dtype must be float32, int64 or int32")
    shape = [int(size) for size in tensor.shape]
    if tensor.WhichOneof("encoding") == "sparse_csr":
        csr = tensor.sparse_csr
        return dense_of_csr(
            _buffer(csr.values, dtype, f"{field}.values"),
            _buffer(csr.crow_indices, np.dtype("<i8"), f"{field}.crow_indices"),
            _buffer(csr.col_indices, np.dtype("<i8"), f"{field}.col_indices"),
            shape,
            field,
        )
    return shaped(_buffer(tensor.dense, dtype, field), shape, field)


def from_lists(
    data: Sequence[float] | Sequence[int],
    dtype_name: str,
    shape: Sequence[int] | None,
    crow_indices: Sequence[int] | None,
    col_indices: Sequence[int] | None,
    field: str,
) -> np.ndarray:
    """The same, from JSON's lists."""
    dtype = _DTYPE_NAMES.get(dtype_name)
    if dtype is None:
        raise InvalidRequest(f"{field}: dtype must be float32, int64 or int32; got {dtype_name[:50]!r}")
    try:
        values = np.asarray(data, dtype=dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidRequest(f"{field}: data does not fit {dtype_name}") from error
    if crow_indices is None or col_indices is None:
        return shaped(values, list(shape or []), field)
    crow, col = np.asarray(crow_indices, dtype=np.int64), np.asarray(col_indices, dtype=np.int64)
    return dense_of_csr(values, crow, col, list(shape or []), field)


def shaped(values: np.ndarray, shape: list[int], field: str) -> np.ndarray:
    """``values`` in ``shape``; an empty shape leaves one dimension."""
    if not shape:
        return values
    if min(shape) < 0 or math.prod(shape) != values.size:
        raise InvalidRequest(f"{field}: shape {shape} does not hold {values.size} values")
    return values.reshape(shape)


def dense_of_csr(values: np.ndarray, crow: np.ndarray, col: np.ndarray, shape: list[int], field: str) -> np.ndarray:
    """A compressed sparse row matrix as a dense one; cells that are not listed are 0."""
    if len(shape) != 2 or min(shape) < 0 or math.prod(shape) > MAX_ELEMENTS:
        raise InvalidRequest(f"{field}: a sparse tensor needs a shape of two sizes, at most {MAX_ELEMENTS} cells")
    rows, columns = shape
    is_well_formed = (
        len(crow) == rows + 1
        and crow[0] == 0
        and crow[-1] == len(values) == len(col)
        and bool((np.diff(crow) >= 0).all())
        and (len(col) == 0 or (col.min() >= 0 and col.max() < columns))
    )
    if not is_well_formed:
        raise InvalidRequest(
            f"{field}: crow_indices, col_indices and values do not describe a {rows} x {columns} matrix"
        )
    dense = np.zeros(shape, dtype=values.dtype)
    dense[np.repeat(np.arange(rows), np.diff(crow)), col] = values
    return dense


def _buffer(data: bytes, dtype: np.dtype, field: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise InvalidRequest(f"{field}: {len(data)} bytes are no whole number of {dtype.name} values")
    return np.frombuffer(data, dtype=dtype)
