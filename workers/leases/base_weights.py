"""The check of a process's base weights: a process with other ones than the base model's name stands for gets no work."""

import asyncio
import logging
from functools import partial
from pathlib import Path

from contracts.errors import InvalidRequest
from engine.model.fingerprint import weights_fingerprint
from ledger.runtime import Runtime
from telemetry.readiness import NotReady
from tenants.base_weights import accepted_fingerprint, record_first

log = logging.getLogger(__name__)


class WeightsCheck:
    """Compares the weights in ``folder`` with those that the base model's name stands for."""

    def __init__(self, runtime: Runtime, base_model: str, folder: Path) -> None:
        self._database = runtime.database
        self._clock = runtime.clock
        self._base_model = base_model
        self._fingerprint = partial(weights_fingerprint, folder, dtype=runtime.settings.base_dtype)
        self._own: str | None = None
        self.refusal: str | None = None
        """Reason why the process gets no work of the base model; None while it may."""

    async def are_accepted(self) -> bool:
        """Return whether the process may work on the base model. The first process ever to ask may. Raises ``Unavailable``."""
        try:
            own = await self._read()
        except InvalidRequest as error:
            return self._found(error.message)
        async with self._database.read() as session:
            accepted = await accepted_fingerprint(session, self._base_model)
        if accepted is None:
            async with self._database.write() as transaction:
                await record_first(transaction, self._base_model, own, self._clock())
                accepted = await accepted_fingerprint(transaction, self._base_model)
        if accepted == own:
            return self._found(None)
        return self._found(
            f"base model {self._base_model}: this process has other weights ({own[:12]}) than those that its runs were trained "
            f"on ({(accepted or '')[:12]}); give it those, or, if the change is meant, run `weft base accept {self._base_model}`"
        )

    async def _read(self) -> str:
        if self._own is None:
            self._own = await asyncio.to_thread(self._fingerprint)
        return self._own

    def check(self) -> None:
        """Raise ``NotReady`` with the refusal, if there is one."""
        if self.refusal is not None:
            raise NotReady(self.refusal)

    def _found(self, refusal: str | None) -> bool:
        if refusal is not None and refusal != self.refusal:
            log.error("%s", refusal)
        self.refusal = refusal
        return refusal is None
