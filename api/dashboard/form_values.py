"""Values of a form's fields, and the API's own request models made of them."""

import math
import re
from collections.abc import Mapping
from typing import TypeVar

import orjson

from api.wire.json_counts import DATA
from api.wire.request_model import RequestModel, parse_json
from contracts.errors import InvalidRequest

M = TypeVar("M", bound=RequestModel)

_WHOLE = re.compile(r"-?[0-9]{1,19}")
_MOST = 2**63


def text(form: Mapping[str, str], name: str) -> str | None:
    """Return the field's text as it was sent, None if it is empty."""
    return form.get(name) or None


def trimmed(form: Mapping[str, str], name: str) -> str | None:
    """Return the field's text without the space around it, None if nothing is left."""
    return form.get(name, "").strip() or None


def number(form: Mapping[str, str], name: str) -> float | None:
    """Return the field as a finite number, None if it is empty. Raises ``InvalidRequest``."""
    given = trimmed(form, name)
    try:
        found = None if given is None else float(given)
    except ValueError:
        found = math.nan
    if found is not None and not math.isfinite(found):
        raise InvalidRequest(f"{name} must be a number")
    return found


def integer(form: Mapping[str, str], name: str) -> int | None:
    """Return the field as a whole number that 64 bits hold, None if it is empty. Raises ``InvalidRequest``."""
    given = trimmed(form, name)
    if given is None:
        return None
    if not _WHOLE.fullmatch(given) or not -_MOST <= int(given) < _MOST:
        raise InvalidRequest(f"{name} must be a whole number that 64 bits hold")
    return int(given)


def body_of(model: type[M], /, **values: object) -> M:
    """Return the request that the values make. Raises ``InvalidRequest`` naming the field.

    Values of None are left out, but for fields that the model requires: those are null.
    """
    fields = model.model_fields
    given = {
        name: value
        for name, value in values.items()
        if value is not None or (name in fields and fields[name].is_required())
    }
    return parse_json(model, orjson.dumps(given), DATA)
