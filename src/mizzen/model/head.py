"""The head of a language model that computes its own loss: which layer gives the logits, and what is done to them.

Read as Hugging Face's models say it of themselves (`get_output_embeddings`, `loss_function`); no torch here.
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import nn

CHANGES: Final = re.compile(r"(final_)?logits?_(scale|scaling|soft_?cap(ping)?|multiplier)|lm_head_multiplier")
"""Settings of a model by which it scales or bends its logits before the loss. Attention has others."""

OWN_LOSSES: Final = ("CrossEntropyLoss", "cross_entropy")
"""Names in the code of a forward that computes its loss by itself, as masked language models do."""

QUESTIONS: Final = ("get_output_embeddings", "loss_function")
"""What a class has that can answer."""


@dataclass(frozen=True, slots=True)
class HeadSketch:
    """A layer that makes logits, and the module that is called with labels."""

    model: str
    """The path of the module whose `forward` takes labels and gives the loss."""
    path: str
    """The path of the layer."""
    kind: str
    """The name of its class."""
    loss: str
    """The name of what makes the loss from logits and labels; empty when nothing is known of it."""
    changes: tuple[str, ...] = ()
    """What the model's settings say that is done to the logits in between, as `name=value`."""


def head_of(path: str, module: "nn.Module") -> HeadSketch | None:
    """The head of a module that has one and takes labels; None for all others."""
    # Asked of the class: wrappers forward unknown attributes to the model inside, which is visited anyway.
    if not all(any(name in vars(base) for base in type(module).__mro__) for name in QUESTIONS):
        return None
    model: Any = module
    layer = model.get_output_embeddings()
    if layer is None or "labels" not in inspect.signature(type(module).forward).parameters:
        return None
    names = [name for name, inner in module.named_modules() if inner is layer]
    if not names:
        return None
    return HeadSketch(
        path,
        f"{path}.{names[0]}" if path else names[0],
        type(layer).__name__,
        _loss(model),
        tuple(_changes(vars(model).get("config"))),
    )


def _loss(model: Any) -> str:
    forward = inspect.unwrap(type(model).forward)
    names = forward.__code__.co_names if inspect.isfunction(forward) else ()
    if "loss_function" not in names:
        held = {type(child).__name__ for name, child in model.named_children() if name in names}
        return next((name for name in OWN_LOSSES if name in names or name in held), "")
    loss = model.loss_function
    return str(loss.__name__) if inspect.isroutine(loss) else type(loss).__name__


def _changes(config: Any) -> Iterator[str]:
    """Models of several media have the settings of their text apart."""
    settings = {} if config is None else vars(config)
    for key, value in settings.items():
        if CHANGES.fullmatch(key) and value not in (None, 1):
            yield f"{key}={value}"
    if "text_config" in settings:
        yield from _changes(settings["text_config"])
