"""Rendering of pages: one Jinja environment, which escapes whatever it is not told to trust, and the filters of templates."""

import re
import unicodedata
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template, select_autoescape

from api.dashboard.navigation import entries_for
from api.dashboard.series_names import series_name
from api.dashboard.sparkline import spark_path
from api.dashboard.waiting_words import waiting_words
from api.services import ApiServices
from contracts.plurals import noun
from tenants.prices import cost_text as money
from tenants.rights import Principal

TEMPLATES = Path(__file__).with_name("templates")
_THIN = "\N{NARROW NO-BREAK SPACE}"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_HIDDEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e007f]"
)

_BROWSER = re.compile(r"\b(Edg|OPR|Firefox|HeadlessChrome|Chrome|Version)/(\d+)")
_BROWSER_NAMES = {
    "Edg": "Edge",
    "OPR": "Opera",
    "Firefox": "Firefox",
    "HeadlessChrome": "Chrome",
    "Chrome": "Chrome",
    "Version": "Safari",
}
"""Names by their marks, the telling ones first: most browsers name others', too."""
_SYSTEMS = (
    ("Android", "Android"),
    ("iPhone", "iOS"),
    ("iPad", "iPadOS"),
    ("Windows", "Windows"),
    ("Mac OS", "macOS"),
    ("Linux", "Linux"),
)
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")


def install_rendering(app: FastAPI, *, insecure: bool = False) -> None:
    """Make the application's templates ready. ``insecure``: every page warns that it may be served over plain http."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=select_autoescape(default=True, default_for_string=True, enabled_extensions=("html",)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = {"count": count, "bytes": byte_size, "duration": duration, "marked": marked, "exact": exact, "ago": ago}
    filters |= {"measured": measured, "browser": browser, "told": told, "short_id": short_id, "noun": noun}
    filters |= {"waiting_words": waiting_words, "money": money, "series_name": series_name}
    filters |= {"spark_path": spark_path, "spark_label": spark_label}
    environment.filters.update(filters)
    app.state.templates = environment
    app.state.is_insecure = insecure


def page(request: Request, template: str, /, *, status: int = 200, **values: Any) -> HTMLResponse:
    """Return a page. Its template sees ``values``, the caller's principal as ``me`` (None before login) and the navigation.

    Times are told against ``now``.
    """
    return HTMLResponse(_template(request, template).render(_context(request) | values), status_code=status)


async def large_page(
    request: Request, caller: Principal, template: str, /, *, status: int = 200, **values: Any
) -> HTMLResponse:
    """Return a page as ``page`` does, rendered on a thread: for thousands of elements, which take long."""
    services: ApiServices = request.app.state.services
    context = _context(request) | values
    render = _template(request, template).render
    return HTMLResponse(await services.admission.threads.run(caller.tenant, render, context), status_code=status)


def _template(request: Request, name: str) -> Template:
    environment: Environment = request.app.state.templates
    return environment.get_template(name)


def _context(request: Request) -> dict[str, Any]:
    me = getattr(request.state, "principal", None)
    services: ApiServices = request.app.state.services
    return {
        "me": me,
        "scopes": frozenset() if me is None else me.scopes,
        "navigation": () if me is None else entries_for(me),
        "path": request.url.path,
        "now": services.runtime.clock(),
        "is_insecure": request.app.state.is_insecure,
        "looker": getattr(request.state, "looker", None),
        "tenant_name": getattr(request.state, "tenant_name", None),
    }


def count(value: float | None) -> str:
    """Return a number with its thousands apart; a dash for none."""
    if value is None:
        return "–"
    text = f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
    return text.replace(",", _THIN)


def measured(value: float | None) -> str:
    """Return a measured number with four digits that count, from a thousand on a whole one; a dash for none.

    A power of ten is told of the least and greatest. ``static/numbers.js`` writes numbers in the same way.
    """
    if value is None:
        return "–"
    return count(round(value)) if 1e3 <= abs(value) < 1e7 else f"{value:.4g}"


def spark_label(losses: Sequence[float | None]) -> str:
    """Return what a sparkline of a run's mean losses shows, in words, with the last of them."""
    if not spark_path(losses):
        return "Mean loss: no curve yet"
    last = "none" if losses[-1] is None else measured(losses[-1])
    return f"Mean loss of the last {count(len(losses))} steps; at the last: {last}"


def byte_size(value: float | None) -> str:
    """Return a size in the unit that keeps it short."""
    if value is None:
        return "–"
    size, unit = float(value), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    number = f"{size:.0f}" if unit == 0 or size >= 100 else f"{size:.1f}"
    return f"{number}{_THIN}{_UNITS[unit]}"


def duration(value: timedelta | float | None) -> str:
    """Return a length of time in its two largest units, a number being seconds."""
    if value is None:
        return "–"
    seconds = value.total_seconds() if isinstance(value, timedelta) else float(value)
    if seconds < 1:
        return f"{seconds * 1000:.0f}{_THIN}ms"
    if seconds < 60:
        return f"{seconds:.1f}{_THIN}s" if seconds < 10 else f"{seconds:.0f}{_THIN}s"
    whole = int(seconds)
    for size, name, small, of_small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // small
            return f"{whole // size}{_THIN}{name}" + (f" {rest}{_THIN}{of_small}" if rest else "")
    return f"{whole}{_THIN}s"


def browser(agent: str) -> str:
    """Return the browser and system that a user agent names, or the agent itself if it is no browser's."""
    found = {name[1]: name for name in _BROWSER.finditer(agent)}
    name = next((found[one] for one in _BROWSER_NAMES if one in found), None)
    system = next((word for mark, word in _SYSTEMS if mark in agent), None)
    if name is None:
        return agent
    told = f"{_BROWSER_NAMES[name[1]]} {name[2]}"
    return told if system is None else f"{told} on {system}"


def told(value: object) -> str:
    """Return a value of an entry as text: a time to the second, a list by its members."""
    if isinstance(value, str) and _TIME.fullmatch(value):
        return exact(datetime.fromisoformat(value))
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    return str(value)


def short_id(id: str) -> str:
    """Return an id's beginning and end: a run's number in its session, or the last characters."""
    if len(id) < 20:
        return id
    return f"{id[:8]}…{id.partition(':')[2] or id[-6:]}"


def ago(value: datetime, now: datetime) -> str:
    """Return a time as its distance from ``now``."""
    seconds = (now - value.astimezone(UTC)).total_seconds()
    if abs(seconds) < 5:
        return "now"
    away = abs(seconds)
    told = f"{away:.0f}{_THIN}s" if away < 10 else duration(away).partition(" ")[0]
    return f"{told} ago" if seconds > 0 else f"in {told}"


def exact(value: datetime) -> str:
    """Return a time to the second, in UTC."""
    return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def marked(value: object) -> str:
    """Return a text with the characters that are not seen, or that turn others around, written as their numbers."""
    return _HIDDEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", unicodedata.normalize("NFC", str(value)))
