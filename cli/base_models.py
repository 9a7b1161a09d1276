"""``--base-model [NAME=]PATH``: reads the facts of the base models that the settings name."""

import ipaddress
from pathlib import Path

from contracts.base_model import BaseModelFacts, read_base_model_facts
from contracts.errors import InvalidRequest
from contracts.tokenizer_ids import is_repository_id, sdk_tokenizer_id
from engine.model.class_defaults import class_defaults
from store.settings import Settings, name_of_base


def read_base_models(settings: Settings) -> dict[str, BaseModelFacts]:
    """Return the facts of every base of ``settings.base_models`` by served name.

    Raises ``InvalidRequest`` when none is given, two share a name, or one cannot be read.
    """
    if not settings.base_models:
        raise InvalidRequest("no base model: pass --base-model [NAME=]PATH; `weft model tiny DIR` makes a small one")
    bases: dict[str, BaseModelFacts] = {}
    for spec in settings.base_models:
        name, path = split_spec(spec)
        if name in bases:
            raise InvalidRequest(f"two base models are named {name!r}; give one another NAME=")
        bases[name] = read_base_model_facts(name, path, _tokenizer_id(name, path, settings), class_defaults)
    return bases


def split_spec(spec: str) -> tuple[str, Path]:
    """Split ``NAME=PATH`` into name and path; of a bare ``PATH`` the path, as written, is the name."""
    name, separator, path = spec.partition("=")
    if not separator:
        return name_of_base(spec), Path(spec).expanduser().resolve()
    if not name or not path:
        raise InvalidRequest(f"base model {spec!r}: write NAME=PATH, or PATH alone")
    return name, Path(path).expanduser().resolve()


def _tokenizer_id(name: str, path: Path, settings: Settings) -> str | None:
    """Return the id that training clients give to ``AutoTokenizer``, None where they make the right one from the name.

    The model's folder is an id for clients that share the server's disk only. The SDK cuts the id at a colon, so a path with
    a colon cannot be an id. A name that is no repository's id is a path, which a client may share.
    """
    has_tokenizer = any((path / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json"))
    if has_tokenizer and _is_for_this_machine(settings) and ":" not in str(path):
        return str(path)
    return None if is_repository_id(sdk_tokenizer_id(name)) else name


def _is_for_this_machine(settings: Settings) -> bool:
    """Return whether all clients are on this machine: nothing else reaches loopback, and no proxy or tunnel is told of."""
    is_passed_on = settings.public_url is not None or settings.trusted_hosts or settings.trusted_proxies
    return not is_passed_on and _is_loopback(settings.host)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
