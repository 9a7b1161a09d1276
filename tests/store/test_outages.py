"""Errors of a database that is away are told from errors in a statement."""

import pytest
from sqlalchemy.exc import DBAPIError, IntegrityError

from contracts.errors import Unavailable
from store.outages import outages_as_unavailable


class PostgresError(Exception):
    """A driver's error with PostgreSQL's code."""

    def __init__(self, sqlstate: str) -> None:
        super().__init__(sqlstate)
        self.sqlstate = sqlstate


@pytest.mark.parametrize(
    "sqlstate",
    [
        pytest.param("57P03", id="the server is starting up"),
        pytest.param("57P01", id="the server is shutting down"),
        pytest.param("53300", id="too many connections"),
        pytest.param("53100", id="the disk is full"),
        pytest.param("40P01", id="a deadlock"),
        pytest.param("25006", id="a standby"),
    ],
)
def test_what_passes_by_itself_is_unavailable(sqlstate: str) -> None:
    with pytest.raises(Unavailable), outages_as_unavailable():
        raise DBAPIError("SELECT 1", {}, PostgresError(sqlstate))


@pytest.mark.parametrize("sqlstate", ["42601", "42P01", "22021", "23505"])
def test_an_error_in_a_statement_is_told_as_it_is(sqlstate: str) -> None:
    with pytest.raises(DBAPIError), outages_as_unavailable():
        raise DBAPIError("SELECT 1", {}, PostgresError(sqlstate))
    with pytest.raises(IntegrityError), outages_as_unavailable():
        raise IntegrityError("INSERT", {}, PostgresError(sqlstate))
