"""FinOps's own validator, in an environment of its own, finds nothing wrong with a FOCUS 1.2 export."""

import re
import subprocess
from pathlib import Path

import pytest

from tenants.usage_documents import Document, header, lines
from tests.conftest import ROOT, missing_service
from tests.tenants.test_focus_rows import LATER, rows
from tests.tenants.test_prices import exported
from tests.tenants.usage_books import Books

PYTHON = ROOT / ".venv-focus" / "bin" / "python"
SECONDS = 300
OFFERED = (
    "ACCOUNT_NAMING_SUPPORTED",
    "NEGOTIATED_PRICING_SUPPORTED",
    "PUBLIC_PRICE_LIST_SUPPORTED",
    "REGION_SUPPORTED",
    "RESOURCE_TYPE_ASSIGNMENT_SUPPORTED",
    "SUB_ACCOUNT_SUPPORTED",
    "TAGGING_SUPPORTED",
    "UNIT_PRICING_SUPPORTED",
    "USAGE_MEASUREMENT_SUPPORTED",
)
"""Features of a provider by which the validator chooses its rules: all that the export has columns for."""
LEAST_RULES = 250
HALVES = {"InvoiceId-C-005-C": "InvoiceId-C-003-C"}
"""Halves of a rule that has two, by the rule. The validator tells a half as failed even where the other one holds."""


def validated(document: Path) -> dict[str, str]:
    """Return the validator's word on each rule. Its own rules of 1.2 are used: nothing is downloaded."""
    (packages,) = PYTHON.parents[1].glob("lib/python*/site-packages")
    command = [PYTHON, "-m", "focus_validator.main", "--data-file", document, "--validate-version", "1.2"]
    command += ["--block-download", "--show-violations", "--applicability-criteria", ",".join(OFFERED)]
    # It looks for its list of currencies from where its packages are.
    finished = subprocess.run(command, cwd=packages, capture_output=True, text=True, timeout=SECONDS)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return dict(re.findall(r"^\S+ (\S+): ((?:PASS|FAIL|SKIPPED) .*)$", finished.stdout, re.MULTILINE))


def broken(told: dict[str, str]) -> dict[str, str]:
    """Return the rules that do not hold."""
    failed = {rule: word for rule, word in told.items() if word.startswith("FAIL")}
    return {rule: word for rule, word in failed.items() if not told.get(HALVES.get(rule, ""), "").startswith("PASS")}


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_the_validator_of_focus_finds_every_rule_kept_and_a_broken_one_broken(
    books: Books, tmp_path: Path
) -> None:
    if not PYTHON.exists():
        missing_service("FOCUS's validator", "no .venv-focus; run: make focus")
    await rows(books)
    pages = [lines(Document.FOCUS, await exported(books, who, LATER)) for who in (0, 1)]
    document = tmp_path / "usage.csv"
    document.write_bytes((header(Document.FOCUS) + "".join(pages)).encode())
    told = validated(document)
    assert broken(told) == {}
    assert sum(word.startswith("PASS") for word in told.values()) > LEAST_RULES
    document.write_bytes(document.read_bytes().replace(b",Usage-Based,", b",Hourly,"))
    assert any(rule.startswith("ChargeFrequency-") for rule in broken(validated(document)))
