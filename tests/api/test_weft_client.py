"""The client package against a real API: each group of calls, what it sends again, and how a broken stream goes on."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import unquote

import pytest
import pytest_asyncio
from sqlalchemy import update
from weft_client.asynchronous import AsyncWeft
from weft_client.cookbook import MOST_NAMES, WeftLogger
from weft_client.errors import BadRequest, NotAllowed, NotAuthenticated, NotThere, ServiceUnavailable, WeftClientError
from weft_client.models import GateState
from weft_client.streams import Accepted, Done, Tokens
from weft_client.synchronous import Weft

from contracts.ids import RequestId
from contracts.losses import LossName
from contracts.operations import ForwardBackwardOutput, LossSpec, OperationKind, OptimStepped, TrainingBatch
from store.tables import ApiKey
from tenants.gates import Dispatch, Entry, make_gates, mark_in_flight
from tenants.rights import Role

MORE_THAN_A_PAGE = 51
PASS = TrainingBatch(LossSpec(LossName.CROSS_ENTROPY), [])


@pytest_asyncio.fixture
async def weft(cats) -> AsyncIterator[AsyncWeft]:
    """The client of an administrator's key."""
    async with cats.service.database.write() as transaction:
        await transaction.execute(update(ApiKey).values(role=Role.ADMIN))
    async with AsyncWeft(cats.service.url, cats.key, retries=0) as client:
        yield client


async def step(tenant, run: str, number: int) -> None:
    """Have a pass and an optimizer step of the run done."""
    await tenant.operation(run, 2 * number - 1, kind=OperationKind.FORWARD_BACKWARD, payload=PASS)
    await tenant.service.run_next(ForwardBackwardOutput([], {"loss:sum": 4.0, "tokens:sum": 4.0}))
    await tenant.operation(run, 2 * number)
    await tenant.service.run_next(OptimStepped({"grad_norm:max": 1.0, "step:max": float(number)}))


async def drawn_from(tenant) -> str:
    """A run of which a sample is in flight."""
    run = await tenant.run()
    sample = Dispatch(RequestId(f"of {run}"), tenant.id, "base", run, "v", "replica", "a pool")
    async with tenant.service.database.write() as transaction:
        await make_gates(transaction, sample, tenant.service.clock)
    async with tenant.service.database.write() as transaction:
        (entered,) = await mark_in_flight(transaction, [sample], tenant.service.clock)
        assert entered.entry is Entry.IN_FLIGHT
    return run


async def test_a_curve_is_followed_as_it_grows(cats, dogs, weft: AsyncWeft) -> None:
    run, theirs = await cats.run(), await dogs.run()
    await step(cats, run, 1)
    await step(dogs, theirs, 1)
    points = weft.runs.follow(run, every=0.01)
    assert (await anext(points)).mean_loss == 1.0
    coming = asyncio.ensure_future(anext(points))
    await step(cats, run, 2)
    async with asyncio.timeout(20):
        assert (await coming).step == 2
    await points.aclose()  # type: ignore[attr-defined]
    await weft.runs.add_metrics(run, {1: {"reward": 0.5, "solved": None}})
    assert (await weft.runs.points(run)).metrics == ["reward", "solved"]
    assert [one.value for one in (await weft.runs.metric(run, "reward")).values] == [0.5]
    with pytest.raises(NotThere) as refused:
        await weft.runs.points(theirs)
    assert (refused.value.code, refused.value.status) == ("not_found", 404)
    raw = await weft.with_raw_response(weft.runs.points, run)
    assert (raw.parsed.optimizer_steps, raw.headers["Content-Type"]) == (2, "application/json")


async def test_a_block_pauses_and_resumes_even_after_an_error(cats, dogs, weft: AsyncWeft) -> None:
    run, theirs = await cats.run(), await dogs.run()

    async def fail_in_block() -> None:
        async with weft.gates.paused(run, mode="keep", ttl=60) as state:
            assert (state.state, state.mode) == ("paused", "keep")
            async with AsyncWeft(cats.service.url, dogs.key, retries=0) as other:
                assert (await other.gates.state(theirs)).state == "open"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail_in_block()
    assert (await weft.gates.state(run)).state == "open"


async def test_a_block_that_is_left_while_samples_are_in_flight_resumes(
    cats, dogs, weft: AsyncWeft, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, theirs = await drawn_from(cats), await drawn_from(dogs)
    answered, ask = asyncio.Queue[GateState](), weft.gates.pause

    async def told(*arguments: Any, **options: Any) -> GateState:
        answered.put_nowait(state := await ask(*arguments, **options))
        return state

    async def pause() -> None:
        async with weft.gates.paused(run, mode="wait", ttl=600):
            raise AssertionError("a sample is in flight")

    monkeypatch.setattr(weft.gates, "pause", told)

    async with AsyncWeft(cats.service.url, dogs.key, retries=0) as other, asyncio.timeout(60):
        await other.gates.pause(theirs, mode="wait", wait_seconds=0)
        pausing = asyncio.create_task(pause())
        assert (await answered.get()).state == "pausing"
        pausing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pausing
        assert (await weft.gates.state(run)).state == "open"
        assert (await other.gates.state(theirs)).state == "pausing"


async def test_a_pause_that_waits_for_samples_is_answered_when_its_process_ends(cats, dogs, weft: AsyncWeft) -> None:
    """The pause stands: the caller asks another process how far it is."""
    run, theirs = await drawn_from(cats), await drawn_from(dogs)
    async with AsyncWeft(cats.service.url, dogs.key, retries=0) as other, asyncio.timeout(20):
        async with asyncio.TaskGroup() as tasks:
            pauses = [
                tasks.create_task(client.gates.pause(one, mode="wait", wait_seconds=300))
                for client, one in ((weft, run), (other, theirs))
            ]
            while len(cats.service.wakeups.topics()) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
            cats.service.wakeups.close()
        assert [task.result().state for task in pauses] == ["pausing", "pausing"]


async def test_the_end_of_a_block_whose_answer_is_lost_is_looked_up() -> None:
    def state(generation: int, told: str) -> Callable[[asyncio.StreamWriter], None]:
        rest = {"in_flight": 0, "versions": {}, "replicas": {}}
        gate = {"adapter": "r", "base_model": "base", "state": told, "generation": generation, **rest}
        return json_answer(200, gate)

    # Lost before it was made, and asked for again; then lost afterwards.
    answers = [state(4, "paused"), dropped, state(4, "paused"), dropped, state(5, "open")]
    async with scripted(answers) as (url, requests), AsyncWeft(url, "tml-x") as weft, weft.gates.paused("r"):
        pass
    assert [head.split()[0] for head in requests] == [b"POST", b"POST", b"GET", b"POST", b"GET"]


async def test_the_pause_of_somebody_else_outlives_the_block(cats, weft: AsyncWeft) -> None:
    run = await cats.run()
    async with weft.gates.paused(run):
        await weft.gates.pause(run, reason="another")
    assert (await weft.gates.state(run)).reason == "another"
    await weft.gates.resume(run)


async def test_keys_are_made_rotated_and_revoked(cats, weft: AsyncWeft) -> None:
    made = await weft.keys.create(note="reader", role="viewer", idempotency_key="one")
    assert (await weft.keys.create(note="reader", role="viewer", idempotency_key="one")).secret == made.secret
    assert made.secret not in repr(made)
    async with AsyncWeft(cats.service.url, made.secret, retries=0) as reader:
        with pytest.raises(NotAllowed):
            await reader.keys.list()
    newer = await weft.keys.rotate(made.key_id, grace=0)
    async with AsyncWeft(cats.service.url, made.secret, retries=0) as reader:
        cats.service.clock.move(seconds=1)
        with pytest.raises(NotAuthenticated):
            await reader.usage.standing()
    await weft.keys.revoke(newer.key_id)
    assert {
        key.note: key.revoked_at is None for key in (await weft.keys.list()).keys if key.key_id == newer.key_id
    } == {"reader": False}


async def test_usage_projects_limits_and_jobs_are_read(cats, weft: AsyncWeft, monkeypatch: pytest.MonkeyPatch) -> None:
    run = await cats.run()
    await step(cats, run, 1)
    since = cats.service.clock() - timedelta(hours=1)
    lines = [line async for line in weft.usage.query(since=since, group_by=["kind"])]
    assert [line.kind for line in lines] == ["forward_backward", "optim_step"]
    with monkeypatch.context() as paged:
        paged.setattr("weft_client.tenancy_async._PAGE", 1)
        assert [line async for line in weft.usage.query(since=since, group_by=["kind"])] == lines
        # A service of before the cursors answers so.
        paged.setattr("api.weft.usage.cursor_behind", lambda line, by: None)
        assert [line async for line in weft.usage.query(since=since, group_by=["kind"])] == lines
    assert "run_metrics" in {limit.name for limit in (await weft.usage.standing()).limits}
    project = await weft.projects.create("one")
    assert project.id in {one.id for one in (await weft.projects.list()).projects}
    assert (await weft.jobs.list()).jobs == []
    with pytest.raises(BadRequest):
        await weft.jobs.merge("nowhere", "merged")
    with pytest.raises(NotThere):
        await weft.jobs.wait("none")


async def test_the_client_without_asyncio_and_the_cookbooks_logger_record_alike(
    cats, weft: AsyncWeft, caplog: pytest.LogCaptureFixture
) -> None:
    run = await cats.run()

    def log() -> None:
        with Weft(cats.service.url, cats.key, retries=0) as client:
            logger = WeftLogger(run, client)
            logger.log_metrics({"reward": 0.5, "text": "no number", "loss": float("nan")}, step=3)
            logger.log_metrics({"reward": 1.0})
            WeftLogger("none", client).log_metrics({"reward": 1.0})
            raw = client.with_raw_response(client.runs.metric, run, "reward")
            assert (len(raw.parsed.values), raw.status) == (2, 200)
            pages.append(logger.get_logger_url() or "")

    pages: list[str] = []
    await asyncio.to_thread(log)
    page = await cats.http.get(pages[0])
    # The page asks for a login; an address that is none is not found.
    assert (page.status_code, page.headers["location"].partition("?")[0]) == (303, "/ui/login")
    assert unquote(page.headers["location"]).endswith(f"next=/ui/runs/{run}")
    found = await weft.runs.metric(run, "reward")
    assert [(one.step, one.value) for one in found.values] == [(3, 0.5), (4, 1.0)]
    assert [one.value for one in (await weft.runs.metric(run, "loss")).values] == [None]
    assert "not recorded" in caplog.text


@pytest.mark.parametrize("is_new", [False, True], ids=["before", "by another logger"])
async def test_the_cookbooks_logger_records_the_names_for_which_the_run_has_room(
    cats, dogs, weft: AsyncWeft, caplog: pytest.LogCaptureFixture, is_new: bool
) -> None:
    """A script that goes on after its end has a new logger."""
    run, theirs = await cats.run(), await dogs.run()
    first = {f"m{number}": 1.0 for number in range(MOST_NAMES - 1)}

    def log() -> None:
        with Weft(cats.service.url, cats.key, retries=0) as client:
            logger = WeftLogger(run, client)
            logger.log_metrics(first, step=1)
            if is_new:
                logger = WeftLogger(run, client)
            for step in (2, 3):
                logger.log_metrics({"late": 1.0, "later": 2.0, **first}, step=step)
        with Weft(cats.service.url, dogs.key, retries=0) as client:
            WeftLogger(theirs, client).log_metrics({f"m{number}": 1.0 for number in range(MOST_NAMES + 5)}, step=1)

    await asyncio.to_thread(log)
    assert (await weft.runs.get(run)).metrics == [*sorted(first), "late"]
    for name, steps in (("m0", [1, 2, 3]), ("late", [2, 3]), ("later", [])):
        assert [one.step for one in (await weft.runs.metric(run, name)).values] == steps, name
    assert [one for one in caplog.messages if "later" in one] == [caplog.messages[0]]
    async with AsyncWeft(dogs.service.url, dogs.key, retries=0) as beside:
        assert len((await beside.runs.get(theirs)).metrics) == MOST_NAMES


# --- what is sent again, by a server that fails as it is told -------------------------------------------------------------


@asynccontextmanager
async def scripted(answers: list[Callable[[asyncio.StreamWriter], None]]) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Serve one answer for each request, in order; yield the address, and the requests so far."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        requests.append(head)
        answers[min(len(requests), len(answers)) - 1](writer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", requests


def json_answer(status: int, body: object, **headers: str) -> Callable[[asyncio.StreamWriter], None]:
    """Return an answer of that status."""
    content = json.dumps(body).encode()
    named = {"Content-Type": "application/json", "Content-Length": str(len(content)), "Connection": "close", **headers}
    lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in named.items())]
    return lambda writer: writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + content)


def events(*sent: tuple[str, object]) -> Callable[[asyncio.StreamWriter], None]:
    """Return a stream of events that ends without warning."""
    body = b"".join(b"event: %s\ndata: %s\n\n" % (name.encode(), json.dumps(data).encode()) for name, data in sent)
    return lambda writer: writer.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + body
    )


def dropped(_writer: asyncio.StreamWriter) -> None:
    """Answer nothing."""


JOB = {"jobs": []}


async def test_a_request_is_sent_again_with_the_same_idempotency_key() -> None:
    made = {"key_id": 1, "prefix": "tml-1", "secret": "tml-1-x"}
    refused = json_answer(503, {"detail": "later", "code": "unavailable", "retryable": True}, **{"Retry-After": "0"})
    async with scripted([dropped, refused, json_answer(201, made)]) as (url, requests), AsyncWeft(url, "tml-x") as weft:
        assert (await weft.keys.create(note="x")).key_id == 1
    keys = {line for head in requests for line in head.splitlines() if line.lower().startswith(b"idempotency-key")}
    assert (len(requests), len(keys)) == (3, 1)


async def test_what_cannot_succeed_is_sent_once() -> None:
    final = json_answer(400, {"detail": "no", "code": "invalid_request", "retryable": False})
    async with scripted([final]) as (url, requests), AsyncWeft(url, "tml-x") as weft:
        with pytest.raises(BadRequest):
            await weft.jobs.list()
        assert len(requests) == 1


async def test_a_streamed_archive_is_sent_once() -> None:
    async def archive() -> AsyncIterator[bytes]:
        yield b"tar"

    later = json_answer(503, {"detail": "later", "code": "unavailable", "retryable": True}, **{"Retry-After": "0"})
    async with scripted([later]) as (url, requests), AsyncWeft(url, "tml-x") as weft:
        with pytest.raises(ServiceUnavailable):
            await weft.jobs.import_archive(archive(), base_model="base", name="one")
        assert len(requests) == 1


async def test_the_rest_of_an_archive_is_sent_once() -> None:
    """The service may have kept some of it, and refuses what begins before that."""
    refused = json_answer(503, {"detail": "later", "code": "unavailable", "retryable": False})
    async with scripted([dropped, refused]) as (url, requests), AsyncWeft(url, "tml-x") as weft:
        with pytest.raises(ServiceUnavailable):
            await weft.jobs.import_archive(b"tar", base_model="base", name="one", offset=3, idempotency_key="x")
        assert len(requests) == 1
    async with scripted([dropped, refused]) as (url, requests), AsyncWeft(url, "tml-x") as weft:
        with pytest.raises(ServiceUnavailable):
            await weft.jobs.import_archive(b"tar", base_model="base", name="one", idempotency_key="x")
        assert len(requests) == 2


async def test_a_stream_that_breaks_off_goes_on_without_a_token_twice() -> None:
    accepted = ("accepted", {"request_id": "r"})

    def tokens(start: int, *ids: int) -> tuple[str, object]:
        logprobs = [-0.5] * len(ids)
        return "tokens", {"sequence": 0, "start": start, "version": "v", "tokens": list(ids), "logprobs": logprobs}

    done = (
        "done",
        {"request_id": "r", "sequences": [{"stop_reason": "stop", "tokens": [1, 2, 3], "logprobs": [0, 0, 0]}]},
    )
    answers = [events(accepted, tokens(0, 1, 2)), events(accepted, tokens(0, 1), tokens(1, 2, 3), done)]
    async with scripted(answers) as (url, requests), AsyncWeft(url, "tml-x") as weft:
        seen = [event async for event in weft.samples.stream("sampler", [1], seq_id=1)]
    assert [type(event) for event in seen] == [Accepted, Tokens, Tokens, Done]
    drawn = [(event.start, event.tokens) for event in seen if isinstance(event, Tokens)]
    assert drawn == [(0, [1, 2]), (2, [3])]
    assert len(requests) == 2


async def test_a_stream_that_its_server_ends_goes_on_at_another() -> None:
    """A server that ends says so in an event: the sample goes on, and the request finds it again."""
    ending = events(
        ("accepted", {"request_id": "r"}), ("error", {"error": "x", "code": "unavailable", "retryable": True})
    )
    done = events(("accepted", {"request_id": "r"}), ("done", {"request_id": "r", "sequences": []}))
    async with scripted([ending, done]) as (url, requests), AsyncWeft(url, "tml-x") as weft:
        seen = [event async for event in weft.samples.stream("sampler", [1], seq_id=1)]
    assert ([type(event) for event in seen], len(requests)) == ([Accepted, Done], 2)


async def test_a_sample_that_fails_ends_its_stream_with_the_code() -> None:
    failing = events(("accepted", {"request_id": "r"}), ("error", {"error": "no replica", "code": "engine_failure"}))
    async with scripted([failing]) as (url, requests), AsyncWeft(url, "tml-x") as weft:
        with pytest.raises(WeftClientError) as failed:
            async for _ in weft.samples.stream("sampler", [1], seq_id=1):
                pass
        assert (failed.value.code, len(requests)) == ("engine_failure", 1)


def test_without_an_address_or_a_key_the_client_says_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="TINKER_BASE_URL"):
        Weft()
    with pytest.raises(ValueError, match="tinker auth login"):
        Weft("http://127.0.0.1:1")
    (tmp_path / ".tinker").mkdir()
    stored = {"version": 1, "default": "k", "keys": {"k": {"type": "manual", "key": "tml-stored", "name": "k"}}}
    (tmp_path / ".tinker" / "credentials.json").write_text(json.dumps(stored))
    Weft("http://127.0.0.1:1").close()


async def test_lists_have_what_is_the_tenants_own_page_by_page(cats, dogs, weft: AsyncWeft) -> None:
    run, theirs = await cats.run(), await dogs.run()
    other = await cats.run(model_seq_id=1)
    for name in ("first", "second"):
        await cats.checkpoint(run, name, ttl_seconds=3600 if name == "first" else None)
        await dogs.checkpoint(theirs, name)
    mine = await cats.operation(run, 1)
    await dogs.operation(theirs, 1)
    assert {one.adapter async for one in weft.gates.list()} == {run, other}
    assert [one.request_id async for one in weft.operations.list()] == [mine]
    assert [one.tinker_path.rpartition("/")[2] async for one in weft.checkpoints.list(expires_within=7200)] == ["first"]
    assert [one.run async for one in weft.checkpoints.list(run=theirs)] == []
    assert [one.run async for one in weft.checkpoints.list(name="second")] == [run]
    assert len([one async for one in weft.checkpoints.list(type="training", public=False)]) == 2


async def test_all_runs_of_the_tenant_come_once_with_asyncio_and_without(cats, dogs, weft: AsyncWeft) -> None:
    runs = [await cats.run(model_seq_id=number) for number in range(MORE_THAN_A_PAGE)]
    await dogs.run()
    page = await weft.runs.page()
    assert (len(page.runs), page.next_cursor is not None) == (MORE_THAN_A_PAGE - 1, True)
    listed = [one.id async for one in weft.runs.list()]
    assert (listed[: len(page.runs)], sorted(listed)) == ([one.id for one in page.runs], sorted(runs))
    assert [one async for one in weft.runs.list(base_model="another")] == []

    def without_asyncio() -> list[str]:
        with Weft(cats.service.url, cats.key, retries=0) as client:
            return [one.id for one in client.runs.list()]

    assert await asyncio.to_thread(without_asyncio) == listed


async def test_a_pause_of_a_gate_that_has_changed_is_refused(cats, dogs, weft: AsyncWeft) -> None:
    run, theirs = await cats.run(), await dogs.run()
    seen = await weft.gates.state(run)
    await weft.gates.pause(run, reason="another", wait_seconds=0)
    with pytest.raises(BadRequest) as refused:
        await weft.gates.pause(run, mode="wait", generation=seen.generation, wait_seconds=0)
    assert "another controller" in str(refused.value)
    assert (await weft.gates.state(run)).reason == "another"
    async with AsyncWeft(cats.service.url, dogs.key, retries=0) as other:
        assert (await other.gates.state(theirs)).state == "open"
