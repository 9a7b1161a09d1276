"""Modules that are loaded at the first use of one of their names, so that the import of the client takes no time."""

from importlib import import_module
from typing import Any


class Later:
    """A module that is not loaded before a name of it is used."""

    def __init__(self, name: str) -> None:
        self._module_name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._module_name), name)
