"""Commands read the answers of services of other versions, print what they answer, and explain what they cannot read or send."""

import json
from collections.abc import Iterator, Sequence

import pytest
from typer.testing import CliRunner, Result

from cli.main import app
from tests.api.admin.test_commands import CHANGES, HTTP_ONLY, READS
from tests.other_versions import AdminService, Version, admin_service

NAMES = {
    "tenant": "cats",
    "run": "session:train:0",
    "session": "session",
    "requeued": "one",
    "cancelled": "two",
    "failed": "three",
    "key": "tml-0123456789ab",
    "trainer": "trainer",
    "event": "event",
}
COMMANDS = [tuple(word.format(**NAMES) for word in command) for command in (*READS, *CHANGES, *HTTP_ONLY)]
LONG = "x" * 2001
REFUSED = (
    (("tenant", "create", ""), "name: "),
    (("tenant", "set", "cats", "--share", "nan"), "share: "),
    (("tenant", "set", "cats", "--limit", f"sessions={2**63}"), "limits.sessions: "),
    (("tenant", "budget", "cats", "--day", "5", "--currency", "dollars"), "currency: "),
    (("tenant", "suspend", "cats", "--reason", LONG), "reason: "),
    (("tenant", "delete", "cats", "--grace", "999999d"), "grace_seconds: "),
    (("key", "create", "--max-rank", "0"), "max_rank: "),
    (("key", "create", "--note", LONG), "note: "),
    (("key", "create", "--expires", "9999-12-31"), "expires_at: "),
    (("key", "set", NAMES["key"], "--limit", f"{LONG}=1"), "limits."),
    (("key", "rotate", NAMES["key"], "--grace", "45d"), "grace_seconds: "),
    (("price", "add", "storage", LONG), "amount: "),
    (("project", "create", LONG), "name: "),
    (("project", "set", "archive", "--limit", f"{LONG}=1"), "limits."),
    (("operation", "cancel", "one", "--reason", LONG), "reason: "),
    (("operation", "fail", "one", "--reason", LONG), "reason: "),
    (("gate", "pause", "--pool", "base", "--reason", LONG), "reason: "),
    (("replica", "drain", "one", "--base", ""), "base_model: "),
    (("replica", "sleep", "one", "--base", "base", "--reason", LONG), "reason: "),
    (("trainer", "drain", "one", "--reason", LONG), "reason: "),
    (("run", "move", "one", "--reason", LONG), "reason: "),
    (("run", "weigh", "one", "nan"), "weight: "),
    (("run", "evict", "one", "--reason", LONG), "reason: "),
    (("session", "end", "one", "--reason", LONG), "reason: "),
    (("webhook", "set", "bell", *["--event", "job.finished"] * 100), "events: "),
)
"""Commands with what the service takes of nobody, and the field that the message names."""
TELLS_FAILURES = {("audit", "verify"), ("usage", "verify"), ("housekeeping", "run")}
"""Commands that exit with 1 for what the answers here tell."""
BOUNDLESS = {("base", "accept"), ("housekeeping", "run")}
"""Commands that send a body to which they can give no wrong value."""


@pytest.fixture(scope="module")
def admin() -> Iterator[AdminService]:
    with admin_service() as service:
        yield service


def weft(service: AdminService, *arguments: str) -> Result:
    environment = {"WEFT_ADMIN_URL": service.url, "WEFT_ADMIN_KEY": "tml-key", "FORCE_COLOR": "1"}
    return CliRunner().invoke(app, list(arguments), env=environment)


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("version", [Version.OLDER, Version.NEWER])
def test_a_command_prints_the_answer_of_a_service_of_another_version(
    admin: AdminService, version: Version, arguments: Sequence[str]
) -> None:
    admin.begin(version)
    ended = weft(admin, *arguments)
    is_failure = arguments[:2] in TELLS_FAILURES and (version is Version.NEWER or arguments[0] != "housekeeping")
    assert ended.exit_code == is_failure, (ended.output, ended.exception)
    assert isinstance(ended.exception, SystemExit | None)
    assert "\x1b" not in ended.output, "no colour where there is no terminal"


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_the_json_of_a_command_is_the_record_of_the_openapi_document(
    admin: AdminService, arguments: Sequence[str]
) -> None:
    admin.begin(Version.SAME)
    told = json.loads(weft(admin, *arguments, "--json").output)
    assert told in admin.told or (set(told) == {"done"} and admin.asked[-1][0] == "DELETE"), (told, admin.told)
    sends_body = any(body for _, _, body in admin.asked)
    assert sends_body == (arguments[:2] in BOUNDLESS | {refused[:2] for refused, _ in REFUSED}), (
        "each has a wrong value"
    )


def test_words_of_a_newer_service_are_printed_as_they_are(admin: AdminService) -> None:
    admin.begin(Version.NEWER)
    (key,) = weft(admin, "key", "list").output.splitlines()
    assert "\ta_word_more scope=1.5 " in key
    assert weft(admin, "run", "evict", "one").output == "1.5\ta_word_more\n"
    assert weft(admin, "top", "--once").output.count("a_word_more") == 3


@pytest.mark.parametrize(
    "arguments", [("tenant", "list"), ("tenant", "set", "cats", "--share", "2"), ("top", "--once")]
)
def test_an_answer_that_cannot_be_read_is_told_to_be_of_another_version(
    admin: AdminService, arguments: Sequence[str]
) -> None:
    admin.begin(Version.SAME).without.update({"items", "window_seconds"})
    ended = weft(admin, *arguments)
    field = "window_seconds" if arguments[0] == "top" else "items"
    assert (ended.exit_code, type(ended.exception)) == (3, SystemExit)
    assert ended.output.startswith("weft: the answer to GET /admin/v1/")
    assert f"({field}: Field required): the service is of another version than this command" in ended.output


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("run", "show", "one"), "tokens_per_second"),
        (("replica", "show", "--base", "base"), "since"),
        (("tenant", "delete", "cats"), "delete_at"),
    ],
)
def test_a_field_that_may_be_null_may_be_missing_alone(
    admin: AdminService, arguments: Sequence[str], field: str
) -> None:
    admin.begin(Version.SAME).without.add(field)
    ended = weft(admin, *arguments)
    assert (ended.exit_code, "None" in ended.output) == (0, False), ended.exception


@pytest.mark.parametrize(("version", "sent"), [(Version.SAME, '"1"'), (Version.OLDER, None)])
def test_a_change_names_the_version_that_was_read_if_there_is_one(
    admin: AdminService, version: Version, sent: str | None
) -> None:
    assert weft(admin.begin(version), "tenant", "set", "cats", "--share", "2").exit_code == 0
    assert admin.asked[-1][0] == "PATCH"
    assert admin.if_match == sent


def test_an_export_says_when_it_is_not_told_which_hours_may_change(admin: AdminService) -> None:
    admin.begin(Version.OLDER)
    ended = weft(admin, "usage", "export", "--tenant", "cats", "--since", "2026-01-01")
    assert (ended.exit_code, ended.stderr) == (0, "the service does not say which hours may still change\n")


@pytest.mark.parametrize(("arguments", "field"), REFUSED, ids=[" ".join(one)[:40] for one, _ in REFUSED])
def test_a_value_that_no_service_takes_is_refused_in_words(
    admin: AdminService, arguments: Sequence[str], field: str
) -> None:
    admin.begin(Version.SAME)
    ended = weft(admin, *arguments)
    assert (ended.exit_code, type(ended.exception)) == (1, SystemExit), ended.exception
    assert ended.output.startswith(f"weft: {field}")
    assert {method for method, _, _ in admin.asked} <= {"GET"}, "nothing is changed"
