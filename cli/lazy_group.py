"""Groups of commands whose module is imported when one of its commands is called or listed, and not for ``weft --help``."""

from functools import cached_property
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup


def add_lazy_group(app: typer.Typer, name: str, module: str, about: str, attribute: str = "app") -> None:
    """Give ``app`` the group of commands that ``module`` declares as ``attribute``. ``about`` is the group's help."""

    class LazyGroup(TyperGroup):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            # The attribute of the base hides the property below.
            del self.__dict__["commands"]

        @cached_property
        def commands(self) -> Any:  # type: ignore[override]
            return typer.main.get_group(getattr(import_module(module), attribute)).commands

    app.add_typer(typer.Typer(), name=name, cls=LazyGroup, help=about, no_args_is_help=True)
