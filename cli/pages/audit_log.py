"""Page of the audit log: its fields, doors and actions, rendered from ``tenants.audit_actions``."""

from cli.pages.markdown import GENERATED, table
from tenants.audit_actions import MEANINGS

_HEAD = f"""# The audit log

{GENERATED.format(source="tenants/audit_actions.py")}

[See who did what](../how-to/see-who-did-what.md) tells how to read it, and
[decision 52](../decisions/0052-audit-in-the-changes-transaction.md) what is in it and what is not.

"""
_FIELDS = (
    ("`id`, `at`", "number of the entry, and its time in UTC"),
    (
        "`actor`",
        "a key's first part, or a part of weft (`housekeeping`, `jobs`). An operator's user and host are told to operators; "
        "tenants read `operator`. "
        "Another tenant is told to operators; the tenant whose checkpoint it uses reads `another tenant`, or which of its own "
        "keys was sent for it",
    ),
    ("`key_id`, `role`", "the key's number and role"),
    (
        "`door`",
        "`key`, `token` (stands for a key), `link` (a download), `ui` (a page in a browser), `share` (another tenant), "
        "`cli` (the `weft` command), "
        "`admin` (the operators' API), "
        "`service` (weft itself)",
    ),
    ("`action`", "`<resource>_<action>`, from the list below; `resource` is its first part"),
    (
        "`resource_id`",
        "what it was done to: a key's first part, a path or an id; of refusals the first request",
    ),
    ("`project_id`", "the project that it was in"),
    (
        "`before`, `after`",
        "what has changed, at most 4 KB, keys and passwords masked. Of an entry that stands for many requests `count`, `cause`, "
        "`since` and `until`",
    ),
    ("`address`, `trace_id`", "where the request came from, and its trace"),
    ("`outcome`", "`done` or `refused`"),
)
_TAIL = """
## The digest

A day's digest is the SHA-256 of lines of JSON, each with its keys sorted, no spaces and an end of line. The first line is
`{"day":"2027-01-31","previous":"…"}` with the digest before, empty for the first. Each entry of the day follows in order of its
`id`, with every column of `audit_entries`; `at` is written as `2027-01-31T12:00:00.000001+00:00`, without the fraction if it is
zero.
"""


def render() -> str:
    """Return the page."""
    rows = [(f"`{action}`", meaning) for action, meaning in MEANINGS.items()]
    fields = table(("field", "meaning"), _FIELDS)
    return f"{_HEAD}{fields}\n{table(('action', 'written when'), rows)}{_TAIL}"
