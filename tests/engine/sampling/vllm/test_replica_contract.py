"""The suite that every replica passes, on a real vLLM server: its tests, with this folder's ``client``."""

from tests.engine.sampling.test_replica_contract import *  # noqa: F403

del client  # type: ignore[name-defined]  # noqa: F821
