"""Uses of a checkpoint by another tenant, or with a key of its tenant's that was sent as an access token.

The log of the checkpoint's tenant counts them, an entry a minute for each key, checkpoint and purpose (``tenants.audit_tally``).
"""

from enum import StrEnum

from api.services import ApiServices
from contracts.ids import TenantId
from contracts.paths import CheckpointPath
from telemetry.context import current_work
from tenants.audit import Actor, Door, session_of
from tenants.audit_actions import Action
from tenants.audit_tally import Repeated
from tenants.rights import Principal


class Purpose(StrEnum):
    """Use that is made of a checkpoint."""

    LOAD = "load"
    COPY = "copy"
    SAMPLE = "sample"


def shared_read(
    caller: Principal, owner: str, path: CheckpointPath, purpose: Purpose, holder: Principal | None = None
) -> Repeated | None:
    """Return the caller's use of a checkpoint of ``owner``'s; None for its own, used without an access token.

    ``holder``: principal of the key that was sent as access token.
    """
    if holder is None and owner == caller.tenant:
        return None
    trace = current_work().trace_id
    if holder is None:
        actor = Actor(Door.SHARE, caller.prefix, address=caller.address, trace_id=trace)
    else:
        actor = Actor(Door.SHARE, holder.prefix, holder.key_id, holder.role, caller.address, trace)
    return Repeated(
        action=Action.CHECKPOINT_READ,
        actor=actor,
        tenant=TenantId(owner),
        resource_id=str(path),
        cause=purpose,
        session_id=session_of(path.run_id),
    )


def note_shared_read(services: ApiServices, read: Repeated | None) -> None:
    """Count a use that was accepted, if there was one."""
    if read is not None:
        services.audit_tally.note(read)
