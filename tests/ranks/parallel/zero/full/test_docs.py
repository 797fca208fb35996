"""The programs of docs/zero3.md print what the page says, on one rank and on two."""

import contextlib
import io
import re
from pathlib import Path

PAGE = (Path(__file__).parents[5] / "docs" / "zero3.md").read_text()


def program() -> list[tuple[str, str]]:
    code = "".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    said = re.findall(r"print\(.*\)  # (.*)", code)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "docs/zero3.md", "exec"), {})
    return list(zip(output.getvalue().splitlines(), said, strict=True))


def test_the_program_prints_what_the_page_says(world):
    for size in (1, 2):
        for lines in world(size).run(program):
            assert len(lines) == 4
            assert all(printed == said for printed, said in lines)
