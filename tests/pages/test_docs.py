import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest


ROOT = Path(__file__).parent.parent.parent
BOTH = re.MULTILINE | re.DOTALL
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```(?:\n\n\1```text\n(.*?)^\1```)?", BOTH)
END = "End of a block"


def script(path):
    """The Python blocks of a page, one after the other, each on its line of the page, and
    on the line after it what tells their outputs apart."""
    text, lines = path.read_text(), []
    for block in BLOCK.finditer(text):
        indent, code, _ = block.groups()
        first = text.count("\n", 0, block.start(2))
        lines += [""] * (first - len(lines))
        lines += [line.removeprefix(indent) for line in code.splitlines()]
        lines.append(f"print({END!r})")
    return "\n".join(lines)


FAILING = re.compile(r"^```py\n(.*?)^```\n\n^```text\n(.*?)^```", BOTH)
FILES = ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))
SCRIPTS = {str(page.relative_to(ROOT)): script(page) for page in FILES}
PAGES = {page: code for page, code in SCRIPTS.items() if code}
# The first that users see.
QUICK = ["README.md", "docs/getting_started.md"]
# Packages of the extra `frameworks`, each with a page of its name.
FRAMEWORKS = {
    f"docs/how_to/{package}.md": package
    for package in ("flax", "gpjax", "numpyro", "tinygp")
}

# In one process for those that are quick, one for those with packages that may not be
# installed, and one for the others, because what takes the time is to import and to
# compile. Pages share nothing but what JAX has compiled.
RUN = """
import gc, json, sys, traceback
import jax

gc.disable()
for page, code in json.load(sys.stdin).items():
    gc.collect()
    gc.freeze()  # what has been collected once need not be looked through again
    jax.config.update("jax_enable_x64", False)
    print("Runs:", page)
    try:
        exec(compile(code, page, "exec"), {"__name__": "__main__"})
        print("Has run:", page)
    except Exception:
        traceback.print_exc()
"""


def test_there_are_examples():
    folders = [str(Path(page).parent) for page in PAGES]
    assert "README.md" in PAGES
    assert min(folders.count("docs"), folders.count("docs/how_to")) >= 8


def group(page):
    if page in FRAMEWORKS:
        return "frameworks"
    return "quick" if page in QUICK else "others"


def is_installed(page):
    return page not in FRAMEWORKS or importlib.util.find_spec(FRAMEWORKS[page])


def run(page):
    """The process in which a page is run, with the others of its group."""
    if not is_installed(page):
        pytest.skip(f"{page} needs {FRAMEWORKS[page]}, which is not installed")
    return run_group(group(page))


@functools.cache
def run_group(name):
    """Programs are not kept: to compress them for the next run takes a tenth of it."""
    pages = {
        page: code
        for page, code in PAGES.items()
        if group(page) == name and is_installed(page)
    }
    return subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(pages),
        env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_run(page):
    """Line numbers of errors are those of the page."""
    done = run(page)
    assert done.returncode == 0, done.stderr
    assert f"Has run: {page}\n" in done.stdout, done.stderr


SHOWN = {
    page: [shown for _, _, shown in BLOCK.findall((ROOT / page).read_text())]
    for page in PAGES
}
NUMBER = re.compile(r"(\d+(?:\.(\d+))?(?:e([+-]\d+))?)")


def numbers(text):
    """Rounding differs between machines: whole ones to a hundredth, such as counts of
    steps, and others to the unit of the last digit, a thousandth, or what float32 makes
    of the largest number in the line: error bars are differences of such numbers."""
    found = []
    for line in text.splitlines():
        parsed = [(float(number), *rest) for number, *rest in NUMBER.findall(line)]
        rounding = 1e-5 * max((value for value, *form in parsed if any(form)), default=0)
        for value, decimals, exponent in parsed:
            unit = 10.0 ** (int(exponent or 0) - len(decimals))
            bounds = {"rel": 1e-3, "abs": max(1.01 * unit, rounding)}
            if not decimals and not exponent:
                bounds = {"rel": 1e-2}
            found.append(pytest.approx(value, **bounds))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if any(SHOWN[page])])
def test_pages_show_what_their_code_prints(page):
    _, after = run(page).stdout.split(f"Runs: {page}\n")
    *printed, _ = after.split(f"Has run: {page}\n")[0].split(f"{END}\n")
    pairs = zip(printed, SHOWN[page], strict=True)
    for found, shown in ((found, shown) for found, shown in pairs if shown):
        words = ["".join(NUMBER.sub("", text).split()) for text in (found, shown)]
        assert words[0] == words[1]
        assert [float(x) for x, *_ in NUMBER.findall(found)] == numbers(shown)


def one_line(text):
    return " ".join(text.split())


@pytest.mark.slow
def test_errors_are_what_the_page_says():
    """Wrapped at will, and `...` stands for anything."""
    page = (ROOT / "docs" / "how_to" / "errors.md").read_text()
    _, setup, _ = BLOCK.search(page).groups()
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
