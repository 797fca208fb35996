"""The loss of a language model by the fused head, with logits that are computed when somebody reads them, or never.

The model's own `forward` runs as it is. While it does, and labels were given, its head returns `LateLogits`. Its loss
function, or the cross entropy that it takes of them itself, gets the hidden states out of them. Nothing of this is left
on the model when the call is over.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from mizzen.accelerator import get_accelerator
from mizzen.accelerator.streams import Fetch
from mizzen.errors import PlanError, UsageError
from mizzen.kernels.head_loss import VocabularyPart, head_loss
from mizzen.model.inputs import change_tensors
from mizzen.model.tree import InnerForward
from mizzen.model.wrapper import LateTensor, without_memory
from mizzen.rewrite.forward import ReplacedForward

SAMPLES: Final = 64
"""Elements of the weight that are compared, to see whether it has changed."""

FACTS: Final = frozenset(
    {
        *(Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.layout.__get__),  # type: ignore[attr-defined]
        *(Tensor.ndim.__get__, Tensor.requires_grad.__get__, Tensor.is_cuda.__get__),  # type: ignore[attr-defined]
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__),
    }
)
"""What can be said of logits that do not exist yet."""

RESHAPES: Final = frozenset({Tensor.view, Tensor.reshape, Tensor.flatten, torch.reshape, torch.flatten})
"""What can be done to them while they do not exist, as long as the logits of one token stay together."""

CROSS_ENTROPY: Final = tuple(signature(functional.cross_entropy).parameters)[1:]
"""The names of its arguments behind the logits."""

Loss = Callable[[Tensor, Tensor, Mapping[str, Any]], Tensor | None]
"""(hidden states, labels, further arguments of cross_entropy) -> the loss; None when it has to be taken of logits."""


class LateLogits(LateTensor):
    """A tensor without data that knows how to get it: any use of it computes the logits, once, as the model would have.

    Whoever uses one gets plain tensors. Gradients flow through them to the hidden states and the head.
    """

    hidden: Tensor
    head: Callable[[Tensor], Tensor]
    loss: Loss | None

    def __new__(
        cls, hidden: Tensor, weight: Tensor, head: Callable[[Tensor], Tensor], loss: Loss | None = None, size: int = 0
    ) -> "LateLogits":
        """Shape, dtype and device of what the head would give now."""
        device = hidden.device.type
        is_autocast, lower = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        made: LateLogits = without_memory(
            cls,
            (*hidden.shape[:-1], size or len(weight)),
            dtype=lower if is_autocast else hidden.dtype,
            device=hidden.device,
            requires_grad=torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad),
        )
        return made

    def __init__(
        self, hidden: Tensor, weight: Tensor, head: Callable[[Tensor], Tensor], loss: Loss | None = None, size: int = 0
    ) -> None:
        self.hidden, self.weight, self.head, self.loss = hidden, weight, head, loss
        device = hidden.device.type
        self._is_autocast, self._lower = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        self._has_grad = torch.is_grad_enabled()
        self._sample = _sample(weight)
        self._computed: Tensor | None = None

    @property
    def is_computed(self) -> bool:
        """Whether somebody has used them."""
        return self._computed is not None

    def computed(self) -> Tensor:
        """The logits, with the precision and the graph of the call that they belong to."""
        if self._computed is None:
            if not torch.allclose(self._sample, _sample(self.weight), rtol=0.0, atol=0.0, equal_nan=True):
                raise UsageError(
                    "these logits are computed when they are read, and the head has changed since the forward that "
                    "they belong to: read them before step(), or set fused.head_loss to false"
                )
            with ExitStack() as stack:
                stack.enter_context(torch.set_grad_enabled(self._has_grad))
                device = self.hidden.device.type
                stack.enter_context(torch.autocast(device, dtype=self._lower, enabled=self._is_autocast))
                self._computed = self.head(self.hidden)
        return self._computed

    def _reshaped(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "LateLogits | None":
        """These logits in another shape, still late; None when the logits of a token would be torn apart."""
        shape = func(torch.empty(self.shape, device="meta"), *args, **kwargs).shape
        if shape[-1:] != self.shape[-1:]:
            return None
        hidden = self.hidden.reshape(*shape[:-1], self.hidden.shape[-1])
        whole = self.shape[-1]
        return LateLogits(hidden, self.weight, lambda _: func(self.computed(), *args, **kwargs), self.loss, whole)

    def _cross_entropy(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """The loss of these logits and labels without the logits, where that can be had."""
        given = {**dict(zip(CROSS_ENTROPY, args, strict=False)), **kwargs}
        labels = given.pop("target", None)
        if self.loss is None or self.dim() != 2 or not isinstance(labels, Tensor) or labels.is_floating_point():
            return None
        return self.loss(self.hidden, labels, given)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Facts are known; everything else is done to the logits themselves."""
        if func in FACTS:
            plain: Any = super().__torch_function__
            return plain(func, types, args, kwargs or {})
        if args and isinstance(late := args[0], LateLogits) and not late.is_computed:
            if func in RESHAPES and (reshaped := late._reshaped(func, args[1:], kwargs or {})) is not None:
                return reshaped
            if func is functional.cross_entropy and (found := late._cross_entropy(args[1:], kwargs or {})) is not None:
                return found
        return func(*change_tensors(tuple(args), _real), **change_tensors(dict(kwargs or {}), _real))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls that did not come through Python, such as collectives: the values alone."""
        return func(*change_tensors(tuple(args), _values), **change_tensors(dict(kwargs or {}), _values))


def _real(value: Tensor) -> Tensor:
    return value.computed() if isinstance(value, LateLogits) else value


def _values(value: Tensor) -> Tensor:
    return value.computed().detach() if isinstance(value, LateLogits) else value


def _sample(weight: Tensor) -> Tensor:
    flat = weight.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLES)].clone()


LOSS: Final = "ForCausalLMLoss"
"""The loss of transformers that is computed here: the next token's cross entropy, per token or per `num_items`."""

IGNORED: Final = -100
"""The label of a token that has none, where nobody says otherwise."""


NO_SMOOTHING: Final = ("label_smoothing", 0.0)


class LabelCount:
    """How many tokens of a batch have a label, counted by the device while the host goes on to launch the model.

    [Note: the host knows how many]
    The size of a product is the host's to say. The count is started before the first layer, so when the host asks for
    it, behind the last, the device has long begun with this forward and has all of it still to compute: the host waits
    for what lies before this call, never for what it has launched in it.
    """

    def __init__(self, labels: Tensor) -> None:
        self.labels = labels
        self._count = Fetch((labels != IGNORED).sum(), get_accelerator())

    def of(self, labels: Tensor, ignore_index: int) -> int | None:
        """The count, when these are the labels that were counted, in whatever shape; otherwise None."""
        is_same = labels.data_ptr() == self.labels.data_ptr() and labels.numel() == self.labels.numel()
        return int(self._count.read()) if is_same and ignore_index == IGNORED else None


@dataclass(slots=True)
class _Call:
    """One call of a model with labels."""

    count: LabelCount | None
    """How many tokens have a label; None when nobody counts."""
    losses: list[Tensor] = field(default_factory=list)
    """What was computed without logits."""
    late: LateLogits | None = None
    """What the head has given."""
    is_over: bool = False

    def forget(self) -> None:
        """Logits know their call: what it knows of them would wait, with the hidden states, for the collector."""
        self.late = None
        self.losses.clear()


class HeadLoss(ReplacedForward):
    """Stands in the place of the model's `forward`. Without labels it only calls it."""

    def __init__(self, model: nn.Module, head: nn.Linear, rows: int, *, labelled_only: bool, calls_loss: bool) -> None:
        place = vars(model).get("forward")
        super().__init__(place.forward if isinstance(place, InnerForward) else model.forward)
        self.model: Any = model
        self.head, self.rows = head, rows
        self.labelled_only = labelled_only
        self.plain_loss: Any = self.model.loss_function if calls_loss else None
        """The model's own loss function; None when its forward takes a cross entropy instead."""
        self.names = tuple(signature(self.__wrapped__).parameters)
        self.part: VocabularyPart | None = vars(head).get("vocabulary_part")
        """Of a vocabulary that is shared out among ranks, which the head then says of itself."""

    @property
    def vocabulary(self) -> int:
        """How many logits a token has."""
        return len(self.head.weight) if self.part is None else self.part.size

    @classmethod
    def take(
        cls, model: nn.Module, head: nn.Module, rows: int, *, labelled_only: bool = False, calls_loss: bool = True
    ) -> None:
        """Take the place of a model's `forward`."""
        if type(head) is not nn.Linear:
            raise PlanError(
                f"fused.head_loss: the head is a {type(head).__module__}.{type(head).__name__}, no nn.Linear"
            )
        made = cls(model, head, rows, labelled_only=labelled_only, calls_loss=calls_loss)
        if isinstance(place := vars(model).get("forward"), InnerForward):
            place.forward = made
        else:
            vars(model)["forward"] = made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model's own `forward` returns; its logits are late."""
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        if given.get("labels") is None:
            return self.__wrapped__(*args, **kwargs)
        if self.plain_loss is not None and self.model.loss_function is not self.plain_loss:
            raise UsageError(
                f"fused.head_loss: {type(self.model).__name__} was given another loss_function since initialize(); "
                "set fused.head_loss to false"
            )
        call = _Call(LabelCount(given["labels"]) if self.labelled_only else None)
        with self._in_place(call):
            output = self.__wrapped__(*args, **kwargs)
        if not call.losses and (call.late is None or call.late.is_computed):
            raise UsageError(
                f"fused.head_loss: {type(self.model).__name__} was given labels and has taken no cross entropy of its "
                "logits, so nothing was saved: set fused.head_loss to false"
            )
        call.forget()
        return output

    @contextmanager
    def _in_place(self, call: "_Call") -> Iterator[None]:
        """The head and the loss of this call. transformers keeps a loss of the user's own under `_loss_function`."""
        head, model, missing = vars(self.head), vars(self.model), object()
        before = head.get("forward", missing), model.get("_loss_function", missing)
        whole = self.head.forward

        def late(inputs: Tensor) -> Tensor:
            loss = partial(self._cross_entropy, call)
            call.late = LateLogits(inputs, self.head.weight, whole, loss, self.vocabulary)
            return call.late

        head["forward"] = late
        if self.plain_loss is not None:
            model["_loss_function"] = partial(self._loss, call)
        try:
            yield
        finally:
            call.is_over = True
            for own, name, value in ((head, "forward", before[0]), (model, "_loss_function", before[1])):
                if value is missing:
                    own.pop(name, None)
                else:
                    own[name] = value

    def _cross_entropy(self, call: "_Call", hidden: Tensor, labels: Tensor, given: Mapping[str, Any]) -> Tensor | None:
        """What `cross_entropy` gives of the logits, in the model's own forward; None where they are needed for it."""
        known = {key: value for key, value in given.items() if value is not None and (key, value) != NO_SMOOTHING}
        if call.is_over or not known.keys() <= {"ignore_index", "reduction"} or known.get("reduction") == "none":
            return None
        return self._fused(call, hidden, labels, counted=labels, **known)

    def _fused(
        self,
        call: "_Call",
        hidden: Tensor,
        labels: Tensor,
        *,
        counted: Tensor,
        ignore_index: int = IGNORED,
        reduction: Any = "mean",
    ) -> Tensor:
        """The loss. `counted` has at least as many labels, and may be what was counted when the call began."""
        found: Tensor = head_loss(
            hidden,
            self.head.weight,
            labels.to(hidden.device),
            self.head.bias,
            ignore_index=ignore_index,
            reduction=reduction,
            rows=self.rows,
            labelled=call.count.of(counted, ignore_index) if call.count is not None else None,
            part=self.part,
        )
        call.losses.append(found)
        return found

    def _loss(
        self,
        call: "_Call",
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """The arguments of transformers' own loss, and its value."""
        if not isinstance(logits, LateLogits):
            raise UsageError(
                f"fused.head_loss: {type(self.model).__name__} does something to its logits before the loss, so they "
                "are needed after all: set fused.head_loss to false"
            )
        if logits.is_computed:  # a hook has looked at them, and may have written to them
            options = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index}
            plain: Tensor = self.plain_loss(logits.computed(), labels, vocab_size, **options, shift_labels=shift_labels)
            call.losses.append(plain)
            return plain
        if vocab_size != self.vocabulary:
            raise UsageError(
                f"the head gives {self.vocabulary} logits and the loss expects {vocab_size}: set the model's "
                "config.vocab_size to the size of its head"
            )
        counted = labels if shift_labels is None else shift_labels
        if shift_labels is None:
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        if shift_labels.numel() != logits.shape[:-1].numel():
            raise UsageError(
                f"labels of shape {list(shift_labels.shape)} for logits of shape {list(logits.shape)}: leave "
                "logits_to_keep out of a call with labels"
            )
        found = self._fused(
            call,
            logits.hidden,
            shift_labels,
            counted=counted,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        if num_items_in_batch is None:
            return found
        items = num_items_in_batch
        return found / (items.to(found.device) if torch.is_tensor(items) else items)
