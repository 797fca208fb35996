"""Every link of the documents leads to something that is there."""

import re
from collections.abc import Iterator
from pathlib import Path

from house.tree import ROOT

LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"`((?:src/mizzen|tests|bench|examples|compat|docs)/[\w/.-]+)`")


def documents() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as hosts of repositories make them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path) -> Iterator[str]:
    """Links of a page, and paths of the repository in backticks, that lead nowhere."""
    text = FENCE.sub("", page.read_text(encoding="utf8"))
    for link in LINK.findall(text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" in link or link.startswith("mailto:"):
            continue
        if not target.exists():
            yield f"{page.name}: {link}"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text(encoding="utf8")):
            yield f"{page.name}: {link} has no such heading"
    if page.name != "CHANGELOG.md" and page.parent.name not in ("decisions", "history"):  # of their time
        yield from (f"{page.name}: {path}" for path in PATH.findall(text) if not (ROOT / path).exists())


def test_every_link_leads_somewhere():
    assert [found for page in documents() for found in broken(page)] == []


def tour() -> list[str]:
    """The rows of the tour's table of tasks."""
    table = (ROOT / "docs" / "tour.md").read_text().split("## Where do I")[1].split("\n## ")[0]
    return [row for row in table.splitlines() if row.startswith("| ") and "](" in row]


def names_that_are_elsewhere(row: str) -> list[str]:
    """Names of the code in a row that none of the files and folders has to which the row leads."""
    targets = [(ROOT / "docs" / link).resolve() for link in LINK.findall(row)]
    files = [file for target in targets for file in ([target] if target.is_file() else target.glob("*.py"))]
    text = "\n".join(file.read_text(encoding="utf8") for file in files)
    names = re.findall(r"(?<!\[)`(\w+)`|\[`(\w+)`\]", row)
    return [name for pair in names for name in pair if name and not re.search(rf"\b{name}\b", text)]


def test_the_tour_leads_a_newcomer_to_the_right_file():
    """One click to the tour's table, one from there to a file that has the name which the row gives."""
    assert len(tour()) >= 10
    assert [found for row in tour() for found in names_that_are_elsewhere(row)] == []
    assert names_that_are_elsewhere("| x | `Nowhere` in [`a.py`](../src/mizzen/api.py), `initialize` |") == ["Nowhere"]


def test_what_is_broken(tmp_path):
    (tmp_path / "there.md").write_text("# A heading, here\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](there.md) [b](there.md#a-heading-here) [c](gone.md) [d](there.md#none)"
        "\n`src/mizzen/gone.py` `src/mizzen`\n"
        "```text\n[e](gone.md)\n```\n[f](https://example.com/x)\n"
    )
    assert list(broken(page)) == [
        "page.md: gone.md",
        "page.md: there.md#none has no such heading",
        "page.md: src/mizzen/gone.py",
    ]


def test_every_decision_has_a_number_of_its_own():
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert [int(page.name[:4]) for page in pages] == list(range(1, len(pages) + 1))
    assert [int(page.read_text().split()[1].rstrip(".")) for page in pages] == list(range(1, len(pages) + 1))
