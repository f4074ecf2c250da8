"""README.md and docs/*.md, taken apart."""

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
}
# Within an item of a list, it is indented.
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    fences = _FENCE.finditer(PAGES[page].read_text())
    return [textwrap.dedent(match[3]) for match in fences if match[2] == language]


def prose(page: str) -> str:
    """What is outside of fenced blocks."""
    return _FENCE.sub("", PAGES[page].read_text())


def anchors(page: str) -> set[str]:
    """The fragments that its headings can be linked by, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
