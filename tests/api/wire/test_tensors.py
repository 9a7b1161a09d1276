import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from tinker.proto.request_conv import _tensor_data_to_proto
from tinker.types.tensor_data import TensorData

from api.wire import tensors
from api.wire import weft_wire_pb2 as pb
from contracts.errors import InvalidRequest

BUDGET_BYTES = 100_000
INT64_LIMITS = np.iinfo(np.int64)

ARRAYS = st.one_of(
    npst.arrays(np.float32, npst.array_shapes(max_dims=2, min_side=0, max_side=9)),
    npst.arrays(np.int64, npst.array_shapes(max_dims=2, min_side=0, max_side=9)),
)
MATRICES = npst.arrays(
    np.int64, npst.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=9), elements=st.sampled_from([0, 0, 0, 7])
)


def decode(message: pb.Tensor, budget: int = BUDGET_BYTES) -> np.ndarray:
    return tensors.from_proto(message, "field", tensors.ExpansionBudget(budget))


def from_sdk(tensor: TensorData) -> np.ndarray:
    return decode(pb.Tensor.FromString(_tensor_data_to_proto(tensor).SerializeToString()))


def csr(
    values: list[float], crow: list[int], col: list[int], shape: list[int], dtype: pb.DType = pb.DTYPE_FLOAT32
) -> pb.Tensor:
    kind = "<f4" if dtype == pb.DTYPE_FLOAT32 else "<i8"
    sparse = pb.SparseCsr(
        values=np.array(values, kind).tobytes(),
        crow_indices=np.array(crow, "<i8").tobytes(),
        col_indices=np.array(col, "<i8").tobytes(),
    )
    return pb.Tensor(sparse_csr=sparse, dtype=dtype, shape=shape)


class TestDense:
    @given(ARRAYS)
    def test_what_the_sdk_sends_arrives(self, array: np.ndarray) -> None:
        arrived = from_sdk(TensorData.from_numpy(array))
        assert arrived.dtype == array.dtype
        np.testing.assert_array_equal(arrived, array)

    @given(ARRAYS)
    def test_the_sdks_lists_arrive(self, array: np.ndarray) -> None:
        tensor = TensorData.from_numpy(array)
        arrived = tensors.from_lists(
            tensor.data, tensor.dtype, tensor.shape, None, None, "field", tensors.ExpansionBudget(0)
        )
        assert arrived.dtype == array.dtype
        np.testing.assert_array_equal(arrived, array)

    def test_no_shape_is_one_dimension(self) -> None:
        assert from_sdk(TensorData(data=[1, 2, 3], dtype="int64")).shape == (3,)
        assert from_sdk(TensorData(data=[], dtype="float32")).shape == (0,)

    def test_int32_is_taken(self) -> None:
        message = pb.Tensor(dense=np.array([1, 2], "<i4").tobytes(), dtype=pb.DTYPE_INT32)
        assert decode(message).tolist() == [1, 2]

    @pytest.mark.parametrize(
        "shape", [[5], [2, 3], [-1], [-2, -2], [2**40, 2**40], [0, 4], [4, 0]], ids=lambda shape: str(shape)
    )
    def test_shape_that_does_not_hold_the_values_is_refused(self, shape: list[int]) -> None:
        message = pb.Tensor(dense=np.zeros(4, "<f4").tobytes(), dtype=pb.DTYPE_FLOAT32, shape=shape)
        with pytest.raises(InvalidRequest, match=r"field: shape .* 4 values"):
            decode(message)

    @pytest.mark.parametrize("shape", [[0, 2**62], [0, 2**63 - 1], [0] * 100])
    def test_shape_that_no_array_can_have_is_refused(self, shape: list[int]) -> None:
        with pytest.raises(InvalidRequest, match="field: shape"):
            decode(pb.Tensor(dense=b"", dtype=pb.DTYPE_INT64, shape=shape))

    def test_ragged_bytes_are_refused(self) -> None:
        with pytest.raises(InvalidRequest, match="field: 7 bytes"):
            decode(pb.Tensor(dense=b"1234567", dtype=pb.DTYPE_FLOAT32))

    @pytest.mark.parametrize("dtype", [pb.DTYPE_UNSPECIFIED, pb.DTYPE_BFLOAT16, 99])
    def test_other_dtypes_are_refused(self, dtype: int) -> None:
        with pytest.raises(InvalidRequest, match="field: dtype"):
            decode(pb.Tensor(dense=b"12345678", dtype=dtype))


class TestLists:
    @pytest.mark.parametrize(
        ("data", "dtype"),
        [
            ([2**63], "int64"),
            ([2**40], "int32"),
            ([1.5], "int64"),
            ([float("nan")], "int64"),
            ([float("inf")], "int64"),
            ([1e30], "int64"),
            ([1.0], "float16"),
        ],
    )
    def test_values_that_do_not_fit_are_refused(self, data: list[float], dtype: str) -> None:
        with pytest.raises(InvalidRequest, match="field"):
            tensors.from_lists(data, dtype, None, None, None, "field", tensors.ExpansionBudget(BUDGET_BYTES))

    def test_beyond_float32_is_infinite_for_the_caller_to_refuse(self) -> None:
        budget = tensors.ExpansionBudget(BUDGET_BYTES)
        assert np.isinf(tensors.from_lists([1e300], "float32", None, None, None, "field", budget)).all()

    def test_half_a_sparse_tensor_is_refused(self) -> None:
        budget = tensors.ExpansionBudget(BUDGET_BYTES)
        with pytest.raises(InvalidRequest, match="come together"):
            tensors.from_lists([1.0], "float32", [1, 2], [0, 1], None, "field", budget)

    def test_indices_beyond_int64_are_refused(self) -> None:
        budget = tensors.ExpansionBudget(BUDGET_BYTES)
        with pytest.raises(InvalidRequest, match="sparse_crow_indices"):
            tensors.from_lists([1.0], "float32", [1, 2], [0, 2**70], [0], "field", budget)


class TestSparse:
    @given(MATRICES, st.sampled_from(["int64", "float32"]))
    def test_what_the_sdk_makes_sparse_arrives_dense(self, matrix: np.ndarray, dtype: str) -> None:
        tensor = TensorData.from_torch_sparse(torch.from_numpy(matrix.astype(dtype)))
        arrived = from_sdk(tensor)
        assert arrived.dtype == dtype
        np.testing.assert_array_equal(arrived, matrix)
        lists = (tensor.sparse_crow_indices, tensor.sparse_col_indices)
        budget = tensors.ExpansionBudget(BUDGET_BYTES)
        np.testing.assert_array_equal(
            tensors.from_lists(tensor.data, tensor.dtype, tensor.shape, *lists, "field", budget), matrix
        )

    def test_unlisted_cells_are_zero_and_rows_may_be_empty(self) -> None:
        arrived = decode(csr([5.0, -1.0], [0, 1, 1, 2], [2, 0], [3, 3]))
        assert arrived.tolist() == [[0, 0, 5], [0, 0, 0], [-1, 0, 0]]
        assert decode(csr([], [0, 0], [], [1, 4])).tolist() == [[0, 0, 0, 0]]

    def test_columns_need_no_order(self) -> None:
        assert decode(csr([1.0, 2.0], [0, 2], [2, 0], [1, 3])).tolist() == [[2, 0, 1]]

    @pytest.mark.parametrize(
        ("values", "crow", "col", "shape"),
        [
            ([1], [0, 1], [0], []),
            ([1], [0, 1], [0], [1]),
            ([1], [0, 1], [0], [1, 1, 1]),
            ([1], [0, 1], [0], [-1, 2]),
            ([], [0], [], [0, 2]),
            ([], [], [], [1, 2]),
            ([1], [0], [0], [1, 2]),
            ([1], [1, 1], [0], [1, 2]),
            ([1], [0, 2], [0], [1, 2]),
            ([1, 1], [0, 1], [0], [1, 2]),
            ([1], [0, 1], [0, 1], [1, 2]),
            ([1], [0, 1], [2], [1, 2]),
            ([1], [0, 1], [-1], [1, 2]),
            ([1, 1], [0, 2, 1, 2], [0, 1], [3, 2]),
            ([1, 1], [0, 2], [1, 1], [1, 2]),
            ([1], [0, INT64_LIMITS.max, INT64_LIMITS.min, -1, 1], [0], [4, 1]),
        ],
    )
    def test_what_is_no_matrix_is_refused(
        self, values: list[float], crow: list[int], col: list[int], shape: list[int]
    ) -> None:
        with pytest.raises(InvalidRequest, match="field"):
            decode(csr(values, crow, col, shape))

    @given(
        st.lists(st.integers(-3, 9), max_size=6),
        st.lists(st.integers(INT64_LIMITS.min, INT64_LIMITS.max) | st.integers(-2, 6), max_size=6),
        st.lists(st.integers(INT64_LIMITS.min, INT64_LIMITS.max) | st.integers(-2, 6), max_size=6),
        st.lists(st.integers(INT64_LIMITS.min, INT64_LIMITS.max) | st.integers(-2, 6), max_size=3),
    )
    def test_nothing_but_a_refusal_comes_of_noise(
        self, values: list[int], crow: list[int], col: list[int], shape: list[int]
    ) -> None:
        try:
            arrived = decode(csr(values, crow, col, shape, pb.DTYPE_INT64))
        except InvalidRequest:
            return
        assert list(arrived.shape) == shape
        assert np.count_nonzero(arrived) == np.count_nonzero(values)

    def test_growth_is_refused_before_it_happens(self) -> None:
        with pytest.raises(InvalidRequest, match=f"field.* {BUDGET_BYTES} bytes"):
            decode(csr([1.0], [0, 1], [0], [1, 2**60]))

    def test_a_request_has_one_budget_for_all_its_tensors(self) -> None:
        budget = tensors.ExpansionBudget(100)
        message = csr([1.0], [0, 1], [0], [1, 10])
        for _ in range(2):
            tensors.from_proto(message, "field", budget)
        with pytest.raises(InvalidRequest, match="100 bytes"):
            tensors.from_proto(message, "field", budget)
