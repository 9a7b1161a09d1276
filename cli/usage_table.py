"""Table of ``weft usage show``: lines of usage added up, under people's names."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Final

from api.admin.usage import TenantUsageBody
from cli.tables import Table
from tenants.metered_operations import SUMS
from tenants.prices import cost_text, sum_of
from tenants.usage_hours import Dimension

Names = Mapping[Dimension, Mapping[str, str]]
"""Names of what usage is told apart by, by ids as texts."""

_HEADINGS: Final = {
    "operations": "done",
    "failed": "failed",
    "train_tokens": "train",
    "prompt_tokens": "prompt",
    "cached_prompt_tokens": "cached",
    "sampled_tokens": "sampled",
}


def usage_sums(lines: Iterable[TenantUsageBody], *, is_by_time: bool) -> list[TenantUsageBody]:
    """Add up the lines that differ in nothing but their time, and not even in that with ``is_by_time``.

    The most tokens come first, or the earliest time. A sum has the time of its first line, and no cost if one of them has none.
    """
    groups: dict[tuple[object, ...], list[TenantUsageBody]] = {}
    for line in lines:
        key = (line.start if is_by_time else None, *(getattr(line, one) for one in Dimension))
        groups.setdefault(key, []).append(line)
    sums = [_sum(group) for group in groups.values()]
    sums.sort(key=_tokens, reverse=True)
    return sorted(sums, key=lambda one: one.start) if is_by_time else sums


def usage_table(sums: Sequence[TenantUsageBody], names: Names, *, by: Collection[Dimension], is_by_time: bool) -> Table:
    """Return the sums as rows: the time, what tells them apart, operations, tokens and, with prices, the cost."""
    shown = [one for one in Dimension if one in by]
    priced = sorted({one.currency for one in sums if one.currency is not None})
    columns = [
        *(["from"] if is_by_time else []),
        *(one.replace("_", " ") for one in shown),
        *_HEADINGS.values(),
        *priced,
    ]
    rows = []
    for one in sums:
        time = [f"{one.start:%Y-%m-%dT%H:%MZ}"] if is_by_time else []
        told_apart = [_name(names, dimension, getattr(one, dimension)) for dimension in shown]
        cost = [one.cost or "-"] if priced else []
        rows.append([*time, *told_apart, *(str(getattr(one, name)) for name in _HEADINGS), *cost])
    return Table(columns, rows)


def _name(names: Names, dimension: Dimension, value: object) -> str:
    if value is None:
        return "-"
    name = names.get(dimension, {}).get(str(value))
    return str(value) if name is None else f"{value} ({name})"


def _sum(lines: Sequence[TenantUsageBody]) -> TenantUsageBody:
    total = {name: sum(getattr(line, name) for line in lines) for name in SUMS}
    cost = sum_of(None if line.cost is None else Decimal(line.cost) for line in lines)
    return lines[0].model_copy(update={**total, "cost": cost_text(cost)})


def _tokens(one: TenantUsageBody) -> int:
    return one.train_tokens + one.prompt_tokens + one.sampled_tokens
