"""Typed identifiers. A bare ``str`` from the wire becomes one of these only after a tenant-scoped lookup."""

from typing import NewType

TenantId = NewType("TenantId", str)
SessionId = NewType("SessionId", str)
RunId = NewType("RunId", str)
"""A training run and its one adapter: ``{session_id}:train:{model_seq_id}`` (the wire calls it ``model_id``)."""
SamplerId = NewType("SamplerId", str)
"""A sampling session: ``{session_id}:sample:{sampling_session_seq_id}``."""
CheckpointId = NewType("CheckpointId", str)
"""Row id of a checkpoint (opaque); the wire's ``checkpoint_id`` is ``{segment}/{name}`` within a run."""
RequestId = NewType("RequestId", str)
"""An operation: what ``retrieve_future`` asks for."""
