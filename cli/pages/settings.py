"""Page of every setting, rendered from the settings class."""

from datetime import timedelta

from cli.pages.markdown import GENERATED, table
from store.settings import Settings

_HEAD = f"""# Settings

{GENERATED.format(source="store/settings.py")}

A setting is read from three places. The first that has it wins:

1. the options `--base-model`, `--data`, `--host` and `--port`
2. an environment variable, `WEFT_MAX_RANK=16`
3. a line of `weft.toml` in the current folder, `max_rank = 16` (`WEFT_CONFIG` names another file)

`examples/weft.toml` is an example of such a file.

Durations are ISO 8601 (`PT25S`) or seconds. Lists are JSON (`["org/name=/models/name"]`); in the file they are TOML's own.
An unknown value stops the start with a message, and so does an unknown name in the file. A variable of an unknown name is told on
standard error. `weft doctor` checks them all.

"""


def render() -> str:
    """Return the page."""
    rows = []
    for name, field in Settings.model_fields.items():
        default = field.default
        shown = f"{default.total_seconds():g} s" if isinstance(default, timedelta) else str(default)
        if default in (None, (), ""):
            shown = "none"
        rows.append((f"`WEFT_{name.upper()}`", f"`{shown}`", field.description or ""))
    return _HEAD + table(("variable", "default", "meaning"), rows)
