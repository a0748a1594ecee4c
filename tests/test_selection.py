"""What is run without `--all`: each public function and class, and the cases that marks
name."""

import ast
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

import traceax as tx

from .conftest import ALL_ITEMS, case_of, kept


TESTS = Path(__file__).parent
# What calls return or are given by other parts, which tests need not name.
RETURNED = {"DiagonalPreconditioner", "DynamicState", "OperatorReport", "Preconditioner"}
RETURNED |= {"Eigenpairs", "RESULTS", "SingularTriplets", "Sketch", "Solution"}
RETURNED |= {"SpectralDensity"}
PUBLIC = {
    name
    for name, value in vars(tx).items()
    if callable(value) and not name.startswith(("_", "Abstract"))
} - RETURNED


@cache
def parts(path):
    """Of a file: its parts by the names that they define, and where what it imports from
    other files of the tests is."""
    found, imported = {}, {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            file = path.parents[node.level - 1] / (node.module.replace(".", "/") + ".py")
            imported |= {x.asname or x.name: (file, x.name) for x in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names = (x.id for x in ast.walk(node) if isinstance(x, ast.Name))
            found |= dict.fromkeys(names, node)
    return found, imported


def is_marked(test):
    return any("pytest.mark.slow" in ast.unparse(x) for x in test.decorator_list)


def names_used_without_all():
    """As attributes of `tx`, in tests that have no slow case, and in what these use."""
    todo = [
        (path, name)
        for path in TESTS.rglob("test_*.py")
        for name, node in parts(path)[0].items()
        if name.startswith("test_") and not is_marked(node)
    ]
    seen, used = set(todo), set()
    while todo:
        path, name = todo.pop()
        found, imported = parts(path)
        for node in ast.walk(found[name]):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "tx":
                used.add(node.attr)
            if isinstance(node, ast.Name):
                place = imported.get(node.id, (path, node.id))
                if place not in seen and place[1] in parts(place[0])[0]:
                    seen.add(place)
                    todo.append(place)
    return used


def test_every_public_name_is_used_without_all():
    assert PUBLIC - names_used_without_all() == set()


def test_cases_that_marks_name_exist(request):
    """And others do, which are slow."""
    if any("::" in arg for arg in request.config.args):
        pytest.skip("some cases were not collected")
    cases = {}
    for item in request.config.stash[ALL_ITEMS]:
        if marker := item.get_closest_marker("slow"):
            name = item.nodeid.partition("[")[0]
            cases.setdefault((name, tuple(kept(marker))), []).append(case_of(item))
    for (name, patterns), found in cases.items():
        matched = [[fnmatchcase(case, each) for case in found] for each in patterns]
        assert all(map(any, matched)), name
        assert not patterns or not all(map(any, zip(*matched, strict=True))), name
