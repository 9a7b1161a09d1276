"""Conversion of the wire's tensors (dense or CSR, as bytes or lists) to numpy arrays. Sizes are checked before allocation."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from api.wire import weft_wire_pb2 as pb
from contracts.errors import InvalidRequest
from contracts.prompt_cells import PromptCells

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


MAX_DIMENSIONS = 8
"""Most dimensions of a tensor; those of a request's inputs have one or two."""
MAX_SIZE = 2**63 - 1
"""Largest size of one dimension: int64, as on the wire."""


class ExpansionBudget:
    """Memory that the sparse tensors of one request may use once dense: a few listed cells can ask for gigabytes of zeros."""

    def __init__(self, limit: int) -> None:
        """``limit``: bytes of all sparse tensors together, once dense."""
        self._limit = limit
        self._left = limit

    def take(self, size: int, field: str) -> None:
        """Take ``size`` bytes from the budget. Raises ``InvalidRequest`` naming ``field`` if fewer are left."""
        if size > self._left:
            raise InvalidRequest(
                f"{field}: the sparse tensors of a request may hold {self._limit} bytes once dense, and these hold more; "
                "send fewer sequences a request"
            )
        self._left -= size


def from_proto(tensor: pb.Tensor, field: str, budget: ExpansionBudget) -> np.ndarray:
    """Return a dense array of the tensor's dtype and shape; an empty shape means (N,). Raises ``InvalidRequest``."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidRequest(f"{field}: dtype must be float32, int64 or int32")
    shape = checked_shape(tensor.shape, field)
    if tensor.WhichOneof("encoding") == "sparse_csr":
        csr = tensor.sparse_csr
        return dense_of_csr(
            _buffer(csr.values, dtype, f"{field}.values"),
            _buffer(csr.crow_indices, np.dtype("<i8"), f"{field}.crow_indices"),
            _buffer(csr.col_indices, np.dtype("<i8"), f"{field}.col_indices"),
            shape,
            field,
            budget,
        )
    return shaped(_buffer(tensor.dense, dtype, field), shape, field)


def from_lists(
    data: Sequence[float] | Sequence[int],
    dtype_name: str,
    shape: Sequence[int] | None,
    crow_indices: Sequence[int] | None,
    col_indices: Sequence[int] | None,
    field: str,
    budget: ExpansionBudget,
) -> np.ndarray:
    """Return a dense array from JSON's lists, as ``from_proto`` does. Raises ``InvalidRequest`` naming ``field``."""
    dtype = _DTYPE_NAMES.get(dtype_name)
    if dtype is None:
        raise InvalidRequest(f"{field}: dtype must be float32, int64 or int32; got {dtype_name[:50]!r}")
    sizes = checked_shape(shape or (), field)
    values = _array(data, dtype, field)
    if crow_indices is None and col_indices is None:
        return shaped(values, sizes, field)
    if crow_indices is None or col_indices is None:
        raise InvalidRequest(f"{field}: sparse_crow_indices and sparse_col_indices come together; send both or neither")
    indices = np.dtype("<i8")
    crow = _array(crow_indices, indices, f"{field}.sparse_crow_indices")
    col = _array(col_indices, indices, f"{field}.sparse_col_indices")
    return dense_of_csr(values, crow, col, sizes, field, budget)


def checked_shape(shape: Sequence[int], field: str) -> list[int]:
    """Return the sizes of a tensor's dimensions. Raises ``InvalidRequest`` for too many or for one beyond int64."""
    if len(shape) > MAX_DIMENSIONS:
        raise InvalidRequest(f"{field}: shape has {len(shape)} dimensions; send at most {MAX_DIMENSIONS}")
    sizes = list(shape)
    if any(abs(size) > MAX_SIZE for size in sizes):
        raise InvalidRequest(f"{field}: shape has a size beyond {MAX_SIZE}; send the sizes of the dimensions")
    return sizes


def shaped(values: np.ndarray, shape: list[int], field: str) -> np.ndarray:
    """Return ``values`` in ``shape``; an empty shape means (N,). Raises ``InvalidRequest`` naming ``field``."""
    if not shape:
        return values
    if min(shape) < 0 or math.prod(shape) != values.size:
        raise InvalidRequest(f"{field}: shape {shape} does not hold {values.size} values; send a shape that does")
    try:
        return values.reshape(shape)
    except ValueError as error:
        raise InvalidRequest(f"{field}: shape {shape} is too large for an array; send smaller sizes") from error


def dense_of_csr(
    values: np.ndarray, crow: np.ndarray, col: np.ndarray, shape: list[int], field: str, budget: ExpansionBudget
) -> np.ndarray:
    """Return a compressed sparse row (CSR) matrix as a dense one; cells that are not listed are 0.

    ``values`` and ``col`` (N,), ``crow`` int64 (rows + 1,). Raises ``InvalidRequest`` unless the indices describe a
    matrix, list each cell at most once, and the budget holds the dense matrix.
    """
    rows, columns = _sizes_of_csr(shape, field)
    budget.take(rows * columns * values.dtype.itemsize, field)
    cells = csr_cells(values, crow, col, shape, field)
    dense = np.zeros(rows * columns, dtype=values.dtype)
    dense[cells] = values
    return dense.reshape(rows, columns)


def _sizes_of_csr(shape: list[int], field: str) -> tuple[int, int]:
    if len(shape) != 2 or min(shape) < 1:
        raise InvalidRequest(f"{field}: a sparse tensor needs a shape of two sizes of 1 or more; got {shape}")
    return shape[0], shape[1]


def csr_cells(values: np.ndarray, crow: np.ndarray, col: np.ndarray, shape: list[int], field: str) -> np.ndarray:
    """Return the numbers of the listed cells, row by row: int64 (N,). Raises ``InvalidRequest`` as ``dense_of_csr`` does."""
    rows, columns = _sizes_of_csr(shape, field)
    if rows * columns > MAX_SIZE:
        raise InvalidRequest(f"{field}: shape {shape} is too large for an array; send smaller sizes")
    # Neighbours are compared and not subtracted: the difference of hostile indices could overflow.
    is_well_formed = (
        len(crow) == rows + 1
        and crow[0] == 0
        and crow[-1] == len(values) == len(col)
        and bool((crow[1:] >= crow[:-1]).all())
        and (len(col) == 0 or (col.min() >= 0 and col.max() < columns))
    )
    if not is_well_formed:
        raise InvalidRequest(
            f"{field}: crow_indices, col_indices and values do not describe a {rows} x {columns} matrix"
        )
    cells: np.ndarray = np.repeat(np.arange(rows), np.diff(crow)) * columns + col
    if len(np.unique(cells)) != len(cells):
        raise InvalidRequest(f"{field}: col_indices list a cell twice; list each cell once")
    return cells


def _buffer(data: bytes, dtype: np.dtype, field: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise InvalidRequest(
            f"{field}: {len(data)} bytes are no whole number of {dtype.name} values of {dtype.itemsize} bytes"
        )
    return np.frombuffer(data, dtype=dtype)


def cells_from_lists(
    data: Sequence[float] | Sequence[int],
    shape: Sequence[int] | None,
    crow_indices: Sequence[int] | None,
    col_indices: Sequence[int] | None,
    field: str,
) -> PromptCells:
    """Return a matrix of token ids from JSON's lists, dense or CSR as it was sent. Raises ``InvalidRequest`` naming ``field``."""
    sizes = checked_shape(shape or (), field)
    if len(sizes) != 2 or min(sizes) < 1:
        raise InvalidRequest(f"{field}: shape must be [len(prompt) - 1, K] with sizes of 1 or more; got {sizes}")
    indices = np.dtype("<i8")
    values = _array(data, indices, field)
    if crow_indices is None and col_indices is None:
        return PromptCells(shaped(values, sizes, field), sizes[1])
    if crow_indices is None or col_indices is None:
        raise InvalidRequest(f"{field}: sparse_crow_indices and sparse_col_indices come together; send both or neither")
    crow = _array(crow_indices, indices, f"{field}.sparse_crow_indices")
    col = _array(col_indices, indices, f"{field}.sparse_col_indices")
    csr_cells(values, crow, col, sizes, field)
    return PromptCells(values, sizes[1], crow, col)


def _array(data: Sequence[float] | Sequence[int], dtype: np.dtype, field: str) -> np.ndarray:
    """Return JSON numbers as ``dtype``. A number beyond float32 becomes infinite.

    Raises ``InvalidRequest`` for a fraction in an integer array and for an integer beyond ``dtype``.
    """
    values = np.asarray(data)
    if values.dtype.kind not in "iuf":
        raise InvalidRequest(f"{field}: a value is too large for {dtype.name}")
    if dtype.kind == "i":
        if values.dtype.kind == "f" and not (np.floor(values) == values).all():
            raise InvalidRequest(f"{field}: {dtype.name} values must be whole numbers")
        # The largest int64 is no float: the next float above it is 2**63, which does not fit.
        least, most = -(2 ** (8 * dtype.itemsize - 1)), 2 ** (8 * dtype.itemsize - 1)
        is_below = values < most if values.dtype.kind == "f" else values <= most - 1
        if not ((values >= least) & is_below).all():
            raise InvalidRequest(f"{field}: a value is too large for {dtype.name}")
    with np.errstate(over="ignore"):
        return values.astype(dtype)
