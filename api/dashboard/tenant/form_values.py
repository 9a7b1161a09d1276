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

_WHOLE = re.compile(r"-?[0-9]{1,18}")
"""A whole number that 64 bits hold."""


def text(form: Mapping[str, str], name: str) -> str | None:
    """Return the field's text, None if it is empty."""
    return form.get(name) or None


def number(form: Mapping[str, str], name: str) -> float | None:
    """Return the field as a number, None if it is empty. Raises ``InvalidRequest``."""
    given = text(form, name)
    try:
        found = None if given is None else float(given)
    except ValueError:
        found = math.nan
    if found is not None and not math.isfinite(found):
        raise InvalidRequest(f"{name} must be a number")
    return found


def integer(form: Mapping[str, str], name: str) -> int | None:
    """Return the field as a whole number, None if it is empty. Raises ``InvalidRequest``."""
    given = text(form, name)
    if given is not None and not _WHOLE.fullmatch(given):
        raise InvalidRequest(f"{name} must be a whole number of at most 18 digits")
    return None if given is None else int(given)


def filled(model: type[M], /, **values: object) -> M:
    """Return the request that the values make, without those that are None. Raises ``InvalidRequest`` naming the field."""
    given = {name: value for name, value in values.items() if value is not None}
    return parse_json(model, orjson.dumps(given), DATA)
