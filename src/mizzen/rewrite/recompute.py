"""Activation checkpointing: calls whose inside backward computes again, and the blocks of a model that are called so.

From below to above: named streams of random numbers on the device, for layers whose ranks must not draw the same ones
(Megatron-style models call this their tracker); a call that is computed again, by torch, with what is kept of it; what
stands behind `mizzen.checkpointing`, whose calls get neither an engine nor a configuration, so that what they work with
belongs to the process; and the transform that decides which blocks of a model are computed again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import signature
from types import TracebackType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from mizzen.accelerator import get_accelerator
from mizzen.ambient import AMBIENT
from mizzen.comm.mesh import Mesh
from mizzen.config.execution import ActivationCheckpointingConfig
from mizzen.config.layout import Layout
from mizzen.config.schema import Config
from mizzen.config.section import fate_of
from mizzen.errors import NotBuilt, PlanError, UsageError
from mizzen.kernels.untraced import untraced
from mizzen.log import warn_once
from mizzen.model.sketch import Drafts, joined
from mizzen.model.tree import modules_here
from mizzen.plan.parts import Parts
from mizzen.plan.transform import Transform
from mizzen.rewrite.forward import ReplacedForward, called_blocks, in_words, restore

TENSOR_PARALLEL: Final = "model-parallel-rng"
"""The stream that differs between tensor-parallel ranks, under the name that models know."""


class RandomStreams:
    """States of the device's generator by name. `fork` draws from one of them; the default stream is not here."""

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}
        self._seeds: set[int] = set()

    @property
    def are_used(self) -> bool:
        """Whether there are any."""
        return bool(self._states)

    def reset(self) -> None:
        """Forget all streams."""
        self._states, self._seeds = {}, set()

    def get_states(self) -> dict[str, Tensor]:
        """Where every stream is."""
        return dict(self._states)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Set what `get_states` gave."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Start a stream. Two streams with one seed would draw the same numbers, so that is refused."""
        if name in self._states:
            raise UsageError(f"a random stream '{name}' exists already: reset() forgets all of them")
        if seed in self._seeds:
            raise UsageError(f"seed {seed} belongs to another random stream: give '{name}' one of its own")
        self._seeds.add(seed)
        self._states[name] = _state_of(seed)

    def reseed(self, name: str, seed: int) -> None:
        """Let a stream start again from a seed."""
        self._require(name)
        self._states[name] = _state_of(seed)

    @contextmanager
    def fork(self, name: str = TENSOR_PARALLEL) -> Iterator[None]:
        """Inside, the device draws from a stream; afterwards from its default one, as if nothing had been drawn."""
        state, accelerator = self._require(name), get_accelerator()
        default = accelerator.rng_state()
        accelerator.set_rng_state(state)
        try:
            yield
        finally:
            self._states[name] = accelerator.rng_state()
            accelerator.set_rng_state(default)

    @contextmanager
    def rewound(self, states: dict[str, Tensor]) -> Iterator[None]:
        """Inside, all streams are where they were then; afterwards where they are now."""
        now = self.get_states()
        self.set_states(states)
        try:
            yield
        finally:
            self.set_states(now)

    def _require(self, name: str) -> Tensor:
        if name not in self._states:
            known = ", ".join(self._states) or "none"
            raise UsageError(f"no random stream '{name}' was added; there are: {known}")
        return self._states[name]


def _state_of(seed: int) -> Tensor:
    """The state of the device's generator after seeding; the generator itself is left as it was."""
    accelerator = get_accelerator()
    default = accelerator.rng_state()
    accelerator.seed(seed)
    state = accelerator.rng_state()
    accelerator.set_rng_state(default)
    return state


PRODUCTS: Final = frozenset(
    {
        *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution"),
        *("aten::_scaled_mm", "aten::_grouped_mm", "aten::_scaled_grouped_mm"),
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        *("aten::_flash_attention_forward", "aten::_efficient_attention_forward", "aten::_cudnn_attention_forward"),
        *("flex_attention", "flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward"),
    }
)
"""Operators whose results cost more to compute again than to keep."""

CACHES: Final = ("past_key_values", "past_key_value", "layer_past")
"""Arguments of a block that hold keys and values of earlier tokens. A block writes to them."""

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Those of a call and of its repetition."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """What is kept of such a call until backward. Its inputs always are."""

    products: bool = False
    """Also the results of matrix products and attention."""
    on_host: bool = False
    """The inputs rest in host memory."""


class Recomputed(ReplacedForward):
    """Stands in the place of a module's `forward` and calls it so that backward computes it again."""

    def __init__(self, forward: Callable[..., Any], keeping: Keeping, layer: int = 0) -> None:
        super().__init__(forward)
        self.keeping = keeping
        self.layer = layer  # where a cache keeps the keys of this module
        self.names = tuple(signature(forward).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own `forward` returns, without a cache: it would be filled twice."""
        if torch.is_grad_enabled():
            given = {**dict(zip(self.names, args, strict=False)), **kwargs}
            for name in (name for name in CACHES if given.get(name) is not None):
                _require_empty(name, given[name], self.layer)
                args = tuple(None if value is given[name] else value for value in args)
                kwargs = {key: None if value is given[name] else value for key, value in kwargs.items()}
        return replayed(self.__wrapped__, args, kwargs, self.keeping)


@untraced
def _require_empty(name: str, cache: Any, layer: int) -> None:
    """Refuse a cache with keys of this layer, or one that cannot say how many it has; warn of one without."""
    count = getattr(cache, "get_seq_length", None)
    way_out = "set model.config.use_cache = False, or call the model with use_cache=False"
    if count is None or int(count(layer)) > 0:
        raise UsageError(
            f"a block that is computed again in backward was given a cache, {name}=, which it would fill twice: "
            f"{way_out}"
        )
    warn_once(
        f"blocks that are computed again in backward leave out the empty cache that they were given, {name}=, and what "
        f"the model returns as its cache lacks their keys. To be rid of this warning {way_out}; a decoder may have a "
        "configuration of its own, as T5's: model.decoder.config.use_cache = False",
        key="recompute.empty_cache",
    )


def replayed(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], keeping: Keeping) -> Any:
    """Call a function; backward calls it again, with the random numbers and the autocast of this call."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if AMBIENT.checkpointing is not None and AMBIENT.checkpointing.streams.are_used:
        return _replayed_with_streams(function, args, kwargs, keeping)
    options = {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if keeping.products else {}
    return _replayed(function, args, kwargs, keeping, options)


def _replayed(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    keeping: Keeping,
    options: Mapping[str, Any],
) -> Any:
    """torch looks only at positional tensors, so all tensors are handed over by position, however they came.

    Those it keeps through autograd's hooks, and their device is the one whose generator is rewound.
    """
    given: dict[int | str, Any] = dict(enumerate(args))
    given.update(kwargs)
    tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
    if keeping.on_host:
        # Masks and positions are the same for all blocks: a copy of them for each would cost more than it frees.
        tensors = {key: value for key, value in tensors.items() if value.requires_grad} or tensors
    names, count = tuple(tensors), len(args)
    others = {key: value for key, value in given.items() if key not in tensors}

    def call(*values: Tensor) -> Any:
        whole = {**others, **dict(zip(names, values, strict=True))}
        by_name = {key: value for key, value in whole.items() if isinstance(key, str)}
        return function(*[whole[place] for place in range(count)], **by_name)

    with _resting_place(keeping):
        return checkpoint(call, *tensors.values(), use_reentrant=False, **options)


# Never traced: a compiler accepts no contexts but torch's own, and without this one a repetition that it leaves to
# Python would draw other numbers from the streams.
@untraced
def _replayed_with_streams(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], keeping: Keeping
) -> Any:
    selective: Callable[[], Contexts] = (
        partial(create_selective_checkpoint_contexts, _policy) if keeping.products else noop_context_fn
    )

    def contexts() -> Contexts:
        first, again = selective()
        return first, _Again(AMBIENT.checkpointing.streams, again)

    return _replayed(function, args, kwargs, keeping, {"context_fn": contexts})


def _resting_place(keeping: Keeping) -> AbstractContextManager[Any]:
    if not keeping.on_host:
        return nullcontext()
    accelerator = get_accelerator()
    return save_on_cpu(pin_memory=not accelerator.shares_host_memory, device_type=accelerator.name)


class _Again:
    """The context of a repetition: named streams are where the call found them. May be entered several times."""

    def __init__(self, streams: RandomStreams, inner: AbstractContextManager[Any]) -> None:
        self._streams = streams
        self._states = streams.get_states()
        self._inner = inner
        self._entered = ExitStack()

    def __enter__(self) -> None:
        self._entered.enter_context(self._streams.rewound(self._states))
        self._entered.enter_context(self._inner)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._entered.__exit__(kind, error, trace)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = operator.name().partition(".")[0] in PRODUCTS
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


OFFSET: Final = 2718
"""Between the default seed and that of the first tensor-parallel rank, as in Megatron."""
ROLES: Final = ("tensor_model", "slice", "model")
"""How an mpu object may call tensor parallelism, the plainest name first."""


class Checkpointing:
    """The state of the process; `current()` is the one there is."""

    def __init__(self) -> None:
        self.keeping: Keeping | None = None
        """What `configure`, or the first engine whose configuration says so, has asked for."""
        self.streams = RandomStreams()
        self.rank, self.ranks = 0, 1
        """This rank's place among the tensor-parallel ranks, and their number."""

    @classmethod
    def current(cls) -> "Checkpointing":
        """The one of this process."""
        if AMBIENT.checkpointing is None:
            AMBIENT.checkpointing = cls()
        found: Checkpointing = AMBIENT.checkpointing
        return found

    def configure(self, section: ActivationCheckpointingConfig, given: Mapping[str, Any], mpu: Any) -> None:
        """Keep inputs as a section says, or as arguments say, by the names of its keys; None says nothing."""
        arguments = {key: value for key, value in given.items() if value is not None}
        for key, value in arguments.items():
            if value and (reason := fate_of(ActivationCheckpointingConfig.model_fields[key]).reason):
                warn_once(f"checkpointing.configure: {key} has no effect here: {reason}")
        asked = section.model_copy(update=arguments)
        self.rank, self.ranks = _ask(mpu, "rank", 0), _ask(mpu, "world_size", 1)
        self.partition(asked.partition_activations)
        self.keeping = Keeping(on_host=asked.cpu_checkpointing)

    def partition(self, is_asked: bool) -> None:
        """Refuse to split inputs over ranks; one rank has nothing to split."""
        if is_asked and self.ranks > 1:
            raise NotBuilt(
                f"splitting the inputs of checkpoints over {self.ranks} tensor-parallel ranks is not built yet; leave "
                "partition_activations out"
            )

    def seed(self, seed: int) -> None:
        """Seed the device alike on all tensor-parallel ranks, and a stream that differs between them."""
        get_accelerator().seed(seed)
        self.streams.reset()
        self.streams.add(TENSOR_PARALLEL, self._seed_of_rank(seed))

    def reseed(self, seed: int) -> None:
        """Seed only the stream that differs."""
        self.streams.reseed(TENSOR_PARALLEL, self._seed_of_rank(seed))

    def _seed_of_rank(self, seed: int) -> int:
        return seed + OFFSET + self.rank


def _ask(mpu: Any, question: str, default: int) -> int:
    methods = (getattr(mpu, f"get_{role}_parallel_{question}", None) for role in ROLES)
    return next((int(method()) for method in methods if callable(method)), default)


@dataclass(frozen=True, slots=True)
class RecomputeChoice:
    """The blocks that are computed again, by path, and what is kept of them."""

    paths: tuple[str, ...]
    keeping: Keeping
    words: str
    """Which blocks they are."""

    def __str__(self) -> str:
        kept = ", keeping matrix products and attention" if self.keeping.products else ""
        rest = ", inputs in host memory" if self.keeping.on_host else ""
        return f"{self.words}{kept}{rest}"


class Recompute(Transform):
    """Blocks are called through torch's checkpoint; what that saves in activations is not part of the cost."""

    name = "recompute"

    def wants(self, config: Config, layout: Layout, drafts: Drafts) -> RecomputeChoice | None:
        """Every block, or every n-th; None when no block is to be computed again and nothing else was asked for."""
        sketch = joined(drafts)
        section = config.activation_checkpointing
        _refuse(section, layout)
        keeping = Keeping(products=section.mode == "selective", on_host=section.cpu_checkpointing)
        if section.mode == "off":
            return RecomputeChoice((), keeping, "calls of checkpointing.checkpoint") if keeping.on_host else None
        if not sketch.modules:
            return RecomputeChoice((), keeping, f"one block in {section.every}" if section.every > 1 else "every block")
        units = called_blocks(sketch, section.blocks, key="activation_checkpointing.blocks")
        if not units:
            raise PlanError(
                f"activation_checkpointing.mode is {section.mode}, but no module of this model repeats: name the "
                "modules to compute again in activation_checkpointing.blocks"
            )
        chosen = units[:: section.every]  # the last one's activations are needed at once: better another than that
        return RecomputeChoice(tuple(unit.path for unit in chosen), keeping, in_words(chosen, among=len(units)))

    def apply(self, parts: Parts, choice: RecomputeChoice, mesh: Mesh) -> Parts:
        """Put `Recomputed` in the place of each block's `forward`."""
        if choice.keeping.on_host:
            current = Checkpointing.current()
            current.keeping = current.keeping or Keeping(on_host=True)
        for part in parts:
            restore(part.module, Recomputed)
            for block in modules_here(part.module, choice.paths):
                vars(block)["forward"] = Recomputed(block.forward, choice.keeping, _layer_of(block))
        return parts


def _layer_of(block: nn.Module) -> int:
    """The number under which a block of transformers keeps its keys in a cache; 0 for one that has none."""
    numbers = (vars(module).get("layer_idx") for module in block.modules())
    return next((number for number in numbers if isinstance(number, int)), 0)


def _refuse(section: ActivationCheckpointingConfig, layout: Layout) -> None:
    if section.partition_activations and layout.tp > 1:
        raise PlanError(
            f"activation_checkpointing.partition_activations over tp={layout.tp}: splitting inputs over "
            "tensor-parallel ranks is not built yet; leave the key out"
        )
    if section.mode == "off" and (section.every > 1 or section.blocks):
        raise PlanError(
            f"activation_checkpointing.{'blocks' if section.blocks else 'every'} says which blocks are computed again, "
            "but activation_checkpointing.mode is off: set it to full or selective"
        )
