"""The wide side of the engine: data, the module, checkpoints and the end of an engine, as users and clients call them.

What an engine answers about itself is in `status.py`, the training step in `engine.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial, update_wrapper
from inspect import ismethod
from os import PathLike
from typing import Any
from weakref import ref

from mizzen.data.loader import Loader, RepeatingLoader
from mizzen.engine.access import load_state_dict, refresh_masters
from mizzen.engine.evaluation import evaluate, mean_loss
from mizzen.engine.export import save, whole_state_dict
from mizzen.engine.loading import LoadOptions, load_checkpoint
from mizzen.engine.run_state import RunState
from mizzen.engine.saving import Given, save_and_wait, save_checkpoint
from mizzen.engine.states_away import goes_to_host, kinds_of
from mizzen.engine.status import GETTERS, NEGATED, UNBUILT, EngineStatus, RunContext
from mizzen.errors import NotBuilt, UsageError
from mizzen.plan.losses import LossFunction
from mizzen.profiler.step import tree_of
from mizzen.profiler.tree import Branch
from mizzen.rewrite.compile import compile_blocks
from mizzen.rewrite.forward import restore


class EngineInterface(EngineStatus):
    """Everything that is done with an engine beside the training step."""

    def __init__(self, run_state: RunState, context: RunContext) -> None:
        super().__init__(run_state, context)
        # A state dict loaded into the module by anybody, a client included, must not be undone by the next step.
        modules = {id(module): module for module in (self.module, *run_state.modules)}.values()
        self._loading = [module.register_load_state_dict_post_hook(refresh_masters) for module in modules]  # type: ignore[no-untyped-call]

    # Data

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """A loader over this rank's share of a data set."""
        if self.run_context.make_loader is None:
            raise UsageError("this engine has no data parallel group to make a loader for")
        loader = self.run_context.make_loader(
            dataset,
            batch_size=batch_size or self.batch.micro,
            route=route,
            pin_memory=pin_memory,
            sampler=data_sampler,
            collate_fn=collate_fn,
            workers=num_local_io_workers,
        )
        if isinstance(loader, Loader):
            loader.before_batch = partial(_stop_if_asked, ref(self))
        return loader

    def set_dataloader(self, loader: Any) -> None:
        """Where `train_batch()` without an iterator takes its data from."""
        self.run_state.set_loader(loader)

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Let `train_batch()` without an iterator take its data from this one."""
        self.run_state.loader, self.run_state.iterator = iterator, iterator

    def set_batch_fn(self, function: Callable[[Any], Any]) -> None:
        """Let a function make of each batch of the data the one that the model is given: `(inputs, labels)`, say."""
        self.run_state.batch_function = function

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
        loss_fn: LossFunction | None = None,
    ) -> Any:
        """Forward of some micro-batches, without gradients: their mean loss over all ranks, and outputs if asked for.

        `reduce_output=None` gives a list with the loss of each, where they were computed. Outputs, and with
        `bcast_loss=False` the loss too, are on the last stage of a pipeline alone; elsewhere they are None.
        """
        if reduce_output not in ("avg", None):
            raise UsageError(f"eval_batch(reduce_output={reduce_output!r}): it is 'avg' for a mean, or None for a list")
        self.run_state.away.check("eval_batch", ("lp_params",))
        micros = self.pull(
            lambda: data_iter if data_iter is not None else self.data_iterator(),
            num_micro_batches or self.batch.accumulation,
        )
        found = evaluate(self.run_state, self.runner, micros, loss_fn, has_loss=compute_loss)
        output: Any = found.outputs or None
        if compute_loss:
            has_losses = bool(found.losses)
            output = mean_loss(found.tally, self.run_context) if reduce_output else found.losses or None
            output = output if has_losses or bcast_loss else None
        return (output, found.outputs or None) if return_logits and compute_loss else output

    def is_first_stage(self) -> bool:
        """Whether this rank takes the inputs of the model."""
        return self.runner.stage == 0

    def is_last_stage(self) -> bool:
        """Whether this rank has the losses."""
        return self.runner.role is None or self.runner.role.has_losses

    def get_pipeline_parallel_rank(self) -> int:
        """This rank's place among the stages of a pipeline."""
        return self.runner.stage

    def reset_activation_shape(self) -> None:
        """Nothing: what goes from stage to stage says its shapes itself, where they change."""

    def set_has_attention_mask(self, value: bool) -> None:
        """Nothing: tensors of any dtype go from stage to stage."""

    def data_iterator(self) -> Iterator[Any]:
        """The engine's own data, epoch after epoch."""
        if self.training_dataloader is None:
            raise UsageError("train_batch() without an iterator needs training_data: give it to initialize()")
        if self.run_state.iterator is None:
            self.run_state.iterator = iter(RepeatingLoader(self.training_dataloader))
        found: Iterator[Any] = self.run_state.iterator
        return found

    # The module

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The module's own state dict."""
        found = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, parameter in self.module.named_parameters():
                if not parameter.requires_grad:
                    found.pop(prefix + name, None)
        return dict(found)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "model.safetensors", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the whole model, in the dtype it computes with, to one file of rank 0. Every rank calls this."""
        self._allow_gathering("save_16bit_model")
        skip = self._frozen() if exclude_frozen_parameters else frozenset[str]()
        same = self.mesh.same_piece
        save(save_dir, save_filename, self.module, self.stores, skip=skip, saving=self.saving, same_piece=same)
        return True

    save_fp16_model = save_16bit_model

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """The whole model in the dtype it computes with, on rank 0; None elsewhere. Every rank calls this."""
        self._allow_gathering("_consolidated_16bit_state_dict")
        skip = self._frozen() if exclude_frozen_parameters else frozenset[str]()
        group, same = self.saving.group.on_job_group(), self.mesh.same_piece
        return whole_state_dict(self.module, self.stores, skip=skip, group=group, same_piece=same)

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def _allow_gathering(self, call: str) -> None:
        zero = self.settings.zero_optimization
        if zero.stage == 3 and not zero.stage3_gather_16bit_weights_on_model_save:
            raise UsageError(
                f"{call}() at ZeRO stage 3 gathers the whole model on rank 0: set "
                "zero_optimization.stage3_gather_16bit_weights_on_model_save to true to allow it"
            )

    def _frozen(self) -> frozenset[str]:
        return frozenset(name for name, parameter in self.module.named_parameters() if not parameter.requires_grad)

    def empty_partition_cache(self) -> None:
        """Let go of gathered parameters."""
        for store in self.stores:
            store.restore_parameters({})

    def offload_states(
        self,
        include: Iterable[str] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Let this engine's states be in host memory until `reload_states`, so that others can use the device.

        `include` names some of optim_states, hp_params, lp_params, lp_grads and contiguous_grad_buffer; None is all.
        """
        kinds, is_asked = kinds_of(include), goes_to_host(device)
        if is_asked and self.parts:
            run = self.run_state
            run.away.leave(kinds, self.stores, run.modules, run.optimizer, pin=pin_memory, non_blocking=non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring everything back to the device that `offload_states` has taken from it, with its bits."""
        self.run_state.away.come_back(non_blocking=non_blocking)

    def load_module_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True, custom_load_fn: Callable[..., None] | None = None
    ) -> None:
        """Load a state dict, or its entry `module`, into the module and the master weights. Every rank calls this."""
        state = checkpoint.get("module", checkpoint) if isinstance(checkpoint, Mapping) else checkpoint
        if custom_load_fn is not None:
            custom_load_fn(src=state, dst=self.module)
            refresh_masters(self.module)
            return
        load_state_dict(self.module, self.owners, state, strict=strict)

    def save_checkpoint(
        self,
        save_dir: str | PathLike[str] | None = None,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        async_save: bool | None = None,
    ) -> bool:
        """Save all that training needs to go on, under a tag (`global_stepN` when absent). Every rank calls this.

        True once it is committed; with `async_save` (or `checkpoint.async_save`) once the state is copied, and the next
        step, the next save or `finish_saving()` raises what went wrong after that.
        """
        self.run_state.away.check("save_checkpoint")
        if self.updater is not None and self.updater.offloaded is not None:
            self.updater.offloaded.check("save_checkpoint")
        return save_checkpoint(
            self.run_state,
            self.saving,
            save_dir,
            ("" if tag is None else str(tag)) or f"global_step{self.global_steps}",
            {} if client_state is None else client_state,
            save_latest=save_latest,
            exclude_frozen=exclude_frozen_parameters,
            beside=self.settings.checkpoint.async_save if async_save is None else async_save,
        )

    def register_client_state(self, callback: Callable[[], Mapping[str, Any]]) -> None:
        """What to put into the checkpoint of a run that is asked to stop; every rank's callback is called then."""
        self.stopping.client_state = callback

    def stop_if_asked(self) -> None:
        """Save and leave, if the run was asked to stop and all ranks know it. Called between steps."""
        self.stopping.stop_if_asked(self.run_state, is_training=self.training, save=self._save_before_stop)

    def _save_before_stop(self, client_state: Mapping[str, Any]) -> bool:
        self.reload_states()
        return save_and_wait(self.saving, partial(self.save_checkpoint, client_state=client_state, async_save=False))

    def restart_step(self) -> None:
        """State was set from outside: nothing of the step under way counts any more."""
        raise NotImplementedError

    def pull(self, source: Callable[[], Iterator[Any]], count: int) -> list[Any]:
        """So many micro-batches on every rank, or StopIteration on all of them."""
        raise NotImplementedError

    def finish_saving(self) -> None:
        """Wait until a save beside training is committed, and raise what went wrong with it."""
        self.saving.background.wait()

    def load_checkpoint(
        self,
        load_dir: str | PathLike[str] | None = None,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., None] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint that was saved at any layout; (its folder, client state), or (None, None) without one.

        Every rank calls this. Without a tag the latest is taken. `load_report` then lists names that did not fit.
        """
        options = LoadOptions(
            strict=load_module_strict,
            optimizer=load_optimizer_states and not load_module_only,
            scheduler=load_lr_scheduler_states and not load_module_only,
            module_only=load_module_only,
            custom=custom_load_fn,
        )
        return self._load(load_dir, None if tag is None else str(tag), options)

    def resume_if_possible(
        self, load_dir: str | PathLike[str] | None = None
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from the latest checkpoint of a folder; (None, None), without a warning, when there is none."""
        return self._load(load_dir, None, LoadOptions(must_be_there=False))

    def _load(self, folder: Given, tag: str | None, options: LoadOptions) -> tuple[str | None, dict[str, Any] | None]:
        self.run_state.away.check("load_checkpoint")
        if self.updater is not None and self.updater.offloaded is not None:
            self.updater.offloaded.wait()
        loaded = load_checkpoint(self.run_state, self.saving, folder, tag, options)
        if loaded is None:
            return None, None
        self.load_report = loaded.report
        self.restart_step()
        return loaded.folder, loaded.client

    @property
    def flops_profile(self) -> Branch | None:
        """What `flops_profiler` has counted, module by module; None before its step."""
        return tree_of(self.observers)

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds per phase of the latest step that the device has finished, with `wall_clock_breakdown`."""
        phases = self.last_step.phases if self.last_step is not None else {}
        return {name: 1e3 * seconds for name, seconds in phases.items()}

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile each repeated block of the model, in place; `compile_kwargs` go to torch.compile."""
        if schedule is not None or compiled_autograd_enabled:
            raise NotBuilt("engine.compile() with a schedule of passes, or of backward as a whole, is not built yet")
        if not isinstance(compile_kwargs or {}, Mapping):
            raise UsageError(f"compile_kwargs={compile_kwargs!r}: give a dict of arguments for torch.compile")
        for module in self.run_state.modules:
            compile_blocks(module, {"backend": backend, **(compile_kwargs or {})})
        self.is_compiled = True

    def destroy(self) -> None:
        """Give everything back: hooks, buffers, loaders, observers. The module stays usable, with its values."""
        for hook in self._loading:
            hook.remove()
        self.reload_states()
        self.run_state.away.close()
        for store in self.stores:
            store.release()
        for module in self.run_state.modules:
            restore(module)
        for observer in self.observers:
            observer.close()
        self.parts, self.observers, self.owners, self.optimizer, self.lr_scheduler = (), (), [], None, None
        self.run_state.optimizer = None
        if isinstance(self.training_dataloader, Loader):
            self.training_dataloader.close()
        self.set_dataloader(None)

    def __deepcopy__(self, memo: Any) -> Any:
        """What `copy.deepcopy` calls."""
        raise UsageError(
            "an engine cannot be copied or pickled, with its groups of ranks and its share of the state: save it with "
            "engine.save_checkpoint() or engine.save_16bit_model(); below stage 3 torch.save and copy.deepcopy take "
            "engine.module"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What `torch.save`, `pickle` and `copy.copy` call."""
        return self.__deepcopy__(None)

    def __getattr__(self, name: str) -> Any:
        if name in GETTERS:
            value = self.settings.at(GETTERS[name])
            return lambda: not value if name in NEGATED else value
        if name in UNBUILT:
            return partial(_refuse, name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in dir(type(self)) or name == "module":
                raise  # a property of ours failed: its own error says more than the module's
        found = getattr(self.module, name)
        is_method = ismethod(found) and found.__self__ is self.module
        return update_wrapper(partial(self._call, found), found) if is_method else found

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A method of the model other than forward, which may use its parameters wherever they are."""
        self.run_state.away.check(method.__name__, ("lp_params",))
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.method_scope)
            return method(*args, **kwargs)


def _stop_if_asked(engine: "ref[EngineInterface]") -> None:
    """What a loader calls before a batch; it does not keep the engine alive."""
    if (found := engine()) is not None:
        found.stop_if_asked()


def _refuse(name: str, *_: Any, **__: Any) -> None:
    raise NotBuilt(f"engine.{name}() waits for a capability that is not built yet: {UNBUILT[name]}")
