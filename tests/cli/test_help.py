"""``weft COMMAND --help`` says all that the command line's declarations say: nothing of it is taken for markup."""

import re

import pytest
from typer import rich_utils
from typer.testing import CliRunner

from cli.main import app
from cli.pages.commands import commands


def words_of(text: str) -> str:
    """Return the text without what frames and wraps it."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())


def test_help_shows_every_word_of_every_command_and_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rich_utils, "MAX_WIDTH", 1000)
    for words, command in commands():
        shown = words_of(CliRunner().invoke(app, [*words.split()[1:], "--help"]).stdout)
        told = [command.help, *(getattr(one, "help", None) for one in command.params)]
        lost = [text for text in told if text and words_of(text) not in shown]
        assert not lost, f"{words}: {lost}"
