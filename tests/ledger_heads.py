"""Operations that may run now, as the trainer sees them: the heads of the lanes that the ledger's rows make."""

from datetime import datetime

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ledger_records import ReadyOperation
from ledger.ledger import Ledger
from ledger.sample_claims import waiting_samples
from store.clock import utc_now
from store.tables import Run
from workers.training.lanes import Lanes

TRAINER = "the only trainer"


async def ready_heads(ledger: Ledger, session: AsyncSession, base_model: str) -> list[ReadyOperation]:
    """The head of each run of ``base_model``, in order of acceptance."""
    await session.execute(update(Run).where(Run.trainer_id.is_(None)).values(trainer_id=TRAINER))
    await session.commit()
    lanes = Lanes()
    lanes.add_pending(await ledger.pending_training(session, base_model, trainer=TRAINER, after_position=0))
    wanted = [one.id for lane in lanes for one in lane.to_load(1)]
    lanes.add_payloads(await ledger.load(session, wanted))
    return sorted((head for lane in lanes if (head := lane.head) is not None), key=lambda head: head.position)


async def pending_samples(
    ledger: Ledger, session: AsyncSession, base_model: str, now: datetime | None = None
) -> list[ReadyOperation]:
    """The unclaimed samples of ``base_model``, in order of acceptance."""
    waiting = (await waiting_samples(session, base_model, of_each=256, now=now or utc_now())).of
    ids = [sample.id for samples in waiting.values() for sample in samples]
    return await ledger.load(session, ids) if ids else []
