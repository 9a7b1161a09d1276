"""Check of a commit message's first line: ``area: verb …``, at most 72 characters. A commit-msg hook of pre-commit."""

import re
import sys
from pathlib import Path

MOST_CHARACTERS = 72
_SUBJECT = re.compile(r"[a-z][a-z0-9_./-]*(, [a-z][a-z0-9_./-]*)*: [a-z]\S*( \S+)+")
"""One area or several, then a verb in small letters, then what it is about."""
_MADE_BY_GIT = re.compile(r"(Merge|Revert|Reapply|fixup!|squash!|amend!) ?\S")
_NO_VERBS = frozenset(
    {
        "a",
        "an",
        "and",
        "fixed",
        "fixes",
        "it",
        "of",
        "some",
        "that",
        "the",
        "they",
        "this",
        "what",
        "which",
        "who",
        "wip",
    }
)


def problems(subject: str) -> list[str]:
    """Return what is wrong with the subject, a line for each fault; none for a good one or one that git wrote."""
    if _MADE_BY_GIT.match(subject):
        return []
    found = []
    if len(subject) > MOST_CHARACTERS:
        found.append(f"the subject has {len(subject)} characters; {MOST_CHARACTERS} are the most")
    if not _SUBJECT.fullmatch(subject):
        found.append("the subject is not `area: verb …`, such as `ledger: count attempts`")
    elif subject.split(": ", 1)[1].split()[0] in _NO_VERBS:
        found.append("the word after the area is no verb")
    if subject.endswith("."):
        found.append("the subject ends with a full stop")
    return found


def main(path: Path) -> int:
    """Print the problems of the message in ``path``; return 1 when there are any."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    subject = next((line for line in lines if line.strip()), "")
    found = problems(subject)
    for problem in found:
        sys.stderr.write(f"commit message: {problem}\n  {subject}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
