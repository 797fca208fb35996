"""An evaluation: forward of some micro-batches without gradients, and the mean of their losses over all ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mizzen.comm import collectives
from mizzen.engine.run_state import RunState
from mizzen.engine.runner import Runner
from mizzen.engine.status import RunContext
from mizzen.plan.losses import Evaluation, LossFunction, Tally


def evaluate(
    run: RunState, runner: Runner, micros: Sequence[Any], loss_function: LossFunction | None, *, has_loss: bool
) -> Evaluation:
    """Run micro-batches through a model that does not train meanwhile; its modules are then as they were."""
    was_training = [(module, module.training) for part in run.modules for module in part.modules()]
    for module, _ in was_training:
        module.training = False
    try:
        with torch.no_grad():
            return runner.evaluate(micros, loss_function, has_loss=has_loss)
    finally:
        for module, training in was_training:
            module.training = training


def mean_loss(tally: Tally, context: RunContext) -> Tensor:
    """The mean over what all ranks have counted, on every rank."""
    loss = tally.loss if tally.loss is not None else torch.zeros(())
    sums = torch.stack(
        [torch.as_tensor(value, dtype=torch.float64, device=context.device) for value in (loss, tally.count)]
    )
    if context.mesh.everyone is not None:
        collectives.all_reduce(sums, group=context.mesh.everyone)
    return (sums[0] / sums[1]).float()
