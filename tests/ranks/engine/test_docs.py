"""What docs/optimizers.md shows is what happens."""

import contextlib
import io
import re
from pathlib import Path

from mizzen.config.optimizer import LOW_BIT, UNBUILT
from mizzen.optim.build import OPTIMIZERS

PAGE = (Path(__file__).parents[3] / "docs" / "optimizers.md").read_text()


def program() -> list[tuple[str, str]]:
    """What each `print` prints, with what the page says that it prints."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    said = re.findall(r"print\(.*\)  # (.*)", block)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(block, "docs/optimizers.md", "exec"), {})
    return list(zip((line for line in output.getvalue().splitlines() if "mizzen:" not in line), said, strict=True))


def test_the_program_prints_what_the_page_says(world):
    for size in (1, 2):
        for lines in world(size).run(program):
            assert len(lines) == 2
            assert all(printed == said for printed, said in lines)


def test_every_name_is_on_the_page():
    known = {word.lower() for word in re.findall(r"\w+", PAGE)}
    assert {*OPTIMIZERS, *(name.lower() for name in LOW_BIT)} <= known
    assert {"lbfgs", "sparseadam"} <= known & set(UNBUILT)
