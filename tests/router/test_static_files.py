"""What all web pages have in common."""

import re
from pathlib import Path

import pytest

from router.static_files import FOLDER, read_page


@pytest.mark.parametrize(
    "file", [path for path in FOLDER.rglob("*") if path.is_file()], ids=lambda path: path.name
)
def test_a_page_needs_nothing_from_elsewhere_and_runs_nothing_inline(file: Path) -> None:
    text = file.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"(https?:)?//\w+\.\w", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert not re.search(r"\son\w+=|\sstyle=|<script>|<style", text)


@pytest.mark.parametrize("page", [folder.name for folder in FOLDER.iterdir() if folder.name != "shared"])
def test_a_page_has_every_file_that_it_names(page: str) -> None:
    files = read_page(page)
    named = [
        name
        for file in files.values()
        for name in re.findall(r"""(?:href|src|from)[= ]"(?:\./|chat/)?(\w+\.\w+)\"""", file.body.decode())
    ]
    assert {"page.js", "style.css", "base.css", "icon.svg"} <= set(named) <= set(files)
