"""Activation checkpointing as a transform: which blocks backward computes again, and what is kept of them."""

from dataclasses import dataclass

from mizzen.comm.mesh import Mesh
from mizzen.config.execution import ActivationCheckpointingConfig
from mizzen.config.layout import Layout
from mizzen.config.schema import Config
from mizzen.errors import PlanError
from mizzen.model.sketch import Drafts, joined
from mizzen.plan.parts import Parts
from mizzen.plan.transform import Transform
from mizzen.rewrite.checkpointing import Checkpointing
from mizzen.rewrite.forward import restore
from mizzen.rewrite.replay import Keeping, Recomputed
from mizzen.rewrite.units import called_blocks, in_words


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
            modules = dict(part.module.named_modules())
            for block in (modules[path] for path in choice.paths if path in modules):
                vars(block)["forward"] = Recomputed(block.forward, choice.keeping)
        return parts


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
