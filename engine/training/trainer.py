"""Trains many LoRA adapters on one frozen base model: fused passes and optimizer steps.

Synchronous. One thread calls it, but ``state`` and ``compute`` change nothing and may be called from any thread. Invariants:

- An operation's gradient reaches its own adapter's accumulator only, and all of it or none.
- An operation that fails fails alone.
- A state is a value: it is replaced and never changed.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from contracts.errors import EngineFailure, InvalidRequest, OutOfMemory, WeftError
from contracts.ids import RunId
from contracts.operations import ForwardBackwardOutput, LoraSettings, OptimizerName, OptimStep, OptimStepped
from contracts.pass_report import PassReport
from engine.model.base import BaseModel
from engine.model.device import device_errors, is_lack_of_memory
from engine.model.lora import LoraLayout, LoraWeights, bare_weights
from engine.training.adamw import StepResult, StepTask, adamw_steps, check_step
from engine.training.adapter_state import AdapterState, OptimizerState
from engine.training.batch_checks import check_batch
from engine.training.custom_loss import Evaluated
from engine.training.executors.threads import MicroBatchThreads
from engine.training.fused_pass import ComputedPass, FusedPass, MicroBatchExecutor
from engine.training.micro_batch_memory import MicroBatchMemory
from engine.training.muon import dimuon_step
from engine.training.pass_operation import PassItem, PassOperation, PassPiece, PieceResult

log = logging.getLogger(__name__)

__all__ = ["ComputedPass", "PassItem", "PassOperation", "PassPiece", "Trainer"]

DEFAULT_PASS_TOKEN_BUDGET = 2048
_STEP_ELEMENTS = 2**28
"""Most parameters in one fused step. The step needs a few times the parameters' memory besides the adapters."""
_Stepped = tuple[AdapterState | None, OptimStepped | WeftError]


class Trainer:
    """Holds the states of one base model's adapters in memory and computes on them."""

    def __init__(
        self,
        base: BaseModel,
        *,
        pass_token_budget: int = DEFAULT_PASS_TOKEN_BUDGET,
        executor: MicroBatchExecutor | None = None,
    ) -> None:
        """Compute on ``base``. ``executor`` computes the micro-batches; None: threads of this process."""
        self.base = base
        self._token_budget = pass_token_budget
        self.memory = MicroBatchMemory()
        self._executor = executor or MicroBatchThreads(base.device)
        self._states: dict[RunId, AdapterState] = {}

    def holds(self, run: RunId) -> bool:
        """Tell whether the run's adapter is in memory."""
        return run in self._states

    def runs(self) -> list[RunId]:
        """Return the runs whose adapters are in memory."""
        return list(self._states)

    def state(self, run: RunId) -> AdapterState:
        """Return the run's state as it is now; later passes and steps do not change it. Raises ``EngineFailure`` if not held."""
        try:
            return self._states[run]
        except KeyError:
            raise EngineFailure("the adapter is not in memory") from None

    def nbytes(self) -> int:
        """Return the bytes of all states held."""
        return sum(state.nbytes for state in self._states.values())

    def create(self, run: RunId, settings: LoraSettings) -> None:
        """Hold a fresh adapter as the run's. Raises ``InvalidRequest`` when the settings leave nothing to train."""
        self.put(run, fresh_state(self.base, settings))

    def put(self, run: RunId, state: AdapterState) -> None:
        """Hold ``state`` as the run's."""
        self._states[run] = state

    def unload(self, run: RunId) -> AdapterState | None:
        """Drop the run's adapter and return its state; None when it was not held."""
        return self._states.pop(run, None)

    # --- passes ----------------------------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        """Number of one-slot passes that can be computed at once. One pass may take several slots."""
        return self._executor.slots

    def compute(self, pieces: Sequence[PassPiece], *, slots: int | None = None) -> ComputedPass:
        """Compute the pieces in one fused pass on ``slots`` slots; None: on all. At most one piece of each operation.

        For any thread, several at once. The pieces' adapters must not change meanwhile. Raises only for a failure of the
        whole pass.
        """
        weights: list[LoraWeights] = []
        present: list[PassPiece] = []
        refused: list[tuple[PassPiece, PieceResult]] = []
        for piece in pieces:
            operation = piece.operation
            if operation.outcome is not None:
                continue
            try:
                if not operation.is_checked:
                    check_batch(operation.batch, self.base.facts, backward=operation.backward)
                    operation.is_checked = True
                weights.append(self._weights(operation))
                present.append(piece)
            except WeftError as error:
                refused.append((piece, PieceResult(piece.sequences, error=error)))
        computed = FusedPass(
            self.base,
            present,
            weights,
            token_budget=self._token_budget,
            executor=self._executor,
            slots=slots or self.slots,
            memory=self.memory,
        ).run()
        return replace(
            computed,
            pieces=computed.pieces + [piece for piece, _ in refused],
            results=computed.results + [result for _, result in refused],
        )

    def _weights(self, operation: PassOperation) -> LoraWeights:
        """Return the weights that the operation computes with. Raises ``EngineFailure`` when the adapter is not in memory."""
        if operation.batch.without_adapter:
            return bare_weights(self.base.device)
        return self.state(operation.run).weights

    def finish(self, computed: ComputedPass, in_order: Sequence[PassOperation]) -> None:
        """Note a pass's results, and end the operations that are complete.

        ``in_order`` are the operations under way, in which each run's operations keep their order. An operation ends only
        after the run's operations before it. Raises ``DeviceFailed``.
        """
        for piece, result in zip(computed.pieces, computed.results, strict=True):
            with self._failing_alone(piece.operation):
                piece.operation.note(piece, result)
        self.end_complete(in_order)

    def end_complete(self, in_order: Sequence[PassOperation]) -> None:
        """End those of ``in_order`` that are complete: see ``finish``."""
        held_up: set[RunId] = set()
        for operation in in_order:
            if operation.outcome is not None or operation.run in held_up:
                continue
            if operation.is_complete:
                operation.end(self._finished(operation))
            else:
                held_up.add(operation.run)

    def finish_evaluated(
        self, operation: PassOperation, found: Evaluated | WeftError, in_order: Sequence[PassOperation]
    ) -> None:
        """Note a custom loss, and end the operations that are complete: see ``finish``."""
        with self._failing_alone(operation):
            operation.note_evaluated(found)
        self.end_complete(in_order)

    @contextmanager
    def _failing_alone(self, operation: PassOperation) -> Iterator[None]:
        """End the operation when the block raises: the others of its pass go on. Raises ``DeviceFailed``."""
        try:
            with device_errors():
                yield
        except Exception as error:  # the edge of one operation
            log.exception("an operation's results could not be noted base=%s", self.base.facts.name)
            operation.end(_failure("add up this operation", error))

    def advance(self, pieces: Sequence[PassPiece]) -> PassReport:
        """Run ``compute`` on all slots, then ``finish``. Raises only for a failure of the whole pass, which changes nothing."""
        computed = self.compute(pieces)
        self.finish(computed, [piece.operation for piece in pieces])
        return computed.report

    def run_pass(self, items: Sequence[PassItem]) -> list[ForwardBackwardOutput | WeftError]:
        """Compute whole items in one fused pass and return their outcomes in order. Raises as ``advance`` does."""
        operations = [PassOperation(item.run, item.batch, item.backward) for item in items]
        self.advance([operation.next_piece(len(operation.batch.data)) for operation in operations])
        if custom := [operation for operation in operations if operation.awaits_loss]:
            for operation in custom:
                try:
                    operation.note_evaluated(operation.evaluate())
                except WeftError as error:
                    operation.note_evaluated(error)
            self.advance(
                [one.next_piece(len(one.batch.data)) for one in custom if one.lengths_left and one.outcome is None]
            )
            self.end_complete(operations)
        return [operation.outcome or EngineFailure("the pass left out a sequence") for operation in operations]

    def _finished(self, operation: PassOperation) -> ForwardBackwardOutput | WeftError:
        try:
            with device_errors():
                return self._finish(operation)
        except Exception as error:  # the edge of one operation: the others of the pass go on
            log.exception("an operation could not be finished base=%s", self.base.facts.name)
            return _failure("add up this operation", error)

    def _finish(self, operation: PassOperation) -> ForwardBackwardOutput | WeftError:
        """Accumulate the operation's gradient and return its output.

        A sum whose norm is not finite is refused whole: it would fail every later step. Accumulating comes last, so an
        operation that fails has changed nothing.
        """
        output, gradient = operation.output(), operation.gradient
        if isinstance(output, WeftError):
            return output
        if gradient is not None:
            state = self.state(operation.run)
            if state.gradient is not None:
                gradient = state.gradient + gradient
            if not torch.isfinite(torch.linalg.vector_norm(gradient)):
                return InvalidRequest("the gradient is too large or not finite: lower the weights or advantages")
            self._states[operation.run] = replace(state, gradient=gradient)
        return output

    # --- optimizer steps -------------------------------------------------------------------------------------------

    def optim_step(self, run: RunId, step: OptimStep) -> OptimStepped:
        """Take one optimizer step on the accumulated gradient (zeros if there is none), and clear the gradient.

        Raises ``InvalidRequest``, changing nothing, when weights or moments would not be finite after the step.
        """
        outcome = self.optim_steps([(run, step)])[0]
        if isinstance(outcome, WeftError):
            raise outcome
        return outcome

    def optim_steps(self, steps: Sequence[tuple[RunId, OptimStep]]) -> list[OptimStepped | WeftError]:
        """Take the steps of many adapters, fused, and return their outcomes in order. A step that fails fails alone.

        A step whose outcome is an error has changed nothing. Raises ``DeviceFailed``.
        """
        outcomes: dict[int, OptimStepped | WeftError] = {}
        for wave in _waves([run for run, _ in steps]):
            group: dict[int, tuple[RunId, OptimStep]] = {}
            elements = 0
            for index in wave:
                run, step = steps[index]
                try:
                    check_step(step)
                    _check_optimizer(self.state(run), step)
                    size = self.state(run).weights.layout.size
                except WeftError as error:
                    outcomes[index] = error
                    continue
                if group and elements + size > _STEP_ELEMENTS:
                    outcomes |= self._step_together(group)
                    group, elements = {}, 0
                group[index] = steps[index]
                elements += size
            if group:
                outcomes |= self._step_together(group)
        return [outcomes[index] for index in range(len(steps))]

    def _step_together(self, steps: Mapping[int, tuple[RunId, OptimStep]]) -> dict[int, OptimStepped | WeftError]:
        """Take the steps of adapters in memory, at most one of each run; outcomes by the caller's index."""
        try:
            with device_errors():
                stepped = self._stepped(steps)
        except Exception as error:  # the edge of one group: the groups before it stay as they are
            log.exception("optimizer steps failed base=%s steps=%d", self.base.facts.name, len(steps))
            if len(steps) > 1:
                outcomes: dict[int, OptimStepped | WeftError] = {}
                for index, one in steps.items():
                    outcomes |= self._step_together({index: one})
                return outcomes
            return dict.fromkeys(steps, _failure("compute this step", error))
        # Nothing can fail from here on: the steps of a group are applied all together.
        self._states.update((steps[index][0], state) for index, (state, _) in stepped.items() if state is not None)
        return {index: outcome for index, (_, outcome) in stepped.items()}

    def _stepped(self, steps: Mapping[int, tuple[RunId, OptimStep]]) -> dict[int, _Stepped]:
        """Return the new states and outcomes by the caller's index, and change nothing. The state is None after an error."""
        tasks = [_task(self.state(run), step) for run, step in steps.values()]
        layouts = [self.state(run).weights.layout for run, _ in steps.values()]
        found: dict[int, _Stepped] = {}
        for (index, (run, step)), task, result in zip(steps.items(), tasks, _results(tasks, layouts), strict=True):
            if not result.is_finite:
                field = "adam_params" if step.optimizer is OptimizerName.ADAMW else "optimizer_params"
                refusal = InvalidRequest(
                    f"{field}: this step would leave weights that are not finite (learning_rate "
                    f"{step.learning_rate}, eps {step.eps}); nothing was changed"
                )
                found[index] = None, refusal
                continue
            weights = replace(self.state(run).weights, vector=result.parameters)
            optimizer = OptimizerState(result.exp_avg, result.exp_avg_sq, task.step_count, step.optimizer)
            outcome = OptimStepped({"grad_norm:max": result.grad_norm, "step:max": float(task.step_count)})
            found[index] = AdapterState(weights, gradient=None, optimizer=optimizer), outcome
        return found


def fresh_state(base: BaseModel, settings: LoraSettings) -> AdapterState:
    """Return a new adapter's state. Raises ``InvalidRequest`` when the settings ask for what the base has not, or for nothing."""
    for group, field in (("attn", "train_attn"), ("mlp", "train_mlp")):
        if getattr(settings, field) and not any(one.group == group for one in base.projections.values()):
            raise InvalidRequest(
                f"lora_config: {field} must be false: {base.name} has no {group} layers that adapters can change, such as "
                "where all experts are routed"
            )
    if not len(base.layout(settings)):
        raise InvalidRequest("lora_config: train_attn, train_mlp and train_unembed leave nothing to train")
    return AdapterState(LoraWeights.initialise(settings, base.layout(settings), base.device))


def loaded_state(held: AdapterState, found: AdapterState) -> AdapterState:
    """Return ``found`` if a run that has ``held`` may load it. Raises ``InvalidRequest`` when rank or targets differ."""
    ours, theirs = held.weights.layout, found.weights.layout
    if ours.key != theirs.key:
        raise InvalidRequest(
            f"path: the checkpoint has rank {theirs.rank} on {len(theirs)} layers, this model has "
            f"rank {ours.rank} on {len(ours)}; they must be the same"
        )
    return found


def _failure(work: str, error: Exception) -> EngineFailure:
    """Return the error of an operation whose ``work`` has failed, which has changed nothing."""
    if is_lack_of_memory(error):
        return OutOfMemory(f"the device has no memory to {work} now; nothing was changed: send the request again")
    return EngineFailure(f"weft could not {work}; nothing was changed")


def _task(state: AdapterState, step: OptimStep) -> StepTask:
    """Return the adapter's next step. A missing gradient or moment counts as zeros."""
    vector = state.weights.vector
    gradient = torch.zeros_like(vector) if state.gradient is None else state.gradient
    moments = state.optimizer or OptimizerState.fresh(step.optimizer, state.weights)
    return StepTask(vector, gradient, moments.exp_avg, moments.exp_avg_sq, moments.step + 1, step)


def _results(tasks: Sequence[StepTask], layouts: Sequence[LoraLayout]) -> list[StepResult]:
    """Return the tasks' results in order: the AdamW steps fused, each dimuon step by itself."""
    by_adamw = [task for task in tasks if task.step.optimizer is OptimizerName.ADAMW]
    fused = iter(adamw_steps(by_adamw) if by_adamw else [])
    return [
        next(fused) if task.step.optimizer is OptimizerName.ADAMW else dimuon_step(task, layout)
        for task, layout in zip(tasks, layouts, strict=True)
    ]


def _check_optimizer(state: AdapterState, step: OptimStep) -> None:
    """Raise ``InvalidRequest`` for a step of another optimizer than the one whose moments the adapter has."""
    if state.optimizer is not None and state.optimizer.name is not step.optimizer:
        raise InvalidRequest(
            f"the adapter has the optimizer state of {state.optimizer.name}, and this step is one of {step.optimizer}; "
            "load the checkpoint without its optimizer state, or step with that optimizer"
        )


def _waves(runs: Sequence[RunId]) -> list[list[int]]:
    """Return indices of ``runs`` in waves, at most one of each run in a wave, so that a run's steps follow in order."""
    waves: list[list[int]] = []
    depth: dict[RunId, int] = {}
    for index, run in enumerate(runs):
        place = depth.get(run, 0)
        depth[run] = place + 1
        if place == len(waves):
            waves.append([])
        waves[place].append(index)
    return waves
