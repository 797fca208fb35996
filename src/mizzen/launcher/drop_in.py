"""Where the drop-in lies that this distribution carries as data, and how the ranks of one job find it.

It is a package of another name with its metadata: on the path of a process, programs that look for that name find it.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parents[1] / "drop_in"


def with_drop_in(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable by which a process finds it, before whatever is installed, in front of what it looks at anyway."""
    before = environment.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(FOLDER), before)))}
