"""The loss of a language model by the fused head, with logits that come when they are read.

The model's own `forward` runs as it is. While it does, and labels were given, its head returns `LateLogits`. Its loss
function, or the cross entropy that it takes of them itself, gets the hidden states out of them. Nothing of this is left
on the model when the call is over.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from mizzen.accelerator import get_accelerator
from mizzen.accelerator.fetch import Fetch
from mizzen.errors import PlanError, UsageError
from mizzen.kernels.head_loss import head_loss
from mizzen.rewrite.forward import ReplacedForward
from mizzen.rewrite.late_logits import LateLogits

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


class HeadLoss(ReplacedForward):
    """Stands in the place of the model's `forward`. Without labels it only calls it."""

    def __init__(self, model: nn.Module, head: nn.Linear, rows: int, *, labelled_only: bool, calls_loss: bool) -> None:
        super().__init__(model.forward)
        self.model: Any = model
        self.head, self.rows = head, rows
        self.labelled_only = labelled_only
        self.plain_loss: Any = self.model.loss_function if calls_loss else None
        """The model's own loss function; None when its forward takes a cross entropy instead."""
        self.names = tuple(signature(model.forward).parameters)

    @classmethod
    def take(
        cls, model: nn.Module, head: nn.Module, rows: int, *, labelled_only: bool = False, calls_loss: bool = True
    ) -> None:
        """Take the place of a model's `forward`."""
        if type(head) is not nn.Linear:
            raise PlanError(
                f"fused.head_loss: the head is a {type(head).__module__}.{type(head).__name__}, no nn.Linear"
            )
        vars(model)["forward"] = cls(model, head, rows, labelled_only=labelled_only, calls_loss=calls_loss)

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
        return output

    @contextmanager
    def _in_place(self, call: "_Call") -> Iterator[None]:
        """The head and the loss of this call. transformers keeps a loss of the user's own under `_loss_function`."""
        head, model, missing = vars(self.head), vars(self.model), object()
        before = head.get("forward", missing), model.get("_loss_function", missing)
        whole = self.head.forward

        def late(inputs: Tensor) -> Tensor:
            call.late = LateLogits(inputs, self.head.weight, whole, partial(self._cross_entropy, call))
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
        if vocab_size != len(self.head.weight):
            raise UsageError(
                f"the head gives {len(self.head.weight)} logits and the loss expects {vocab_size}: set the model's "
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
