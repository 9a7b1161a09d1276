"""Acceptance of sample requests within their tenants' limits: requests that arrive together share one transaction."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from math import ceil
from time import time

from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import InvalidRequest, OverRate, TooManySamples, WeftError
from contracts.ids import RequestId, TenantId
from contracts.ledger_records import NewOperation, OperationState
from contracts.rate_lines import RateLine
from contracts.sample_demand import SampleDemand
from ledger import statements as sql
from ledger.ledger import Ledger
from ledger.rows import new_row, payload_row
from ledger.wakeups import sampling_topic
from store.batcher import Batcher, few_lengths
from store.clock import Clock
from store.database import Database
from telemetry.telemetry import Telemetry
from tenants.limit_use import LIMITED_PROJECTS, SAMPLE_USE, Use
from tenants.limits import Counted, Limits, hold_count
from tenants.line_charges import charge_lines
from tenants.project_limits import ProjectUse, uses_of_samplers
from tenants.rate_lines import line_states
from tenants.rates import Meter, RateState, charge, rate_states, tightest

_Group = Sequence[NewOperation]
"""Samples that come together, all of one sampler; most often one."""
_Rated = TenantId | RateLine
"""Owner of a rate."""


@dataclass(frozen=True, slots=True)
class AcceptedSample:
    """Id of an accepted sample. ``rate``: the tightest of its rates after it, None without one and for a repeat."""

    id: RequestId
    rate: RateState | None = None


class SampleIntake:
    """Accepts samples in batches. What is refused does not affect the others of its batch.

    Samples that come together, as the prompts of one request, are all accepted or none of them is.
    """

    def __init__(
        self, database: Database, ledger: Ledger, clock: Clock, telemetry: Telemetry, *, defaults: Limits
    ) -> None:
        """``defaults`` are the limits of a tenant without values of its own."""
        self._database = database
        self._ledger = ledger
        self._clock = clock
        self._telemetry = telemetry
        self._defaults = defaults
        self._batcher: Batcher[_Group, list[AcceptedSample]] = Batcher(self._accept, size=len)

    async def accept(self, sample: NewOperation) -> RequestId:
        """Record ``sample`` and return its request id. Raises as ``accept_rated``."""
        return (await self.accept_rated(sample)).id

    async def accept_rated(self, sample: NewOperation) -> AcceptedSample:
        """Record ``sample`` and return its request id; a repeated request gets its first id. Committed on return.

        Raises ``SequenceConflict``, ``InvalidRequest`` for a sample that is too large for its tenant's limits, and
        ``TooManySamples``, on which the SDK sends the request again later. Raises ``OverRate`` for one that may not wait.
        """
        return (await self.accept_together([sample]))[0]

    async def accept_together(self, samples: Sequence[NewOperation]) -> list[AcceptedSample]:
        """Record the samples of one request, all of one sampler, as ``accept_rated`` records one; on an error, none of them."""
        started = time()
        accepted = await self._batcher.ask(samples)
        if self._telemetry.traces.is_on:
            for one, sample in zip(accepted, samples, strict=True):
                self._telemetry.accepted(one.id, sample.kind, started=started)
        return accepted

    async def _accept(self, groups: Sequence[_Group]) -> list[list[AcceptedSample] | WeftError]:
        samples = [sample for group in groups for sample in group]
        async with self._database.write() as transaction:
            tenants = {sample.tenant for sample in samples}
            await hold_count(transaction, Counted.SAMPLES, tenants)
            uses = await SAMPLE_USE.read(transaction, tenants, self._defaults)
            projects = await _projects_of(transaction, samples, uses)
            rates = await self._rates_that_refuse(transaction, samples, uses)
            fitting: list[_Group] = []
            refused: dict[int, WeftError] = {}
            for group in groups:
                use, project = uses[group[0].tenant], projects.get(group[0].lane)
                refusal = _refusal(group, use) or _projects_refusal(project, len(group)) or rates.refusal(group)
                if refusal is None:
                    _count(group, use)
                    if project is not None:
                        project.used["pending_samples"] += len(group)
                    fitting.append(group)
                else:
                    refused[id(group)] = refusal
            new = await self._insert(transaction, [sample for group in fitting for sample in group])
            found = [await self._found(transaction, group, new, refused.get(id(group))) for group in groups]
            await self._keep(transaction, fitting, new)
            states = await self._charge(transaction, [sample for sample in samples if id(sample) in new], uses)
            for base_model in {sample.base_model for group in fitting for sample in group}:
                self._ledger.wakeups.announce_after_commit(transaction, sampling_topic(base_model))
            return [
                ids
                if isinstance(ids, WeftError)
                else [AcceptedSample(one, states.get(id(sample))) for one, sample in zip(ids, group, strict=True)]
                for ids, group in zip(found, groups, strict=True)
            ]

    async def _found(
        self, transaction: AsyncSession, group: _Group, new: dict[int, RequestId], refusal: WeftError | None
    ) -> list[RequestId] | WeftError:
        """Return the ids of the group's samples, those of a repeat too, or the error that answers it.

        On an error, those that were inserted are deleted again and leave ``new``.
        """
        ids: list[RequestId] = []
        for sample in group:
            known = new.get(id(sample)) or await self._earlier(transaction, sample, refusal)
            if isinstance(known, WeftError):
                if gone := [taken for one in group if (taken := new.pop(id(one), None)) is not None]:
                    await transaction.execute(sql.TAKE_BACK, {"ids": few_lengths(gone)})
                return known
            ids.append(known)
        return ids

    async def _insert(self, transaction: AsyncSession, samples: Sequence[NewOperation]) -> dict[int, RequestId]:
        """Insert the samples and return their request ids by ``id(sample)``, leaving out samples whose keys exist."""
        if not samples:
            return {}
        now = self._clock()
        # Sorted by key, so that two processes that insert the same keys cannot deadlock.
        ordered = sorted(samples, key=_place)
        rows = {id(sample): new_row(sample, now, OperationState.PENDING) for sample in ordered}
        dialect = transaction.get_bind().dialect.name
        if len(rows) == 1:
            inserted = set(await transaction.scalars(sql.INSERT_UNLESS_PRESENT[dialect], *rows.values()))
        else:
            await transaction.execute(sql.INSERT_MANY_UNLESS_PRESENT[dialect], list(rows.values()))
            ids = few_lengths([row["id"] for row in rows.values()])
            inserted = set((await transaction.execute(sql.PRESENT, {"ids": ids})).scalars())
        return {key: RequestId(str(row["id"])) for key, row in rows.items() if row["id"] in inserted}

    async def _keep(self, transaction: AsyncSession, groups: Sequence[_Group], new: dict[int, RequestId]) -> None:
        """Insert the payloads of those samples that are new."""
        samples = sorted((sample for group in groups for sample in group if id(sample) in new), key=_place)
        if samples:
            await transaction.execute(sql.INSERT_PAYLOAD, [payload_row(sample) for sample in samples])

    async def _charge(
        self, transaction: AsyncSession, new: Sequence[NewOperation], uses: dict[TenantId, Use]
    ) -> dict[int, RateState]:
        """Charge each rate once, and mark its samples' places in line. Return each one's tightest rate, by ``id(sample)``.

        Tenants' rates are locked in order, and then the lines of keys and projects.
        """
        queues: dict[TenantId, list[NewOperation]] = {}
        lines: dict[RateLine, list[tuple[str, int]]] = {}
        # In the order of their positions: the first in line are those that claims look at first.
        for sample in sorted(new, key=_place):
            queues.setdefault(sample.tenant, []).append(sample)
            for line in sample.lines:
                lines.setdefault(line, []).append((sample.id, _tokens([sample])))
        marks: list[dict[str, object]] = []
        states: dict[TenantId, RateState] = {}
        for tenant in sorted(queues):
            if (pace := uses[tenant].limits.pace(Meter.SAMPLE)) is None:
                continue
            costs = [_tokens([sample]) for sample in queues[tenant]]
            cost, now = sum(costs), self._clock()
            states[tenant] = await charge(transaction, tenant, Meter.SAMPLE, pace, cost=cost, now=now)
            places = accumulate(costs, initial=states[tenant].charged - cost)
            marks += [{"operation_id": one.id, "mark": mark} for one, mark in zip(queues[tenant], places, strict=False)]
        if marks:
            await transaction.execute(sql.MARK, marks)
        now = self._clock()
        of_lines = await charge_lines(transaction, lines, now) if lines else {}
        tightest_of = {
            id(sample): tightest(_known([states.get(sample.tenant), *map(of_lines.get, sample.lines)]), now)
            for sample in new
        }
        return {sample: state for sample, state in tightest_of.items() if state is not None}

    async def _rates_that_refuse(
        self, session: AsyncSession, samples: Sequence[NewOperation], uses: dict[TenantId, Use]
    ) -> "_RatesThatRefuse":
        """Return the rates of the samples that are refused rather than held."""
        refusable = [sample for sample in samples if not sample.may_wait]
        paces = {
            sample.tenant: pace
            for sample in refusable
            if (pace := uses[sample.tenant].limits.pace(Meter.SAMPLE)) is not None
        }
        lines = {line for sample in refusable for line in sample.lines}
        if not paces and not lines:
            return _RatesThatRefuse({}, self._clock())
        # Nobody else charges: the tenants' counts are locked.
        known = await rate_states(session, paces) if paces else {}
        states: dict[_Rated, RateState] = dict((await line_states(session, lines)).items())
        now = self._clock()
        for tenant, pace in paces.items():
            states[tenant] = known.get((tenant, Meter.SAMPLE)) or RateState.fresh(pace, now)
        return _RatesThatRefuse(states, now)

    async def _earlier(
        self, session: AsyncSession, sample: NewOperation, refusal: WeftError | None
    ) -> RequestId | WeftError:
        """Return the id of the request that ``sample`` repeats, or the error that answers it."""
        try:
            earlier = await self._ledger.find(session, lane=sample.lane, seq_id=sample.seq_id, digest=sample.digest)
        except WeftError as conflict:
            return conflict
        return earlier or refusal or TooManySamples("the sample was not recorded; send it again")


class _RatesThatRefuse:
    """Rates of one batch's samples, moved on with each sample that fits."""

    def __init__(self, states: dict[_Rated, RateState], now: datetime) -> None:
        self._states = states
        self._now = now

    def refusal(self, group: _Group) -> WeftError | None:
        """Return the error of samples that may not wait and would have to; else charge them here.

        Samples that come together count as one: also more than a burst are taken once nothing is before them.
        """
        sample, tokens = group[0], _tokens(group)
        owners: list[_Rated] = [sample.tenant, *sample.lines]
        bounding = [one for one in owners if one in self._states]
        waits = {one: self._states[one].wait(self._states[one].charged, tokens, self._now) for one in bounding}
        longest = max(waits, key=waits.__getitem__, default=None)
        if longest is not None and waits[longest] > 0 and not sample.may_wait:
            whose = f"the rate of this {longest.scope}" if isinstance(longest, RateLine) else "your rate"
            seconds = ceil(waits[longest])
            return OverRate(
                f"{_name(group)} may take {tokens} tokens, and {whose} of {round(self._states[longest].pace.per_second * 60)} "
                f"tokens a minute lets {_it(group)} run in {seconds} s; send {_it(group)} again then",
                seconds=seconds,
            )
        for one in bounding:
            self._states[one] = self._states[one].charged_with(tokens, self._now)
        return None


def _known(states: Iterable[RateState | None]) -> list[RateState]:
    return [state for state in states if state is not None]


def _place(sample: NewOperation) -> tuple[str, int]:
    return sample.lane, sample.seq_id


def _tokens(group: _Group) -> int:
    return sum(sample.demand.tokens for sample in group if sample.demand is not None)


def _it(group: _Group) -> str:
    return "it" if len(group) == 1 else "them"


def _name(group: _Group) -> str:
    return "this sample" if len(group) == 1 else f"these {len(group)} samples"


def _refusal(group: _Group, use: Use) -> WeftError | None:
    """Return the error of samples that do not fit into their tenant's limits together."""
    work, tokens = max((sample.demand or SampleDemand(0, 0)).work for sample in group), _tokens(group)
    most_work, most_tokens, most_pending = use.limits.sample_work, use.limits.sample_tokens, use.limits.pending_samples
    if work > most_work:
        return InvalidRequest(
            f"num_samples x max_tokens x topk is {work} with this prompt's logprobs, and your limit is "
            f"{most_work}; lower one of them, or send several requests"
        )
    if tokens > most_tokens:
        return InvalidRequest(
            f"{_name(group)} may take {tokens} tokens, and your limit for all pending samples together is "
            f"{most_tokens}; lower num_samples or max_tokens"
        )
    if len(group) > max(1, most_pending):
        return InvalidRequest(
            f"this request has {len(group)} samples, and your limit of pending ones is {most_pending}; send several requests"
        )
    if use.room("pending_samples") < len(group):
        return TooManySamples(
            f"{use.used['pending_samples']} of {most_pending} sample requests are pending; send {_it(group)} again when some "
            "have ended"
        )
    if use.room("sample_tokens") < tokens:
        return TooManySamples(
            f"pending sample requests may take {use.used['sample_tokens']} of {most_tokens} tokens, and {_name(group)} "
            f"{tokens}; send {_it(group)} again when some have ended"
        )
    return None


async def _projects_of(
    session: AsyncSession, samples: Sequence[NewOperation], uses: dict[TenantId, Use]
) -> dict[str, ProjectUse]:
    """Return the use of the samplers' projects that bound it, by lane: no statement where no tenant has such projects."""
    lanes = {sample.lane for sample in samples if uses[sample.tenant].used[LIMITED_PROJECTS]}
    return await uses_of_samplers(session, lanes) if lanes else {}


def _projects_refusal(project: ProjectUse | None, samples: int) -> WeftError | None:
    if project is None or project.has_room("pending_samples", samples):
        return None
    used, most = project.used["pending_samples"], project.limits["pending_samples"]
    if samples > max(1, most):
        return InvalidRequest(
            f"this request has {samples} samples, and project {project.name!r} may have {most} pending; send several requests"
        )
    return TooManySamples(
        f"{used} sample requests are pending in project {project.name!r}, and its limit is {most}; send this one again when "
        "some have ended"
    )


def _count(group: _Group, use: Use) -> None:
    use.used["pending_samples"] += len(group)
    use.used["sample_tokens"] += _tokens(group)
