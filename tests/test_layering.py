"""The rooms of the package: what the architecture page says of them is true."""

import ast
import re
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "traceax"
FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
PAGE = (ROOT / "docs/devdocs/architecture.md").read_text()
# The table of the page: a layer's name, and its rooms.
LAYERS = {
    layer: re.findall(r"`(\w+)/`", rooms)
    for layer, rooms in re.findall(r"^\| \d (\w[\w ]+) \| (.*?) \|", PAGE, re.MULTILINE)
}
TOP = ["__init__", "internal", "plot"]
FACTORISATIONS = {"qr", "cholesky", "eigh", "svd", "inv", "solve", "solve_triangular"}
FACTORISATIONS |= {"eig", "eigvals", "eigvalsh", "expm", "schur"}
every_module = pytest.mark.parametrize("module", FILES)


def level(module):
    if module in TOP:
        return len(LAYERS)
    room = module.split(".")[0]
    levels = [i for i, rooms in enumerate(LAYERS.values()) if room in rooms]
    assert levels, f"the page has no room for `{module}`"
    return levels[0]


def nodes(module, *kinds):
    tree = ast.parse(FILES[module].read_text())
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def imports(module):
    """The modules of the package that a module imports, with the lines."""
    for node in nodes(module, ast.ImportFrom):
        if node.level:
            folder = module.split(".")[: -node.level]
            names = [node.module] if node.module else [each.name for each in node.names]
            for name in names:
                imported = ".".join([*folder, name])
                assert imported in FILES, f"line {node.lineno}: `{name}` is no module"
                yield imported, node.lineno


def test_the_page_names_each_room_once():
    rooms = [room for rooms in LAYERS.values() for room in rooms]
    folders = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    assert sorted(rooms) == folders
    assert sorted(path.stem for path in PACKAGE.glob("*.py")) == TOP


@every_module
def test_imports_point_down(module):
    room = module.split(".")[0]
    for imported, line in imports(module):
        if imported.split(".")[0] != room and module not in TOP:
            assert level(imported) < level(module), f"line {line}: {imported}"


@pytest.mark.parametrize("room", [room for rooms in LAYERS.values() for room in rooms])
def test_modules_of_a_room_import_each_other_in_one_direction(room):
    inside = {
        module: {name for name, _ in imports(module) if name.startswith(f"{room}.")}
        for module in FILES
        if module.startswith(f"{room}.")
    }
    while inside:
        first = {module for module, lower in inside.items() if not lower & inside.keys()}
        assert first, f"these import each other in a circle: {sorted(inside)}"
        inside = {name: lower for name, lower in inside.items() if name not in first}


@every_module
def test_imports_are_plain(module):
    for node in nodes(module, ast.Import, ast.ImportFrom):
        text = ast.unparse(node)
        assert node.col_offset == 0, f"line {node.lineno}: `{text}` is not at the top"
        for banned in ("jax._src", "import traceax", "from traceax"):
            assert banned not in text, f"line {node.lineno}: `{text}`"


@every_module
def test_unstable_interfaces_of_jax_are_in_one_module(module):
    for node in nodes(module, ast.Import, ast.ImportFrom):
        text = ast.unparse(node)
        for unstable in ("jax.extend", "jax.interpreters", "jax.core"):
            is_home = module == "_core.jax_interfaces"
            assert is_home or unstable not in text, f"line {node.lineno}: `{text}`"


@every_module
def test_sizes(module):
    assert len(FILES[module].read_text().splitlines()) <= 400
    for node in nodes(module, ast.FunctionDef, ast.AsyncFunctionDef):
        documented = ast.get_docstring(node) is not None and len(node.body) > 1
        lines = node.end_lineno - node.body[documented].lineno + 1
        assert lines <= 80, f"`{node.name}` has {lines} lines"


@every_module
def test_factorisations_go_through_the_door(module):
    for node in nodes(module, ast.Attribute):
        inside = node.attr in FACTORISATIONS
        assert not inside or module == "_numerics.dense", f"`{ast.unparse(node)}`"
    for node in nodes(module, ast.ImportFrom):
        names = {alias.name for alias in node.names} & FACTORISATIONS
        assert node.level or not names, f"`{ast.unparse(node)}`"
