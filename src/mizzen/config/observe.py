"""What a run tells about itself: timers, profilers, the communication log, and the places where numbers are written."""

from mizzen.config.section import (
    Count,
    Flag,
    FromMinusOne,
    Name,
    NotNegative,
    Positive,
    Section,
    Text,
    Whole,
    no_effect,
    section,
)


class CommsLoggerConfig(Section):
    """A record of every collective."""

    enabled: Flag = False
    """Keep the record; giving the section alone does not."""
    verbose: Flag = False
    """Print a line for each collective."""
    prof_all: Flag = True
    """Record every kind of collective."""
    prof_ops: tuple[Name, ...] = ()
    """Kinds to record when `prof_all` is false."""
    debug: Flag = False
    """Record also who called."""


class ThroughputTimerConfig(Section):
    """Samples per second."""

    enabled: Flag = True
    """Measure the throughput of each step."""
    synchronized: Flag = no_effect(True, "device events time a step without waiting for it")
    """Wait for the device before each reading."""


class TimersConfig(Section):
    """Timers that run in every step."""

    throughput: ThroughputTimerConfig = section(ThroughputTimerConfig)
    """Samples per second."""


class FlopsProfilerConfig(Section):
    """Operations, parameters and time of each module, in one step."""

    enabled: Flag = False
    """Profile one step and print the result."""
    profile_step: Count = 1
    """Steps to take before the one that is profiled."""
    module_depth: FromMinusOne = -1
    """Depth of modules in the summary; -1 means the innermost ones."""
    top_modules: Count = 1
    """Modules named at each depth."""
    detailed: Flag = True
    """Print the model with the numbers of each module."""
    output_file: Text | None = None
    """File for the result; absent prints it."""
    recompute_fwd_factor: NotNegative = 0.0
    """Share of the forward pass that is computed again in the backward pass."""


class TraceConfig(Section):
    """What torch.profiler sees in some steps, as files for Perfetto or chrome://tracing."""

    enabled: Flag = False
    """Write them."""
    start_step: Whole = 2
    """Steps to take before the first one that is traced."""
    steps: Count = 2
    """Steps in a trace."""
    ranks: tuple[Whole, ...] = (0,)
    """Ranks that write one; empty means all."""
    output_path: Text = "traces"
    """Folder for the files."""
    shapes: Flag = False
    """Record the shapes of operands."""
    stacks: Flag = False
    """Record the lines of Python that started each operation; slow."""
    memory: Flag = False
    """Record what each operation allocates."""


class SnapshotConfig(Section):
    """Every allocation of some steps, with its stack, as a file for torch's memory viewer. CUDA devices only."""

    enabled: Flag = False
    """Write it."""
    start_step: Whole = 2
    """Steps to take before the first one that is recorded."""
    steps: Count = 1
    """Steps in a snapshot."""
    ranks: tuple[Whole, ...] = (0,)
    """Ranks that write one; empty means all."""
    output_path: Text = "snapshots"
    """Folder for the files."""
    max_entries: Count = 100000
    """Allocations that are kept at most, the latest ones."""


class ProfileConfig(Section):
    """Where time and memory of a step go, beyond what `flops_profiler` and `wall_clock_breakdown` say."""

    trace: TraceConfig = section(TraceConfig)
    """What torch.profiler sees."""
    memory_snapshot: SnapshotConfig = section(SnapshotConfig)
    """What the allocator sees."""
    peak_tflops: Positive | None = None
    """The most that a device of this run can do, for the share of it that is used; absent takes it from a table."""


class TensorboardConfig(Section):
    """Numbers as TensorBoard events."""

    enabled: Flag = False
    """Write them."""
    output_path: Text = ""
    """Folder for the events; empty means `runs` in the working directory."""
    job_name: Text = "DeepSpeedJobName"
    """Folder of this run inside it."""


class WandbConfig(Section):
    """Numbers for Weights & Biases."""

    enabled: Flag = False
    """Send them."""
    group: Text | None = None
    """Group of this run."""
    team: Text | None = None
    """Team that owns the project."""
    project: Text = "deepspeed"
    """Project of this run."""


class CsvConfig(Section):
    """Numbers as CSV, one file for each."""

    enabled: Flag = False
    """Write them."""
    output_path: Text = ""
    """Folder for the files; empty means `csv_logs` in the working directory."""
    job_name: Text = "DeepSpeedJobName"
    """Folder of this run inside it."""


class CometConfig(Section):
    """Numbers for Comet."""

    enabled: Flag = False
    """Send them."""
    samples_log_interval: Count = 100
    """Samples between two points."""
    project: Text | None = None
    """Project of this run."""
    workspace: Text | None = None
    """Workspace of the project."""
    api_key: Text | None = None
    """Key to the service; better kept in Comet's own settings than in this file."""
    experiment_name: Text | None = None
    """Name of this run."""
    experiment_key: Text | None = None
    """Identifier of this run, to continue an earlier one."""
    online: Flag | None = None
    """Send at once; false keeps the numbers in a folder."""
    mode: Text | None = None
    """Start a new run, continue one, or whichever fits."""


class JsonlConfig(Section):
    """Numbers as JSON, one line for each step."""

    enabled: Flag = False
    """Write them."""
    output_path: Text = ""
    """Folder for the file; empty means the working directory."""
    job_name: Text = "mizzen"
    """Name of the file, without its ending."""
    heartbeat: NotNegative = 10.0
    """Seconds between two lines of the record that each rank keeps beside the file; 0 leaves starts, saves and ends."""


class ProgressConfig(Section):
    """What rank 0 says on standard error as training goes on."""

    enabled: Flag = True
    """Show where the run is: one rewritten line on a terminal, a few lines elsewhere."""
    interval: Positive = 1.0
    """Least seconds between two rewrites."""
