"""Payload files: a large payload costs the database nothing, and its file lives as long as its row."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
import pytest_asyncio
from sqlalchemy import delete, func, select

from contracts.codec import decode_payload, encode, pack, request_digest
from contracts.errors import SequenceConflict, Unavailable, WeftError
from contracts.ids import RequestId, TenantId
from contracts.ledger_records import NewOperation, StoredPayload, new_request_id
from contracts.losses import LossName
from contracts.operations import Datum, LossSpec, OperationKind, TrainingBatch
from ledger.payload_files import PayloadFiles
from store.clock import utc_now
from store.data_folder import DataFolder
from store.database import Database, create_engine
from store.tables import OperationPayload, Tenant

SEQUENCES, TOKENS, VOCABULARY = 64, 1024, 150_000
KIND = OperationKind.FORWARD_BACKWARD
CATS, DOGS = TenantId("cats"), TenantId("dogs")


def batch(sequences: int = SEQUENCES, *, seed: int = 0) -> TrainingBatch:
    """Cross entropy over random tokens, the kind that compresses worst."""
    random = np.random.default_rng(seed)
    data = []
    for _ in range(sequences):
        tokens = random.integers(0, VOCABULARY, TOKENS + 1)
        data.append(Datum(tokens[:-1], tokens[1:], {"weights": np.ones(TOKENS, np.float32)}))
    return TrainingBatch(LossSpec(LossName.CROSS_ENTROPY), data)


@pytest_asyncio.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    made = Database(create_engine(database_url))
    async with made.write() as transaction:
        transaction.add(Tenant(id="cats", name="cats", created_at=utc_now()))
    yield made
    await made.close()


@pytest.fixture
def files(tmp_path: Path) -> PayloadFiles:
    return PayloadFiles(DataFolder(tmp_path))


def on_disk(folder: Path) -> list[Path]:
    return [path for path in (folder / "payloads").rglob("*") if path.is_file()]


async def test_a_large_payload_takes_at_most_six_bytes_a_token(files: PayloadFiles, tmp_path: Path) -> None:
    stored = await files.store(CATS, new_request_id(), batch())
    assert stored.body == b"", "the database and its log would hold the payload"
    (path,) = on_disk(tmp_path)
    assert path.stat().st_size == stored.stored_bytes <= 6 * SEQUENCES * TOKENS


def test_token_ids_take_four_bytes_before_they_are_compressed() -> None:
    assert len(encode(batch(1))) < (4 + 4 + 4 + 1) * TOKENS


async def test_a_small_payload_stays_in_its_row(files: PayloadFiles, tmp_path: Path) -> None:
    stored = await files.store(CATS, new_request_id(), batch(1))
    assert 0 < len(stored.body) <= 6 * TOKENS
    assert on_disk(tmp_path) == []


@pytest.mark.parametrize("sequences", [1, SEQUENCES])
async def test_a_stored_payload_comes_back_bit_for_bit(files: PayloadFiles, sequences: int) -> None:
    given, request = batch(sequences), new_request_id()
    stored = await files.store(CATS, request, given)
    body = stored.body if stored.file_digest is None else files.read(request, stored.file_digest)
    found = decode_payload(KIND, body)
    assert isinstance(found, TrainingBatch)
    assert encode(found) == encode(given)
    assert {(one.tokens.dtype, one.targets.dtype) for one in found.data} == {(np.dtype(np.int64), np.dtype(np.int64))}


@pytest.mark.parametrize("numbers", [[-1, 3], [0, 2**32], [], [2**63 - 1]])
def test_numbers_beyond_four_bytes_stay_whole(numbers: list[int]) -> None:
    tokens = np.array(numbers, np.int64)
    given = TrainingBatch(LossSpec(LossName.CROSS_ENTROPY), [Datum(tokens, tokens, {})])
    found = decode_payload(KIND, pack(given))
    assert isinstance(found, TrainingBatch)
    assert found.data[0].tokens.tolist() == numbers
    assert found.data[0].tokens.dtype == np.int64


async def test_a_damaged_or_missing_file_fails_its_own_operation_only(files: PayloadFiles, tmp_path: Path) -> None:
    one, other = new_request_id(), new_request_id()
    stored, neighbour = await files.store(CATS, one, batch()), await files.store(CATS, other, batch(seed=1))
    (path,) = [path for path in on_disk(tmp_path) if path.name == one]
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(ValueError, match="damaged"):
        files.read(one, stored.file_digest or b"")
    await files.remove([one])
    with pytest.raises(ValueError, match="gone"):
        files.read(one, stored.file_digest or b"")
    assert len(files.read(other, neighbour.file_digest or b"")) == neighbour.stored_bytes


async def test_a_file_and_its_new_folder_are_on_the_disk_before_its_row(
    files: PayloadFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder's entry is in the folder above: without it a file is lost with the power, however well it was written."""
    flushed: list[str] = []
    monkeypatch.setattr(
        "ledger.payload_files.os.fsync", lambda file: flushed.append(os.readlink(f"/proc/self/fd/{file}"))
    )
    first = str(uuid4())
    await files.store(CATS, RequestId(first), batch())
    folder = tmp_path / "payloads" / first[:2]
    assert flushed == [str(folder / first), str(folder), str(folder.parent), str(tmp_path)]
    flushed.clear()
    beside = first[:2] + str(uuid4())[2:]
    await files.store(DOGS, RequestId(beside), batch())
    assert flushed == [str(folder / beside), str(folder)]


async def test_a_full_disk_has_the_client_repeat_the_request(files: PayloadFiles, tmp_path: Path) -> None:
    (tmp_path / "payloads").write_text("no folder can be made here")
    with pytest.raises(Unavailable, match="data folder"):
        await files.store(CATS, new_request_id(), batch())


async def test_one_tenants_files_on_a_slow_disk_leave_threads_for_another(
    files: PayloadFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk hangs for the one tenant's files, more of them than there are threads. One is not waited for any more."""
    goes_on, hangs, flush, slow = threading.Event(), threading.Semaphore(0), os.fsync, set[str]()

    def hang(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").rpartition("/")[2] in slow:
            hangs.release()
            goes_on.wait(60)
        flush(descriptor)

    monkeypatch.setattr("ledger.payload_files.os.fsync", hang)
    mine = [new_request_id() for _ in range(6)]
    slow.update(mine)
    writing = [asyncio.create_task(files.store(CATS, one, batch())) for one in mine]
    try:
        async with asyncio.timeout(30):
            for _ in range(2):
                await asyncio.to_thread(hangs.acquire)
            writing[0].cancel()
            assert (await files.store(DOGS, new_request_id(), batch())).file_bytes > 0
        assert len(on_disk(tmp_path)) == 3, "two threads write the one tenant's"
    finally:
        goes_on.set()
    ends = await asyncio.gather(*writing, return_exceptions=True)
    assert [isinstance(end, StoredPayload) for end in ends] == [False, *[True] * 5]


async def test_a_refused_request_leaves_no_file(files: PayloadFiles, tmp_path: Path) -> None:
    """Otherwise one key could fill the disk with requests that are refused."""

    def new(request: RequestId, payload: StoredPayload) -> NewOperation:
        return NewOperation(TenantId("cats"), "a run", 1, KIND, "base", payload, b"", id=request)

    async def answer(outcome: RequestId | WeftError) -> RequestId:
        if isinstance(outcome, WeftError):
            raise outcome
        return outcome

    refused, repeated, unsure, taken = (new_request_id() for _ in range(4))
    outcomes = {refused: SequenceConflict("no"), repeated: taken, unsure: Unavailable("?"), taken: taken}
    for place, (request, outcome) in enumerate(outcomes.items()):
        stored = await files.store(CATS, request, batch(seed=place))
        with suppress(WeftError):
            await files.recorded(new(request, stored), answer(outcome))
    assert {path.name for path in on_disk(tmp_path)} == {unsure, taken}


async def test_a_file_goes_once_its_row_is_gone(files: PayloadFiles, database: Database, tmp_path: Path) -> None:
    kept, gone, young = new_request_id(), new_request_id(), new_request_id()
    stored = {
        request: await files.store(CATS, request, batch(seed=place)) for place, request in enumerate((kept, gone))
    }
    async with database.write() as transaction:
        transaction.add_all([row(request, one) for request, one in stored.items()])
        await transaction.flush()
        await transaction.execute(delete(OperationPayload).where(OperationPayload.operation_id == gone))
    for path in on_disk(tmp_path):
        os.utime(path, (0, 0))
    await files.store(CATS, young, batch(seed=2))
    removed, after = 0, ""
    while True:
        number, folder = await files.remove_forgotten(database, after=after, unchanged=timedelta(minutes=10))
        removed += number
        if folder is None:
            break
        after = folder
    assert removed == 1
    assert {path.name for path in on_disk(tmp_path)} == {kept, young}
    async with database.read() as session:
        assert await session.scalar(select(func.count()).select_from(OperationPayload)) == 1


async def test_what_others_put_into_the_folder_stays_and_holds_nothing_up(
    files: PayloadFiles, database: Database, tmp_path: Path
) -> None:
    """A disk brings a ``lost+found`` that nobody may read, a copy a file of another name."""
    first, last = "7f" + str(uuid4())[2:], "ff" + str(uuid4())[2:]
    for request in (first, last):
        await files.store(CATS, RequestId(request), batch())
    beside = [tmp_path / "payloads" / name for name in ("7f/.nfs0042", "lost+found/inode", "00 copy/x")]
    for path in beside:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    for path in on_disk(tmp_path):
        os.utime(path, (0, 0))
    removed, after = 0, ""
    while (found := await files.remove_forgotten(database, after=after))[1] is not None:
        removed, after = removed + found[0], found[1]
    assert removed == 2
    assert sorted(on_disk(tmp_path)) == sorted(beside)


def test_a_digest_is_of_the_bytes_and_of_the_kind() -> None:
    body = b'{"seq_id": 1}'
    assert request_digest(KIND, body) == request_digest(KIND, body)
    assert request_digest(KIND, body) != request_digest(OperationKind.FORWARD, body)
    assert request_digest(KIND, body) != request_digest(KIND, body + b" ")


def row(request: str, stored: StoredPayload) -> OperationPayload:
    return OperationPayload(operation_id=request, tenant_id="cats", body=stored.body, file_digest=stored.file_digest)
