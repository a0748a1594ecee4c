"""What the pages measure comes from a script, and what they claim, from its tables."""

import re
import runpy
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent.parent
PAGES = {
    str(page.relative_to(ROOT)): page.read_text()
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
RESULTS = ROOT / "benchmarks" / "results"
SHOWN = re.compile(r'^--8<-- "(\S+)\.md"$', re.MULTILINE)
TABLE = re.compile(r"^(?:\|.*\n)+", re.MULTILINE)
VERBATIM = re.compile(r"```.*?```|`[^`]*`|\$[^$]*\$|\]\([^)]*\)", re.DOTALL)
MEASURED = re.compile(
    r"(?<![\w.])(?<![a-z]-)\d+(?:\.\d+(?:e[+-]?\d+)?|e[+-]?\d+|%)(?!\.?\d)"
)
# By theory: the rounding floor of error bars.
DERIVED = "| operator | rounding floor"


def script(name):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"))
    finally:
        sys.path.pop(0)


parsing = script("pages")
tables, numbers = parsing["tables"], parsing["numbers"]
NUMBER = r"([\d.]+)"


def orders_of_magnitude():
    """Between Hutchinson and XNysTrace, with 60 products."""
    for table in tables("accuracy"):
        if table.title.startswith("exp"):
            column = table.columns.index("60")
            slow, fast = (
                numbers(table.rows[f"traceax 2.0 {name}"][column])[0]
                for name in ("Hutchinson", "XNysTrace")
            )
            assert slow / fast > 100


def coverage_of_entries():
    """The least and the largest of 30 samples: matfree's and ours."""
    (table,) = tables("calibration_diagonals")
    found = []
    for package in ("matfree", "traceax"):
        names = [f"{package} XDiag", f"{package} XNysDiag"]
        cells = [cell.split("/")[1] for name in names for cell in table.rows[name]]
        covered = [numbers(cell)[0] for cell in cells]
        found += [f"{min(covered):.2f}", f"{max(covered):.2f}"]
    return tuple(found)


def operators_at_the_edge():
    (table,) = tables("robust")
    zero = {
        label: cells[table.columns.index("zero")] for label, cells in table.rows.items()
    }
    for label in ("matfree XNysTrace", "traceax 1.0 XTrace", "traceax 1.0 XNysTrace"):
        assert zero[label] == "NaN"
    assert zero["curvlinops XTrace"] == zero["skerch XTrace"] == "error"
    error, bar = numbers(table.rows["matfree XTrace"][2])
    assert error > 100 * bar
    for label, cells in table.rows.items():
        assert not label.startswith("traceax 2.0") or all(map(numbers, cells))


CLAIMS = {
    "README.md": {"is worth orders of magnitude": orders_of_magnitude},
    "docs/comparison.md": {
        f"95% intervals cover {NUMBER} to {NUMBER} of the entries with 30 samples "
        rf"\(ours {NUMBER} to {NUMBER}\)": coverage_of_entries,
        "In float32, with a zero operator, one of rank 5": operators_at_the_edge,
    },
    "docs/index.md": {
        "How often a 95% interval": tuple,
        "1% unless": tuple,
        "Matvecs to an error of 1%": tuple,
        "in steps of about 1.4, with which 95% of 40 keys are within 1%": tuple,
    },
}


def test_tables_of_measurements_are_those_of_scripts():
    """Those with decimals are included from what `benchmarks/run.py` writes."""
    for name, page in PAGES.items():
        for table in TABLE.findall(page):
            head, _, *rows = table.splitlines()
            cells = [cell for row in rows for cell in row.split("|")[2:]]
            found = [cell for cell in cells if MEASURED.search(VERBATIM.sub("", cell))]
            assert not found or head.startswith(DERIVED), f"{name}: {head}"


def test_results_have_a_script():
    """And scripts of published results a result."""
    names = {
        str(path.relative_to(RESULTS).with_suffix("")) for path in RESULTS.rglob("*.md")
    }
    for path in (ROOT / "benchmarks" / "published").glob("*.py"):
        assert f"published/{path.stem}" in names
    for name in names:
        assert (ROOT / "benchmarks" / f"{name}.py").exists(), name
        assert TABLE.search((RESULTS / f"{name}.md").read_text()), f"{name} is empty"
    for name, page in PAGES.items():
        assert set(SHOWN.findall(page)) - {"CHANGELOG"} <= names, name


@pytest.mark.parametrize("page", CLAIMS)
def test_claims_are_those_of_the_tables(page):
    """And no number of the page is left that is not a claim."""
    text = TABLE.sub("", PAGES[page])
    text = " ".join(VERBATIM.sub("", text).split())
    text = re.sub(r"(Python|JAX|traceax) \d+\.\d+", "", text)
    for claim, expected in CLAIMS[page].items():
        match = re.search(claim, text)
        assert match, claim
        assert match.groups() == (expected() or ()), claim
        text = text.replace(match[0], "")
    assert not MEASURED.findall(text)


def test_releases_are_those_that_were_run():
    """In the tables that compare packages, and in what `run.py` installs."""
    for page in ("README.md", "docs/comparison.md"):
        releases = dict(re.findall(r"\| ([\w+]+) (\d+\.\d+\.\d+)", PAGES[page]))
        for name, release in script("run")["PEERS"].items():
            shown = name.removesuffix("-for-pytorch")
            assert shown == "torch" or releases[shown] == release


def test_pictures_are_those_of_the_tables():
    plots = script("plots")
    for name in plots["SOURCES"]:
        for scheme in ("light", "dark"):
            picture = (ROOT / "docs" / "images" / f"{name}-{scheme}.svg").read_text()
            assert plots["digest"](name) in picture
            assert len(picture) < 150_000
