"""Fused operations as a transform: which parts of a model are computed by them, and which are left to a compiler."""

from dataclasses import dataclass
from typing import Any, Final

from mizzen.comm.mesh import Mesh
from mizzen.config.layout import Layout
from mizzen.config.schema import Config
from mizzen.errors import PlanError
from mizzen.kernels.gpu import gpu_code
from mizzen.model.head import OWN_LOSSES, HeadSketch
from mizzen.model.sketch import Drafts, Sketch, joined, parent_of
from mizzen.model.tree import modules_here
from mizzen.plan.parts import Parts
from mizzen.plan.transform import Transform
from mizzen.rewrite.forward import called_blocks
from mizzen.rewrite.fused_modules import (
    FusedGatedLayer,
    FusedNorm,
    FusedRotary,
    check,
    replace,
    trouble_of_gated,
    trouble_of_norm,
    trouble_of_rotary,
)
from mizzen.rewrite.head import LOSS, HeadLoss

NORM: Final = "RMSNorm"
"""How the classes of such norms end."""

OTHER_NORMS: Final = "Gemma"
"""How the classes begin that multiply with 1 + weight."""

PROJECTIONS: Final = ("gate_proj", "up_proj", "down_proj")
SILU: Final = ("SiLU", "SiLUActivation")


@dataclass(frozen=True, slots=True)
class FusedChoice:
    """The modules that are computed by fused operations, by path."""

    head: HeadSketch | None = None
    rows: int = 0
    """Tokens of a chunk; 0 is decided by the batch."""
    labelled_only: bool = False
    """Whether tokens without a label are left out of the head."""
    norms: tuple[str, ...] = ()
    attentions: tuple[str, ...] = ()
    gated: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    """What is done, where no model says how often."""
    left: tuple[str, ...] = ()
    """What the compiler does instead."""

    @property
    def needs_kernels(self) -> bool:
        """Whether there is anything to do that is a kernel of ours on a GPU."""
        return bool(self.head or self.attentions or self.gated)

    def __str__(self) -> str:
        said = list(self.words)
        if self.head is not None:
            rows = f" of {self.rows} tokens" if self.rows else ""
            which = ", tokens without a label left out" if self.labelled_only else ""
            said.append(f"the loss of {self.head.path} over chunks{rows}{which}")
        counts = {"RMSNorm": self.norms, "rotary embedding": self.attentions, "SwiGLU": self.gated}
        said += [f"{len(paths)} x {name}" for name, paths in counts.items() if paths]
        if self.left:
            said.append(f"left to the compiler: {', '.join(self.left)}")
        return ", ".join(said)


class Fused(Transform):
    """Modules get another `forward`; names, parameters and classes stay. Activations are not part of the cost."""

    name = "fused"

    def wants(self, config: Config, layout: Layout, drafts: Drafts) -> FusedChoice | None:
        """What was asked for and is in the model; None when nothing was. What is asked for and not there is refused."""
        sketch = joined(drafts)
        section = config.fused
        if (section.head_chunk or section.head_labelled) and not section.head_loss:
            key = "head_chunk" if section.head_chunk else "head_labelled"
            raise PlanError(f"fused.{key} is about the chunks of fused.head_loss, which is off: set it to true")
        asked = [key for key in ("rms_norm", "rotary", "swiglu") if config.at(f"fused.{key}")]
        if not asked and not section.head_loss:
            return None
        left = tuple(f"fused.{key}" for key in asked) if config.compile.enabled else ()
        if not sketch.modules:
            words = (["head_loss"] if section.head_loss else []) + ([] if left else asked)
            return FusedChoice(rows=section.head_chunk, words=tuple(words), left=left)
        head = _head(config, sketch) if section.head_loss else None
        norms = _norms(sketch) if section.rms_norm and not left else ()
        attentions = _attentions(sketch) if section.rotary and not left else ()
        gated = _gated(sketch) if section.swiglu and not left else ()
        modules = {module.path: module for module in sketch.modules}
        for paths, trouble_of in (
            (norms, trouble_of_norm),
            (attentions, trouble_of_rotary),
            (gated, trouble_of_gated),
        ):
            check((modules[path] for path in paths), trouble_of)
        return FusedChoice(
            head=head,
            rows=section.head_chunk,
            labelled_only=head is not None and _leaves_out(section.head_labelled, head),
            norms=norms,
            attentions=attentions,
            gated=gated,
            left=left,
        )

    def apply(self, parts: Parts, choice: FusedChoice, mesh: Mesh) -> Parts:
        """Give the modules their operations."""
        for part in parts:
            model = part.module
            if choice.needs_kernels and (parameter := next(model.parameters(), None)) is not None:
                gpu_code(parameter)  # an error here and now, where they cannot be had
            replace(modules_here(model, choice.norms), FusedNorm)
            replace(modules_here(model, choice.attentions), FusedRotary)
            replace(modules_here(model, choice.gated), FusedGatedLayer)
            if choice.head is None:
                continue
            for head in modules_here(model, (choice.head.path,)):
                HeadLoss.take(
                    model.get_submodule(choice.head.model),
                    head,
                    choice.rows,
                    labelled_only=choice.labelled_only,
                    calls_loss=choice.head.loss == LOSS,
                )
        return parts


def _head(config: Config, sketch: Sketch) -> HeadSketch:
    head = sketch.head
    if head is None:
        raise PlanError(
            "fused.head_loss finds no head: it looks for a model of transformers that takes labels and names its head "
            "in get_output_embeddings(); leave the key out"
        )
    if head.kind != "Linear":
        raise PlanError(f"fused.head_loss: the head {head.path} is a {head.kind}, and only an nn.Linear will do")
    if head.loss not in (LOSS, *OWN_LOSSES):
        loss = head.loss or "not a cross entropy in its forward"
        raise PlanError(
            f"fused.head_loss: the model's loss is {loss}, not {LOSS} or {' or '.join(OWN_LOSSES)}; leave the key out"
        )
    if head.changes:
        raise PlanError(
            f"fused.head_loss: the model changes its logits before the loss ({', '.join(head.changes)}), which needs "
            "all of them; leave the key out"
        )
    if config.compile.enabled and not called_blocks(sketch, config.compile.blocks, key="compile.blocks"):
        raise PlanError(
            "fused.head_loss with compile.enabled: no block of this model repeats, so all of it would be compiled, "
            "head and loss included; name the blocks to compile in compile.blocks"
        )
    return head


def _leaves_out(asked: bool | None, head: HeadSketch) -> bool:
    """Unless somebody says: of a masked language model most tokens have no label, of a causal one most have."""
    return head.loss != LOSS if asked is None else asked


def _norms(sketch: Sketch) -> tuple[str, ...]:
    shapes = {name: parameter.shape for name, parameter in sketch.by_name().items()}
    alike, others = [], dict[str, None]()
    for module in sketch.modules:
        if module.same_as is not None or not module.kind.endswith(NORM):
            continue
        has_weight = module.parameters == (f"{module.path}.weight",) and len(shapes[f"{module.path}.weight"]) == 1
        if has_weight and not module.kind.startswith(OTHER_NORMS):
            alike.append(module.path)
        else:
            others[module.kind] = None
    if not alike:
        there = f"; {', '.join(others)} computes something else" if others else ""
        raise PlanError(
            f"fused.rms_norm finds no module whose class ends in {NORM} and which has a weight and nothing else"
            f"{there}: leave the key out"
        )
    return tuple(alike)


def _attentions(sketch: Sketch) -> tuple[str, ...]:
    found = tuple(module.path for module in sketch.modules if module.is_rotary and module.same_as is None)
    if not found:
        raise PlanError(
            "fused.rotary finds no module whose forward calls the apply_rotary_pos_emb of its file: leave the key out"
        )
    return found


def _gated(sketch: Sketch) -> tuple[str, ...]:
    kinds: dict[str, dict[str, str]] = {}
    for module in sketch.modules:
        kinds.setdefault(parent_of(module.path), {})[module.path.rpartition(".")[2]] = module.kind
    found = tuple(module.path for module in sketch.modules if module.same_as is None and _is_gated(kinds, module.path))
    if not found:
        raise PlanError(
            f"fused.swiglu finds no module with {', '.join(PROJECTIONS)} and an act_fn that is one of "
            f"{', '.join(SILU)}: leave the key out"
        )
    return found


def _is_gated(kinds: dict[str, dict[str, str]], path: str) -> bool:
    inside: dict[str, Any] = kinds.get(path, {})
    return set(inside) == {*PROJECTIONS, "act_fn"} and inside["act_fn"] in SILU
