"""Pages of docs whose console blocks are run: `...` stands for any text, or for any lines."""

import re


def commands(page):
    """(command line, what the page shows below it) for every `$` line of every console block."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, shown = part.partition("\n")
            found.append((line, shown))
    return found


def block(page, kind):
    """The first block of a kind."""
    return re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL)[1]


def is_as_shown(shown, text):
    """Whether a command has printed what the page shows."""
    lines = [
        r"(?:.*\n)*?" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + r"\n"
        for line in shown.splitlines()
    ]
    return re.fullmatch("".join(lines), text) is not None
