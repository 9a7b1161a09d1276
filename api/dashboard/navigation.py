"""The dashboard's navigation: the pages that there are, and the scopes that show them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from tenants.rights import Principal, Scope


@dataclass(frozen=True, slots=True)
class Entry:
    """A page of the navigation, for principals with one of ``scopes``; none named: for all. ``group`` is its heading.

    ``is_whole``: the page is of the whole tenant, so keys of some projects do not have it.
    """

    title: str
    path: str
    group: str = ""
    scopes: tuple[Scope, ...] = ()
    is_whole: bool = False

    def is_open_to(self, principal: Principal) -> bool:
        """Return whether the principal may open the page."""
        if self.is_whole and principal.projects is not None:
            return False
        return not self.scopes or not principal.scopes.isdisjoint(self.scopes)


ENTRIES: tuple[Entry, ...] = (
    # A page adds its line here, in the order of the navigation.
    Entry("Overview", "/ui"),
    Entry("Runs", "/ui/runs", scopes=(Scope.READ,)),
    Entry("Queue", "/ui/queue", scopes=(Scope.READ,)),
    Entry("Checkpoints", "/ui/checkpoints", scopes=(Scope.READ,)),
    Entry("Playground", "/ui/playground", "Sampling", (Scope.READ,)),
    Entry("Samples", "/ui/samples", "Sampling", (Scope.READ, Scope.SAMPLE)),
    Entry("Adapters", "/ui/adapters", "Sampling", (Scope.READ, Scope.GATES)),
    Entry("Errors", "/ui/errors", "Account", (Scope.READ,)),
    Entry("Usage", "/ui/usage", "Account", (Scope.READ, Scope.USAGE)),
    Entry("Keys", "/ui/keys", "Account", (Scope.KEYS,)),
    Entry("Projects", "/ui/projects", "Account", (Scope.READ, Scope.PROJECTS)),
    Entry("Webhooks", "/ui/webhooks", "Account", (Scope.WEBHOOKS,), is_whole=True),
    Entry("Audit log", "/ui/audit", "Account", (Scope.AUDIT,)),
    Entry("Web sessions", "/ui/sessions", "Account"),
)


def entries_for(principal: Principal) -> Sequence[tuple[str, Sequence[Entry]]]:
    """Return the entries that the principal may open, by their groups."""
    open_to = [one for one in ENTRIES if one.is_open_to(principal)]
    return [(group, list(entries)) for group, entries in groupby(open_to, key=lambda one: one.group)]
