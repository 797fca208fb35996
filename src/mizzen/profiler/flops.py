"""The flops profiler as users know it: of any model, by hand. What a configuration asks for is in `step.py`."""

import sys
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mizzen.accelerator import get_accelerator
from mizzen.errors import UsageError, expect
from mizzen.profiler.count import Count
from mizzen.profiler.render import (
    Setting,
    aggregated,
    duration_to_string,
    macs_to_string,
    number_to_string,
    page,
    params_to_string,
)
from mizzen.profiler.tree import Branch, grow


class FlopsProfiler:
    """Counts operations, parameters and time of each module between start_profile() and stop_profile().

    start_profile()      before the forward
    stop_profile()       after it, or after the backward; may be followed by another start, which adds to it
    get_..., print_...   any time after that
    reset_profile()      forgets the numbers
    end_profile()        once, at the end
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        expect(model, nn.Module, "FlopsProfiler: a model")
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self._left_out: tuple[type[nn.Module], ...] = ()
        self._count: Count | None = None
        self._stack = ExitStack()

    def start_profile(self, ignore_list: Collection[type[nn.Module]] | None = None) -> None:
        """Count from here on; modules of the kinds in `ignore_list` are left out."""
        if self.started:
            raise UsageError("start_profile() twice without stop_profile() between")
        self._left_out = tuple(ignore_list or ())
        self._count = self._count or Count(self.model, get_accelerator())
        self._stack.enter_context(self._count.open())
        self.started = True

    def stop_profile(self) -> None:
        """Count no further; without a start there is nothing to stop."""
        self._stack.close()
        self.started = False

    def reset_profile(self) -> None:
        """Forget what was counted."""
        if self.started:
            raise UsageError("reset_profile() while counting: call stop_profile() first")
        self._count = None

    def end_profile(self) -> None:
        """Stop, and forget."""
        self.stop_profile()
        self._count = None

    def tree(self) -> Branch:
        """The numbers of every module."""
        if self._count is None:
            raise UsageError("nothing was counted: call start_profile(), run the model, and then stop_profile()")
        return grow(self.model, self._count.read(), left_out=self._left_out)

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Operations of forward."""
        flops = self.tree().forward
        return number_to_string(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Multiply-adds of forward."""
        macs = self.tree().macs
        return macs_to_string(macs) if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Seconds of forward."""
        seconds = self.tree().seconds
        return duration_to_string(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Parameters of the model."""
        parameters = self.tree().parameters
        return params_to_string(parameters) if as_string else parameters

    def is_expert_tensor_parallelism_enabled(self) -> bool:
        """Not so here."""
        return False

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the profile, or write it to a file."""
        setting = _setting(self.ds_engine, profile_step, self.recompute_fwd_factor)
        options = {"module_depth": module_depth, "top_modules": top_modules}
        show(page(self.tree(), setting, **options, detailed_too=detailed), output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the heaviest modules only."""
        show("\n".join([*aggregated(self.tree(), module_depth, top_modules), ""]), None)


def _setting(engine: Any, step: int, factor: float) -> Setting:
    if engine is None:
        return Setting(step=step, recompute_factor=factor)
    batch, layout = engine.batch, engine.mesh.layout
    return Setting(
        step=step,
        world=layout.world,
        data_parallel=layout.dp,
        model_parallel=layout.tp * layout.pp,
        micro_batch=batch.micro,
        recompute_factor=factor,
    )


def show(text: str, file: str | None) -> None:
    """Print a profile, or write it over a file whose folder is made if absent."""
    if file is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(text)


def profile_call(
    model: nn.Module, call: Callable[[], Any], *, warm_up: int, left_out: Collection[type[nn.Module]] | None
) -> FlopsProfiler:
    """The profile of one call of a model in evaluation, after some that are not counted."""
    profiler, was_training = FlopsProfiler(model), model.training
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(warm_up):
                call()
            profiler.start_profile(left_out)
            try:
                call()
            finally:
                profiler.stop_profile()
    finally:
        model.train(was_training)
    return profiler
