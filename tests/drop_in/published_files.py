"""Files as other projects publish them, each with what is expected of it; `published/expected.json` is the table.

They have the shape of those files, not their text. A row of the table names the keys that `config check`, `plan`,
`initialize` and HF Trainer refuse, on a CPU; none means that it works. Whoever builds a capability changes its rows.
"""

import json
import re
from pathlib import Path

FOLDER = Path(__file__).with_name("published")
TABLE = json.loads((FOLDER / "expected.json").read_text())
COLUMNS = ("check", "plan", "initialize", "trainer")
BY_THE_CLIENT = "by the client"
"""What HF Trainer, or Accelerate below it, refuses before the drop-in is asked."""
EVALUATED = ("accelerate_zero3", "transformers_zero3")
"""Stage 3, with a schedule whose length the client fills in: HF Trainer evaluates with them, and never trains."""
STEPS = 2
ACCUMULATION = "gradient_accumulation_steps"


def read(name):
    """A file as it is, but for the folders of drives, which are below the one where the test runs."""
    raw = json.loads((FOLDER / f"{name}.json").read_text())
    zero = raw.get("zero_optimization", {})
    for section in zero.values() if isinstance(zero, dict) else ():
        if isinstance(section, dict) and "nvme_path" in section:
            section["nvme_path"] = section["nvme_path"].lstrip("/")
    return raw


def number(value, default):
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default


def completed(name, ranks):
    """A file as a client completes it: numbers in the place of "auto", and the batch of so many ranks."""
    raw = read(name)
    if "elasticity" not in raw:
        micro, steps = (number(raw.get(key), 2) for key in ("train_micro_batch_size_per_gpu", ACCUMULATION))
        if "train_batch_size" in raw and "train_micro_batch_size_per_gpu" not in raw:
            micro = raw["train_batch_size"] // steps // ranks
        ranks //= raw.get("tensor_parallel", {}).get("autotp_size", 1)
        raw |= {"train_batch_size": micro * steps * ranks, "train_micro_batch_size_per_gpu": micro, ACCUMULATION: steps}
    schedule = raw.get("scheduler", {}).get("params", {})
    if "total_num_steps" in schedule:
        schedule["total_num_steps"] = STEPS
    return raw


def refused(message):
    """The keys that an error, or a list of problems, names at the beginning of its lines."""
    return re.findall(r"^(?: *also | *- | *)([a-z_0-9]+(?:\.[a-z_0-9]+)*): ", message, re.MULTILINE)


def row(name):
    """The row of the table in docs/migrate.md."""
    entry = TABLE[name]
    words = dict.fromkeys(word for column in COLUMNS for word in entry[column])
    why = ", ".join(word if word == BY_THE_CLIENT else f"`{word}`" for word in words)
    cells = [entry["has"], *("refused" if entry[column] else "ok" for column in COLUMNS), why]
    return f"| [{name}](../tests/drop_in/published/{name}.json) | {' | '.join(cells)} |"


def problems(out):
    """The problems among what `config check` has printed: the first lines, as many as the headline says."""
    headline, *lines = out.splitlines()
    count = re.search(r": (\d+) problems?$", headline)
    return "\n".join(lines[: int(count[1]) if count else 0])
