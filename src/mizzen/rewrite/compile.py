"""torch.compile as a transform: each block is compiled on its own, inside whatever shards it afterwards.

`nn.Module.compile` works in place and keeps every name. Blocks of one structure share their graphs, so that the time to
compile does not grow with their number.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import nn
from torch.compiler import list_backends

from mizzen.comm.mesh import Mesh
from mizzen.config.layout import Layout
from mizzen.config.schema import Config
from mizzen.errors import PlanError, UsageError
from mizzen.log import info_once
from mizzen.model.blocks import Block
from mizzen.model.sketch import Drafts, Sketch, joined
from mizzen.model.tree import modules_here
from mizzen.plan.parts import Parts
from mizzen.plan.transform import Transform
from mizzen.rewrite.forward import called_blocks, in_words, restore
from mizzen.rewrite.fused_modules import FusedModule
from mizzen.rewrite.recompute import Keeping, Recomputed

REPEATING_BACKENDS: Final = ("inductor", "aot_eager")
"""Those that are known to draw the same random numbers in a repeated call: `eager`, for one, does not."""


@dataclass(frozen=True, slots=True)
class CompileChoice:
    """The modules that are compiled, by path, and how; the model as a whole has the empty path."""

    paths: tuple[str, ...]
    words: str
    """Which modules they are."""
    backend: str
    mode: str | None
    dynamic: bool | None
    fullgraph: bool

    def __str__(self) -> str:
        shapes = {None: "", True: ", for changing shapes", False: ", for fixed shapes"}[self.dynamic]
        whole = ", each as one graph" if self.fullgraph else ""
        return f"{self.words} by {self.backend}{f' ({self.mode})' if self.mode else ''}{shapes}{whole}"

    def options(self) -> dict[str, Any]:
        """The arguments of `torch.compile`."""
        options = {"backend": self.backend, "dynamic": self.dynamic, "fullgraph": self.fullgraph}
        return options | ({"mode": self.mode} if self.mode else {})


class Compile(Transform):
    """Compiling happens at the first call; here it is only asked for."""

    name = "compile"

    def wants(self, config: Config, layout: Layout, drafts: Drafts) -> CompileChoice | None:
        """Every block, or the whole model where nothing repeats; None when not enabled."""
        sketch = joined(drafts)
        section, recompute = config.compile, config.activation_checkpointing
        if not section.enabled:
            return None
        if section.mode != "default" and section.backend != "inductor":
            raise PlanError(
                f"compile.mode is {section.mode}, which only the backend inductor has; compile.backend is "
                f"{section.backend}: leave one of the two out"
            )
        if recompute.mode != "off":
            keeping = Keeping(on_host=recompute.cpu_checkpointing)
            if trouble := _trouble(keeping, section.backend):
                raise PlanError(f"compile.enabled with activation_checkpointing.mode {recompute.mode}: {trouble}")
        _check_backend(section.backend)
        units = called_blocks(sketch, section.blocks, key="compile.blocks")
        words = "each repeated block" if not sketch.modules else "the whole model, in which no block repeats,"
        return CompileChoice(
            paths=_paths(units),
            words=f"{in_words(units, among=len(units))} one by one" if units else words,
            backend=section.backend,
            mode=None if section.mode == "default" else section.mode,
            dynamic=section.dynamic,
            fullgraph=section.fullgraph,
        )

    def apply(self, parts: Parts, choice: CompileChoice, mesh: Mesh) -> Parts:
        """Ask torch to compile them."""
        for part in parts:
            _compile(part.module, choice.paths, choice.options())
        return parts


def compile_blocks(model: nn.Module, options: Mapping[str, Any]) -> None:
    """What `engine.compile` does: the same for a model in use, with the arguments of torch.compile.

    Fused operations inside of the blocks give way to the compiler.
    """
    units = called_blocks(Sketch.of(model), (), key="compile.blocks")
    if any(isinstance(vars(module).get("forward"), FusedModule) for module in model.modules()):
        info_once("compile(): the fused operations inside of the blocks are left to the compiler from now on")
        restore(model, FusedModule)
    _compile(model, _paths(units), options)


def _paths(units: Sequence[Block]) -> tuple[str, ...]:
    return tuple(unit.path for unit in units) or ("",)


def _compile(model: nn.Module, paths: Iterable[str], options: Mapping[str, Any]) -> None:
    _check_backend(options.get("backend", "inductor"))
    _refuse(model, str(options.get("backend", "inductor")))
    for module in modules_here(model, paths):
        try:
            module.compile(**options)
        except (TypeError, ValueError, AssertionError) as error:
            raise UsageError(f"torch.compile does not take {dict(options)}: {error}") from error


def _check_backend(backend: Any) -> None:
    """Refuse a name that torch does not know; it would say so in the first forward."""
    known = list_backends(exclude_tags=())
    if backend not in known and not callable(backend):
        raise PlanError(f"compile.backend: torch has no {backend!r}; known: {', '.join(sorted(known))}")


def _refuse(model: nn.Module, backend: str) -> None:
    """What the plan refuses, for a model that was changed before it is compiled."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, Recomputed) and (trouble := _trouble(forward.keeping, backend)):
            raise UsageError(f"compile() of a model with blocks that are computed again: {trouble}")


def _trouble(keeping: Keeping, backend: str) -> str | None:
    """Why blocks that are computed again cannot be compiled so."""
    if keeping.on_host:
        return (
            "the compiler decides itself what it keeps, so inputs cannot rest in host memory: leave "
            "activation_checkpointing.cpu_checkpointing out, or do not compile"
        )
    if backend not in REPEATING_BACKENDS:
        return (
            f"the backend {backend} does not promise to draw the same random numbers again: use one of "
            f"{', '.join(REPEATING_BACKENDS)}"
        )
    return None
