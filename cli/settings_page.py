"""The page of all settings, rendered from the settings class.

``python -m cli.settings_page`` writes ``docs/configuration.md``.
"""

from datetime import timedelta
from pathlib import Path

from store.settings import Settings

PAGE = Path("docs/configuration.md")
_HEAD = """# Configuration

Every setting is an environment variable, or a line of `weft.toml` in the current folder, there without `WEFT_` and in small
letters (`max_rank = 16`; `examples/weft.toml`); `WEFT_CONFIG` names another file. The environment wins over the file, and the
options `--base-model`, `--data`, `--host` and `--port` win over both. Durations are ISO 8601 (`PT25S`) or seconds. Lists are JSON
(`["org/name=/models/name"]`), in the file TOML's own. An unknown value stops the start with a message; `weft doctor` checks them
all. This page is generated from `store/settings.py`.

| variable | default | meaning |
|---|---|---|
"""


def render() -> str:
    """Return the page's Markdown."""
    rows = []
    for name, field in Settings.model_fields.items():
        default = field.default
        shown = f"{default.total_seconds():g} s" if isinstance(default, timedelta) else str(default)
        if default in (None, (), ""):
            shown = "none"
        rows.append(f"| `WEFT_{name.upper()}` | `{shown}` | {field.description} |\n")
    return _HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(render())
