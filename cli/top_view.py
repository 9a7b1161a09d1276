"""Pictures of an ``Overview`` for the terminal: tables that one reads from afar, with colour where something is wrong."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from api.admin.overview import Overview, TenantLoad
from api.admin.processes import ApiBody, PoolBody, ProcessBody, TrainerBody
from api.admin.queue import QueueLine
from api.admin.replicas import ReplicaBody
from cli.trainers import living_pool
from contracts.plurals import counted
from store.tables import ReplicaCondition

_BAR = 10
"""Characters of a bar of the whole service."""
_STARVED = 0.5
"""Part of what a tenant is entitled to, below which its bar is red while it has work."""
_OLD_SECONDS = 60.0
"""Age of the oldest operation from which it is shown in yellow."""


def frame(seen: Overview, *, rows: int, trouble: str | None = None) -> RenderableType:
    """Return the picture, with at most ``rows`` tenants. ``trouble``: reason for which the look is an old one."""
    parts: list[RenderableType] = [_head(seen, trouble), _tenants(seen.tenants, rows)]
    if seen.queue:
        parts.append(_queue(seen.queue))
    parts.append(_processes(seen))
    return Group(*parts)


def _head(seen: Overview, trouble: str | None) -> Text:
    speed = sum(one.tokens_per_second for one in seen.tenants)
    waiting = sum(line.pending for line in seen.queue)
    head = Text()
    head.append("weft ", style="bold")
    head.append(f"{seen.at:%Y-%m-%d %H:%M:%S} UTC   ")
    head.append(f"{_count(speed)} tokens/s", style="bold green" if speed else "dim")
    head.append(f" over {seen.window_seconds} s   {_count(waiting)} waiting")
    if trouble is not None:
        head.append(f"\n{trouble}; this is the last look", style="bold red")
    return head


def _tenants(loads: Sequence[TenantLoad], rows: int) -> RenderableType:
    if not loads:
        return Text("\nno tenant has work\n", style="dim")
    table = _table("tenant", "state", "pending>", "oldest>", "tok/s>", "got>", "due>", "got | due")
    for one in loads[:rows]:
        starved = one.pending > 0 and one.suspension is None and one.served_share < _STARVED * one.entitled_share
        state = Text("works", style="green") if one.suspension is None else Text(str(one.suspension), style="magenta")
        table.add_row(
            Text(one.name, style="bold"),
            state,
            _count(one.pending) if one.pending else "-",
            _age(one.oldest_seconds) if one.pending else "-",
            _count(one.tokens_per_second) if one.served_tokens else "-",
            f"{one.served_share:.0%}",
            f"{one.entitled_share:.0%}",
            _bar(one.served_share, one.entitled_share, "red" if starved else "cyan"),
        )
    if len(loads) > rows:
        return Group(table, Text(f" and {len(loads) - rows} tenants more", style="dim"))
    return table


def _queue(lines: Sequence[QueueLine]) -> Table:
    table = _table("queue", "kind", "pending>", "tokens>", "oldest>", "filled by")
    for line in lines:
        filled = ", ".join(f"{one.tenant} {one.pending / line.pending:.0%}" for one in line.filled_by)
        more = line.tenants - len(line.filled_by)
        told = filled + (f", {more} more" if more > 0 else "")
        age = _age(line.oldest_seconds)
        table.add_row(line.base_model, line.kind, _count(line.pending), _count(line.tokens), age, told)
    return table


def _processes(seen: Overview) -> RenderableType:
    if not (seen.trainers or seen.pools or seen.replicas):
        return Text("no trainer and no sampling process is known\n", style="red")
    table = _table("process", "base model", "where", "state", "lease>", "work")
    for trainer in seen.trainers:
        state = _state(trainer, "works" if trainer.drained_at is None else "drained")
        table.add_row(*_named(trainer), state, _lease(trainer), _runs(trainer))
    for pool in seen.pools:
        table.add_row(*_named(pool), _state(pool, living_pool(pool)), _lease(pool), _samples(pool))
    for api in seen.apis:
        table.add_row(*_named(api), _state(api, "works"), _lease(api), "")
    for replica in seen.replicas:
        state = _replica_state(replica)
        table.add_row(f"replica {replica.replica}", replica.base_model, "", state, "", _drawn(replica))
    return table


def _table(*columns: str) -> Table:
    """Return an empty table. A column whose name ends with > is of numbers."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="dim")
    for place, name in enumerate(columns):
        title = name.removesuffix(">")
        # The first column gives way in a narrow terminal, and no number is cut: a part is up to 100%.
        least = 8 if place == 0 else max(len(title), 4)
        table.add_column(title, justify="right" if name.endswith(">") else "left", no_wrap=True, min_width=least)
    return table


def _named(one: TrainerBody | PoolBody | ApiBody) -> tuple[str, str, str]:
    return one.id[:16], "" if isinstance(one, ApiBody) else one.base_model, f"{one.host}:{one.pid}"


def _replica_state(one: ReplicaBody) -> Text:
    if not one.is_alive or one.condition is ReplicaCondition.DOWN:
        return Text("down" if one.is_alive else "dead", style="bold red")
    if one.directive is None:
        return Text("works", style="green")
    return Text(one.directive if one.process is not None else "directed, not seen", style="yellow")


def _state(one: ProcessBody, living: str) -> Text:
    if not one.is_alive:
        return Text("dead", style="bold red")
    return Text(living, style="green" if living == "works" else "yellow")


def _lease(one: ProcessBody) -> str:
    # `weft serve` is alone on its database: its leases do not end.
    return "-" if one.lease_seconds > 86_400 else f"{one.lease_seconds:+.1f} s"


def _runs(one: TrainerBody) -> str:
    return counted(one.runs, "run") + (f" ({one.reason})" if one.reason else "")


def _samples(one: PoolBody) -> str:
    return f"{one.claimed} claimed, {one.in_flight} drawn"


def _drawn(one: ReplicaBody) -> str:
    return f"{one.in_flight} drawn" + (f" ({one.reason})" if one.reason else "")


def _bar(served: float, entitled: float, colour: str) -> Text:
    """Return a bar of what was served, with a mark at what the tenant is entitled to."""
    full, mark = round(served * _BAR), min(_BAR - 1, round(entitled * _BAR))
    bar = Text()
    for place in range(_BAR):
        if place == mark:
            bar.append("│", style="bold white")
        else:
            bar.append("█" if place < full else "·", style=colour if place < full else "dim")
    return bar


def _age(seconds: float) -> Text:
    told = (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.0f} h"
    )
    return Text(told, style="yellow" if seconds >= _OLD_SECONDS else "")


def _count(number: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if number >= size:
            return f"{number / (1e3 if unit == 'k' else size):.1f}{unit}"
    return f"{number:.0f}" if number >= 10 or number == int(number) else f"{number:.1f}"
