"""Typed identifiers. A ``str`` from the wire becomes an identifier only after a look-up within its tenant."""

from typing import NewType

TenantId = NewType("TenantId", str)
SessionId = NewType("SessionId", str)
RunId = NewType("RunId", str)
"""A training run and its one adapter: ``{session_id}:train:{model_seq_id}`` (the wire calls it ``model_id``)."""
SamplerId = NewType("SamplerId", str)
"""A sampling session: ``{session_id}:sample:{sampling_session_seq_id}``."""
CheckpointId = NewType("CheckpointId", str)
"""Opaque row id of a checkpoint. The wire's ``checkpoint_id`` is something else: ``{segment}/{name}`` within a run."""
RequestId = NewType("RequestId", str)
"""Id of an operation, by which ``retrieve_future`` asks for its result."""
