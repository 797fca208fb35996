"""A row of the table, and the capabilities that names may wait for."""

OFFLOAD, WRITERS = "offload", "writers of files past the page cache (an engine saves by itself)"
ZENFLOW = "parts of ZenFlow by hand (an engine with a section zenflow does it by itself)"
PIPELINE, EXPERTS, SEQUENCE, TENSOR = (
    "pipeline parallelism",
    "mixture of experts",
    "sequence parallelism",
    "tensor parallelism",
)
INFERENCE, HYBRID, ROLLOUT = "inference", "an engine that trains and samples", "an engine that trains and samples"
COMPRESSION, LOW_BITS = "compression of models", "LoRA and quantized weights"
DATA, TUNING = "data efficiency", "autotuning"
PROFILER = "numbers hung on modules (FlopsProfiler.tree() has those of each module)"
ONE_BIT, SPARSE, LAYERS = "compressed communication", "sparse attention", "fused transformer layers"
PASSES, ENGINES = "passes over the graph", "checkpoint engines by hand (an engine saves and loads by itself)"
ENGINE, MODULE = "deepspeed.faces.engine.DeepSpeedEngine", "torch.nn.Module"
"""Bases of classes that wait."""
BY_RANK = "reading checkpoints of DeepSpeed rank by rank (mizzen checkpoint import reads them whole)"


class Row:
    """Names, the modules they are imported from, and their home or the capability that they wait for.

    A class that waits may have a base: a script that asks whether it is a module, or an engine, gets the right answer.
    """

    __slots__ = ("base", "home", "names", "paths", "waits_for")

    def __init__(self, paths: str, names: str, home: str = "", *, waits_for: str = "", base: str = "") -> None:
        self.paths = tuple(f"deepspeed.{path}" if path != "deepspeed" else path for path in paths.split())
        pairs = (word.partition("=") for word in names.split())
        self.names = {theirs: ours or theirs for theirs, _, ours in pairs}
        self.home = f"deepspeed.faces.{home[1:]}" if home.startswith(".") else home
        self.waits_for = waits_for
        self.base = base
