"""The loss of a causal language model by the fused head, with logits that come when they are read.

The model's own `forward` runs as it is. While it does, and labels were given, its head returns `LateLogits` and its
loss function takes the hidden states out of them. Nothing of this is left on the model when the call is over.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from mizzen.errors import PlanError, UsageError
from mizzen.kernels.head_loss import head_loss
from mizzen.rewrite.late import LateLogits
from mizzen.rewrite.standing import Standing

LOSS: Final = "ForCausalLMLoss"
"""The loss of transformers that is computed here: the next token's cross entropy, per token or per `num_items`."""


class HeadLoss(Standing):
    """Stands in the place of the model's `forward`. Without labels it only calls it."""

    def __init__(self, model: nn.Module, head: nn.Linear, rows: int) -> None:
        super().__init__(model.forward)
        self.model: Any = model
        self.head, self.rows = head, rows
        self.plain_loss: Any = self.model.loss_function
        self.names = tuple(signature(model.forward).parameters)

    @classmethod
    def take(cls, model: nn.Module, head: nn.Module, rows: int) -> None:
        """Take the place of a model's `forward`."""
        if type(head) is not nn.Linear:
            raise PlanError(
                f"fused.head_loss: the head is a {type(head).__module__}.{type(head).__name__}, no nn.Linear"
            )
        vars(model)["forward"] = cls(model, head, rows)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model's own `forward` returns; its logits are late."""
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        if given.get("labels") is None:
            return self.__wrapped__(*args, **kwargs)
        if self.model.loss_function is not self.plain_loss:
            raise UsageError(
                f"fused.head_loss: {type(self.model).__name__} was given another loss_function since initialize(); "
                "set fused.head_loss to false"
            )
        with self._in_place() as losses:
            output = self.__wrapped__(*args, **kwargs)
        if not losses:
            raise UsageError(
                f"fused.head_loss: {type(self.model).__name__} was given labels and has not called its loss_function, "
                "so nothing was saved: set fused.head_loss to false"
            )
        return output

    @contextmanager
    def _in_place(self) -> Iterator[list[Tensor]]:
        """The head and the loss of this call. transformers keeps a loss of the user's own under `_loss_function`."""
        head, model, missing = vars(self.head), vars(self.model), object()
        before = head.get("forward", missing), model.get("_loss_function", missing)
        whole = self.head.forward

        def late(inputs: Tensor) -> Tensor:
            return LateLogits(inputs, self.head.weight, whole)

        losses: list[Tensor] = []

        def loss(*args: Any, **kwargs: Any) -> Tensor:
            losses.append(self._loss(*args, **kwargs))
            return losses[-1]

        head["forward"], model["_loss_function"] = late, loss
        try:
            yield losses
        finally:
            for own, name, value in ((head, "forward", before[0]), (model, "_loss_function", before[1])):
                if value is missing:
                    own.pop(name, None)
                else:
                    own[name] = value

    def _loss(
        self,
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
            return plain
        if vocab_size != len(self.head.weight):
            raise UsageError(
                f"the head gives {len(self.head.weight)} logits and the loss expects {vocab_size}: set the model's "
                "config.vocab_size to the size of its head"
            )
        if shift_labels is None:
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        if shift_labels.numel() != logits.shape[:-1].numel():
            raise UsageError(
                f"labels of shape {list(shift_labels.shape)} for logits of shape {list(logits.shape)}: leave "
                "logits_to_keep out of a call with labels"
            )
        found: Tensor = head_loss(
            logits.hidden,
            self.head.weight,
            shift_labels.to(logits.device),
            self.head.bias,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
            rows=self.rows,
        )
        if num_items_in_batch is None:
            return found
        items = num_items_in_batch
        return found / (items.to(found.device) if torch.is_tensor(items) else items)
