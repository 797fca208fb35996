"""FSDP2 applied to the units of a model, and taken off again. The only file that looks inside FSDP2 (docs/borrowed.md).

[Note: from the outside in]
FSDP2 gives a module the parameters that no earlier call has claimed, so its users wrap from the inside out. A parameter
that two blocks share belongs to the model around them; wrapped last, the model would no longer find it. So the model
comes first, with everything that belongs to other units ignored.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from mizzen.backport import fsdp_drop_gradient, fsdp_groups, fsdp_zeros_for_unused
from mizzen.model.inputs import tensors_in
from mizzen.parallel.zero.full.backward import Backward
from mizzen.parallel.zero.full.frozen import Packed
from mizzen.parallel.zero.full.staying import Staying, stay
from mizzen.parallel.zero.full.units import Unit, shard_dim
from mizzen.parallel.zero.full.wires import Gather, Scatter
from mizzen.parallel.zero.reduce import torch_dtype

See = Callable[[Sequence[Tensor | None]], None]


@dataclass(frozen=True, slots=True)
class Wrapping:
    """How units are wrapped, as plain values of the plan."""

    accumulation: str
    """The dtype in which gradients leave a unit."""
    keeps: int = 0
    """After forward a unit stays sharded over so many ranks; 0 means over all of them."""
    ahead: int = 1
    """Elements that are gathered before they are needed, in whole units; 0 is none."""


def state_of(module: nn.Module) -> Any:
    """What FSDP2 knows of a module."""
    return vars(fully_shard)["state"](module)


def wrap(
    unit: Unit, module: nn.Module, wanted: Sequence[nn.Parameter], mesh: DeviceMesh, how: Wrapping, *, second: int
) -> None:
    """Shard these parameters of a module over a mesh, and gather them whenever the module runs.

    With `second` it stays sharded over so many ranks after a forward, instead of over all.
    """
    ranks = mesh.size()

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(shard_dim(parameter.shape, ranks))

    accumulation = torch_dtype(how.accumulation)
    reduce = torch.promote_types(accumulation, torch_dtype(unit.held)) if unit.held else accumulation
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=(second or True) if unit.path else False,
        shard_placement_fn=placement,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=torch_dtype(unit.gathers_as) if unit.gathers_as else None,
            reduce_dtype=reduce,
            cast_forward_inputs=False,
        ),
        ignored_params=set(module.parameters()) - set(wanted),
    )
    stay(module)
    for group in fsdp_groups(state_of(module)):
        for each in group.fsdp_params:
            each.free_unsharded_param = partial(_free, each)


def _free(each: Any) -> None:
    """Let go of a gathered parameter. Memory that somebody else has, such as a numpy array, is left to them."""
    for place, tensors in (("all_gather_outputs", each.all_gather_outputs), ("", each._unsharded_inner_tensors)):
        for number, old in enumerate(tensors):
            if old.untyped_storage().size() and not old.untyped_storage().resizable():
                new = torch.empty_like(old)
                whole = each._unsharded_param
                if whole.untyped_storage().data_ptr() == old.untyped_storage().data_ptr():
                    whole.data = new.as_strided(whole.shape, whole.stride())
                if place:
                    each.all_gather_outputs[number] = new
                else:
                    each._unsharded_inner_tensors = (new,)
    type(each).free_unsharded_param(each)


def share_second_mesh(first: nn.Module, module: nn.Module) -> None:
    """Let a module keep its second copy over the groups of another one: torch would form new ones for each."""
    for origin in fsdp_groups(state_of(first))[:1]:
        for group in fsdp_groups(state_of(module)):
            group.post_forward_mesh_info = origin.post_forward_mesh_info
            for each in group.fsdp_params:
                each.post_forward_mesh_info = origin.post_forward_mesh_info
                each._init_sharded_post_forward_param_metadata(torch.empty(each._orig_size, device="meta"))


@dataclass(frozen=True, slots=True)
class Wires:
    """What a wrapped module calls instead of torch's own."""

    gather: Gather
    scatter: Scatter
    see: See
    """Is given the gradients of its trained parameters before they are reduced."""
    check: Callable[[], None]
    """Is called before it runs, and may refuse that."""
    backward: Backward


def connect(module: Any, wires: Wires) -> None:
    """Let a wrapped module use our collectives, which see to the mean, and send zeros for what got no gradient."""
    state = state_of(module)
    groups = fsdp_groups(state)
    if groups:
        module.set_custom_all_gather(wires.gather)
        module.set_custom_reduce_scatter(wires.scatter)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        fills = not fsdp_zeros_for_unused(module)
        for group in groups:
            group.pre_forward = partial(_pre_forward, group, wires)
            group.post_forward = partial(_post_forward, group, state)
            group.post_backward = partial(_post_backward, group, state, wires, fills)
    state._pre_backward = partial(_pre_backward, state, wires)


def _pre_forward(group: Any, wires: Wires, *inputs: Any) -> Any:
    """Look at the parameters of a unit before torch puts whole ones into their places."""
    wires.check()
    return type(group).pre_forward(group, *inputs)


def _post_forward(group: Any, state: Any, module: Any, inputs: Any, output: Any) -> Any:
    """Notice a backward also where torch would not: through an object, or a view that somebody changes in place.

    Such a change works on the tensor behind the view, and takes away the hook that torch has on the view itself. What
    is behind an input is not the unit's own.
    """
    if torch.is_grad_enabled():
        is_object = not isinstance(output, Tensor | tuple | list | dict) and "__dict__" in dir(output)
        hidden = tensors_in(vars(output)) if is_object else []
        views = [each for each in (*tensors_in(output), *hidden) if each._base is not None]
        foreign = {id(each if each._base is None else each._base) for each in tensors_in(inputs)} if views else set()
        bases = [base for each in views if (base := each._base) is not None and id(base) not in foreign]
        for each in {id(each): each for each in (*hidden, *bases) if each.grad_fn is not None}.values():
            each.register_hook(state._pre_backward)  # type: ignore[no-untyped-call]
    return type(group).post_forward(group, module, inputs, output)


def _pre_backward(state: Any, wires: Wires, gradient: Tensor) -> Tensor:
    """Ask what a backward is for when it reaches a unit."""
    _reach(state, wires, is_open=not any(group.reshard_after_backward for group in fsdp_groups(state)))
    found: Tensor = type(state)._pre_backward(state, gradient)
    return found


def _reach(state: Any, wires: Wires, *, is_open: bool) -> None:
    wires.backward.reach(is_first=not state._state_ctx.post_backward_final_callback_queued, is_open=is_open)


def _post_backward(group: Any, state: Any, wires: Wires, fills: bool, *unused: Any) -> None:
    """Look at the gradients of a unit before torch reduces them, and put zeros where there is none.

    Without zeros a rank that took another branch inside a unit would reduce fewer elements than the others. torch puts
    them there itself from 2.13 on. A backward that is for inputs alone has nothing to reduce.
    """
    _reach(state, wires, is_open=True)
    if not wires.backward.leaves_gradients:
        reduces, group.reduce_grads = group.reduce_grads, False
        type(group).post_backward(group, *unused)
        group.reduce_grads = reduces
        return
    trained = [each for each in group.fsdp_params if each.sharded_param.requires_grad]
    wires.see([each.unsharded_param.grad if "_unsharded_param" in vars(each) else None for each in trained])
    if group._training_state.name == "PRE_BACKWARD":  # its backward has begun, and nothing of it was sent
        for each in trained if fills else ():
            parameter = each.unsharded_param
            if parameter.grad is None and each.unsharded_accumulated_grad is None:
                parameter.grad = torch.zeros_like(parameter)
    type(group).post_backward(group, *unused)


def start(root: Any, units: Sequence[Any], sizes: Sequence[int], how: Wrapping, device_type: str) -> None:
    """Make the model the root, whichever module runs first; and gather units ahead, in the order of definition."""
    state_of(root)._lazy_init()
    for module in (root, *units):
        _keep_out_of_state_dicts(module)
        # A CPU has no streams: what shall overlap has to be asked for.
        module._set_unshard_async_op(device_type == "cpu")
    for number, module in enumerate((root, *units)):
        following, room = [], how.ahead
        for later, size in zip(units[number:], sizes[number:], strict=True):
            if room <= 0:
                break
            following.append(later)
            room -= size
        module.set_modules_to_forward_prefetch(following)


def _keep_out_of_state_dicts(module: nn.Module) -> None:
    """Take away hooks that would shard a module in the middle of a `GatheredParameters`, or adopt what stands there."""
    for group in fsdp_groups(state_of(module)):
        for each in group.fsdp_params:
            each._post_load_hook_handle.remove()
        for handles in (
            group._module_to_pre_save_state_dict_hook_handle,
            group._module_to_pre_load_state_dict_hook_handle,
        ):
            for handle in handles.values():
                handle.remove()


def sharded(module: nn.Module) -> list[Tensor]:
    """The sharded parameters of a wrapped module in the order in which they travel."""
    return [each.sharded_param for group in fsdp_groups(state_of(module)) for each in group.fsdp_params]


def padded(module: nn.Module) -> list[int]:
    """The elements of each on the way, padding included, in the same order."""
    groups = fsdp_groups(state_of(module))
    return [each.padded_sharded_param_size.numel() for group in groups for each in group.fsdp_params]


def rehouse(module: nn.Module, parameter: DTensor, memory: Tensor) -> None:
    """Let a shard live in this memory, padding included; its values move there."""
    for group in fsdp_groups(state_of(module)):
        for each in group.fsdp_params:
            if each.sharded_param is parameter:
                memory.copy_(each._sharded_param_data)
                each._sharded_param_data = memory
                shard = memory.view(each.padded_sharded_param_size)
                dim = each.fsdp_placement.dim
                parameter._local_tensor = shard.narrow(dim, 0, parameter._local_tensor.shape[dim])


def pack_frozen(model: nn.Module, module: nn.Module, names: Collection[str]) -> None:
    """Let the shards of some frozen parameters rest in blocks."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in fsdp_groups(state_of(module)):
        for each in group.fsdp_params:
            if known[id(each.sharded_param)] in names:
                packed = Packed.of(each._sharded_param_data, each.sharded_param._local_tensor.shape)
                each.sharded_param._local_tensor = packed
                each._sharded_param_data = packed.held


def put_back(model: nn.Module, module: nn.Module, shards: Mapping[str, Tensor], mesh: DeviceMesh) -> None:
    """Give parameters that were wrapped without memory their shards, by the names that the model has for them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in fsdp_groups(state_of(module)):
        for each in group.fsdp_params:
            name, empty = names[id(each.sharded_param)], each.sharded_param
            if name in shards:
                made: Any = DTensor.from_local(
                    shards[name],
                    mesh,
                    [each.fsdp_placement],
                    run_check=False,
                    shape=empty.shape,
                    stride=empty.stride(),
                )
                each._setattr_on_modules(nn.Parameter(made, requires_grad=empty.requires_grad))
                each.reset_sharded_param()


def whole(module: nn.Module) -> list[nn.Parameter]:
    """The objects that stand in the module while it is gathered, in the same order; only after a first time."""
    return [each.unsharded_param for group in fsdp_groups(state_of(module)) for each in group.fsdp_params]


def put_right(module: nn.Module) -> list[bool]:
    """Whether each parameter stood in its module, in the same order; where another one did, it stands there again."""
    found = []
    for group in fsdp_groups(state_of(module)):
        for each in group.fsdp_params:
            kind, place = type(each.sharded_state), each._module_info
            if each.sharded_state is kind.SHARDED:
                expected = each.sharded_param
            else:
                is_whole = each.sharded_state is kind.UNSHARDED
                expected = each._unsharded_param if is_whole else each._sharded_post_forward_param
            there = vars(place.module)["_parameters"].get(place.param_name)
            # torch.func.functional_call brings back what it found, and that may have been gathered meanwhile
            found.append(
                there is expected or there is each.sharded_param or there is vars(each).get("_unsharded_param")
            )
            if there is not expected:
                each._setattr_on_modules(expected)
    return found


@contextmanager
def held_open(module: Any) -> Iterator[None]:
    """Gather a module, and leave it gathered whatever runs inside."""
    groups = fsdp_groups(state_of(module))
    before = [(group.post_forward_mesh_info, group.reshard_after_backward) for group in groups]
    module.unshard()
    for group in groups:
        group.post_forward_mesh_info, group.reshard_after_backward = None, False
    try:
        yield
    finally:
        for group, kept in zip(groups, before, strict=True):
            group.post_forward_mesh_info, group.reshard_after_backward = kept
        module.reshard()


def forget(module: Any) -> None:
    """Shard a module again, and drop what was gathered ahead of a use that did not come."""
    for group in fsdp_groups(state_of(module)):
        if group._all_gather_result is not None:
            group.wait_for_unshard()
    module.reshard()


def end_backward(root: Any) -> None:
    """Let every unit reduce what it has, as torch does itself at the end of a backward that it has noticed."""
    state_of(root)._root_post_backward_final_callback()


def recover(root: Any) -> bool:
    """Start again after a forward or backward that did not come to its end; says whether that was so."""
    state = state_of(root)
    context = state._state_ctx
    if context.iter_forward_root is None and not context.post_backward_final_callback_queued:
        return False
    for each in state._state_ctx.all_states:
        for group in fsdp_groups(each):
            group._training_state = type(group._training_state).IDLE
            group._post_forward_indices.clear()
            if group._all_gather_result is not None:
                group.wait_for_unshard()
            if group.reshard_after_backward:  # unless `held_open`
                group._to_sharded()
            for parameter in group.fsdp_params:
                fsdp_drop_gradient(parameter)
        each._training_state = type(each._training_state).IDLE
        each._modules_to_run_forward.clear()
    state._comm_ctx.post_forward_order.clear()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    return True


def unwrap(module: Any, replace: Callable[[Tensor], nn.Parameter]) -> None:
    """Take FSDP2 off a module; `replace` gives the parameter that comes in the place of a sharded one."""
    state = state_of(module)
    for group in fsdp_groups(state):
        for each in group.fsdp_params:
            each._setattr_on_modules(replace(each.sharded_param))
            vars(each).pop("free_unsharded_param")
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    for key in (STATE_KEY, REGISTRY_KEY):
        vars(module).pop(key, None)
    _module_state_mapping.pop(module, None)
    for inner in module.modules():
        for key in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            vars(inner).pop(key, None)
    module.__class__ = next(kind for kind in type(module).__mro__ if not issubclass(kind, Staying | FSDPModule))
