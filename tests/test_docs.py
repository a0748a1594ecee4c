import re
import subprocess
import sys
from pathlib import Path

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
