import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest


ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def script(path):
    """The Python blocks of a page, one after the other, each on its line of the page."""
    text, lines = path.read_text(), []
    for block in BLOCK.finditer(text):
        indent, code = block.groups()
        first = text.count("\n", 0, block.start(2))
        lines += [""] * (first - len(lines))
        lines += [line.removeprefix(indent) for line in code.splitlines()]
    return "\n".join(lines)


FAILING = re.compile(
    r"^```py\n(.*?)^```\n\n^```text\n(.*?)^```", re.MULTILINE | re.DOTALL
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SCRIPTS = {str(page.relative_to(ROOT)): script(page) for page in PAGES}


def test_there_are_examples():
    assert SCRIPTS["README.md"]


@pytest.mark.parametrize("page", [page for page, code in SCRIPTS.items() if code])
def test_code_blocks_run(page):
    command = [sys.executable, "-"]
    code = SCRIPTS[page]
    done = subprocess.run(
        command, input=code, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{page}, line numbers are those of it:\n{done.stderr}"


def one_line(text):
    return " ".join(text.split())


def test_errors_are_what_the_page_says():
    """Wrapped at will, and `...` stands for anything."""
    page = (ROOT / "docs" / "how_to" / "errors.md").read_text()
    _, setup = BLOCK.search(page).groups()
    names = {}
    blocks = FAILING.findall(page)
    assert len(blocks) == page.count("\n```py\n") == page.count("\n```text\n") > 0
    with jax.enable_x64(False):
        exec(setup, names)
    for code, expected in blocks:
        with jax.enable_x64(False), pytest.raises(Exception) as caught:  # noqa: PT011
            exec(code, names)
        pattern = re.escape(one_line(expected)).replace(r"\.\.\.", ".*")
        found = one_line(str(caught.value))
        assert re.fullmatch(pattern, found), f"{code}\nsays\n{caught.value}"
