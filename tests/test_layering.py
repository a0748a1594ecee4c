"""The arrows of the architecture: a module imports only from lower levels."""

import ast
from fnmatch import fnmatch
from pathlib import Path

import pytest


PACKAGE = Path(__file__).parent.parent / "traceax"
FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
# From low to high; modules of one line do not import each other. Of the patterns that
# fit a module, the first line counts. `x.__init__` are there to hold a docstring.
LEVELS = [
    "_quantiles _reduce _linearity _results",
    "_moments",
    "_solution _flat _devices _threefry *.__init__",
    "_checks _quantity _storage _symmetry _kernel.dense",
    "_adaptive _kernel.gram_schmidt",
    "_kernel.lanczos _kernel.small_matrix _kernel.growth _kernel.leave_one_out",
    "_sampler _kernel.expansion _kernel.[!tx]* _operator.* _matfun.functions",
    "_execution _callback _kernel.* _matfun.callables _matfun.singular_functions",
    "_call _gradient _sharded _iterate _matfun.rules",
    "_exact _matfun.quadratic_form _matfun.gradients",
    "_solve _matfun.all_eigenvalues _matfun.deflation _matfun.krylov _matfun.function_of",
    "_matfun.arnoldi _matfun.lanczos _matfun.golub_kahan _matfun.convergence",
    "_matfun.steps",
    "_estimator.base _matfun.base _matfun.preconditioner _matfun.samples",
    "_estimator.sketch _matfun.deflated_forms",
    "_estimator.growing",
    "_estimator.xnystrace _estimator.xdiag _estimator.h* _estimator.exact",
    "_estimator.[!a]* _matfun.[!a]*",
    "_estimator.auto* _matfun.auto* plot",
    "_measure _operator_report",
    "_trace _trace_[!_]* _log_trace_exp _logdet _diagonal* _norms _schatten",
    "_check_operator _dynamic _divergence _laplacian _gaussian internal",
    "__init__",
]
FACTORISATIONS = {"qr", "cholesky", "eigh", "svd", "inv", "solve", "solve_triangular"}
FACTORISATIONS |= {"eig", "eigvals", "eigvalsh", "expm", "schur"}
every_module = pytest.mark.parametrize("module", FILES)


def level(module):
    fits = (any(fnmatch(module, x) for x in line.split()) for line in LEVELS)
    found = next((i for i, fit in enumerate(fits) if fit), None)
    assert found is not None, f"`{module}` has no place in LEVELS"
    return found


def nodes(module, *kinds):
    tree = ast.parse(FILES[module].read_text())
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


@every_module
def test_imports_point_down(module):
    for node in nodes(module, ast.ImportFrom):
        if node.level:
            folder = module.split(".")[: -node.level]
            names = [node.module] if node.module else [each.name for each in node.names]
            for name in names:
                imported = ".".join([*folder, name])
                assert imported in FILES, f"line {node.lineno}: `{name}` is no module"
                assert level(imported) < level(module), f"line {node.lineno}: {imported}"


@every_module
def test_imports_are_plain(module):
    for node in nodes(module, ast.Import, ast.ImportFrom):
        text = ast.unparse(node)
        assert node.col_offset == 0, f"line {node.lineno}: `{text}` is not at the top"
        for banned in ("jax._src", "import traceax", "from traceax"):
            assert banned not in text, f"line {node.lineno}: `{text}`"


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
        assert not inside or module == "_kernel.dense", f"`{ast.unparse(node)}`"
    for node in nodes(module, ast.ImportFrom):
        names = {alias.name for alias in node.names} & FACTORISATIONS
        assert node.level or not names, f"`{ast.unparse(node)}`"
