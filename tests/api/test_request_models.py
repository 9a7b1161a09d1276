"""The one rule for request models: beside their endpoint, unless several endpoint files or a codec read them."""

import importlib
import pkgutil
from types import ModuleType

import pytest

import api
from api.wire.request_model import DefaultingModel, RequestModel

MODULES: dict[str, ModuleType] = {
    module.name: importlib.import_module(module.name) for module in pkgutil.walk_packages(api.__path__, "api.")
}


def _models(root: type[RequestModel]) -> set[type[RequestModel]]:
    return {root} | {leaf for child in root.__subclasses__() for leaf in _models(child)}


REQUEST_MODELS = sorted(
    (model for model in _models(RequestModel) - {RequestModel, DefaultingModel} if model.__module__ in MODULES),
    key=lambda model: model.__name__,
)


@pytest.mark.parametrize("model", REQUEST_MODELS, ids=lambda model: model.__name__)
def test_a_request_model_stands_beside_its_endpoint_unless_it_is_shared(model: type[RequestModel]) -> None:
    home = MODULES[model.__module__]
    if hasattr(home, "router"):
        return
    readers = [
        module for module in MODULES.values() if module is not home and vars(module).get(model.__name__) is model
    ]
    is_one_endpoints = len(readers) == 1 and hasattr(readers[0], "router")
    assert not is_one_endpoints, f"only {readers[0].__name__} reads {model.__name__}: move it there"
