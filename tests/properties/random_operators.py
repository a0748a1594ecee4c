"""Operators drawn at random, and what is asked of them, for `test_random_operators.py`.

A `Recipe` makes a NumPy matrix. Matrices of a shape and dtype are arguments of one
compiled program for each `Call`: another matrix costs next to nothing, another call a
second.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from hypothesis import settings, strategies as st
from jax.custom_derivatives import linear_call
from jax.experimental.sparse import BCOO

import traceax as tx

from ..helpers import PSD


LONG = settings.get_current_profile_name() == "long"
HALF, BRAIN = jnp.float16, jnp.bfloat16
BATCH = 4  # matrices in a program


SPECTRA = "even", "geometric", "levels", "step", "outlier", "cluster", "laplacian"
SPECTRA += ("penalty",)


class Recipe(NamedTuple):
    """A matrix: eigenvalues from 1 down to `10**-decay`, or of a Laplacian or a penalty
    plus that number, zero beyond a share `rank` of them; `10**skew` times a random
    strictly upper triangle on top of that; rows and columns that are zero; all of it
    times a power of 10, by `scale` times the largest that the dtype allows for."""

    spectrum: str
    decay: int
    rank: float
    signs: str
    basis: str
    skew: int | None
    zeros: int
    scale: float
    seed: int

    def eigenvalues(self, n, generator):
        part = np.linspace(0, 1, n)
        smallest = 10.0**-self.decay
        count = max(1, round(self.rank * n))
        values = {
            "even": 1 - (1 - smallest) * part,
            "geometric": smallest**part,
            "levels": smallest ** (np.floor(3.99 * part) / 3),
            "step": np.where(part < 0.3, 1.0, smallest),
            "outlier": np.where(part == 0, 1.0, smallest),
            "cluster": np.abs(1 + smallest * generator.standard_normal(n)),
            "laplacian": np.cos(np.pi / 2 * part) ** 2 + smallest,
            "penalty": np.cos(np.pi / 2 * part) ** 4 + smallest,
        }[self.spectrum]
        signs = {
            "positive": 1,
            "random": generator.choice([-1, 1], n),
            "cancelling": np.where(np.arange(n) % 2, -1, 1),
        }[self.signs]
        if self.signs == "cancelling":
            values = values[np.arange(n) // 2 * 2]
        return np.where(np.arange(n) < count, values * signs, 0)

    def matrix(self, n, dtype, kind):
        generator = np.random.default_rng(self.seed)
        positive = self._replace(signs="positive") if kind == "psd" else self
        eigenvalues = positive.eigenvalues(n, generator)
        matrix = self.rotated(eigenvalues, dtype, generator)
        if kind == "general" and self.skew is not None:
            triangle = np.triu(generator.standard_normal((n, n)), 1)
            matrix = matrix + 10.0**self.skew * triangle / n
        zero = generator.permutation(n)[: min(self.zeros, n - 1)]
        matrix[zero], matrix[:, zero] = 0, 0
        power = 10.0 ** round(self.scale * (1.5 if dtype == HALF else 30))
        return (power * matrix).astype(dtype)

    def rotated(self, eigenvalues, dtype, generator):
        n = len(eigenvalues)
        normal = generator.standard_normal((n, n))
        if jnp.issubdtype(dtype, jnp.complexfloating):
            normal = normal + 1j * generator.standard_normal((n, n))
        if self.basis == "pairs":
            same = np.arange(n) // 2
            normal = normal * (same[:, None] == same)
        basis = np.eye(n) if self.basis == "axes" else np.linalg.qr(normal)[0]
        matrix = (basis * eigenvalues) @ basis.conj().T
        order = generator.permutation(n)
        return ((matrix + matrix.conj().T) / 2)[order][:, order]


RECIPES = st.builds(
    Recipe,
    spectrum=st.sampled_from(SPECTRA),
    decay=st.integers(0, 16),
    rank=st.one_of(st.just(1.0), st.integers(0, 16).map(lambda i: i / 16)),
    signs=st.sampled_from(["positive", "random", "cancelling"]),
    basis=st.sampled_from(["random", "axes", "pairs"]),
    skew=st.sampled_from([None, -4, 0, 2]),
    zeros=st.sampled_from([0, 0, 1, 7]),
    scale=st.integers(-8, 8).map(lambda i: i / 8),
    seed=st.integers(0, 2**16),
)
BATCHES = st.tuples(*[RECIPES] * BATCH)
SEEDS = st.integers(0, 2**31)


def made(batch, call):
    """The matrices of several recipes, stacked, for a call."""
    kind = QUANTITIES[call.quantity].kind
    return np.stack([each.matrix(call.n, call.dtype, kind) for each in batch])


# --- structures ---


made_on_host = []  # an entry for each product


def on_host(matrix, vector):
    """A product, or one with the transpose, made and counted on the host."""

    def make(matrix, vector):
        made_on_host.append(None)
        matrix, vector = np.asarray(matrix), np.asarray(vector)
        wide = np.result_type(matrix, np.float32)
        with np.errstate(all="ignore"):
            return (matrix.astype(wide) @ vector.astype(wide)).astype(matrix.dtype)

    def forward(matrix, vector):
        return jax.pure_callback(make, vector, matrix, vector)

    def transposed(matrix, vector):
        return forward(matrix.T, vector)

    return linear_call(forward, transposed, matrix, vector)


def vectors(matrix, tags, product=jnp.matmul):
    structure = jax.ShapeDtypeStruct(matrix.shape[1:], matrix.dtype)
    return lx.FunctionLinearOperator(lambda v: product(matrix, v), structure, tags)


def trees(matrix, tags, product=jnp.matmul):
    """On a scalar, a vector, and an array with two axes if there is place for one."""
    n, dtype = matrix.shape[0], matrix.dtype
    rows = max(0, n - 4) // 3
    shapes = {"a": (), "b": {"c": (n - 1 - 3 * rows,), "d": (rows, 3)}}
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    leaf = lambda shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    structure = jax.tree.map(leaf, shapes, is_leaf=is_shape)

    def mv(tree):
        flat = product(matrix, flattened(tree))
        pieces = flat[0], flat[1 : n - 3 * rows], flat[n - 3 * rows :].reshape(rows, 3)
        return jax.tree.unflatten(jax.tree.structure(structure), pieces)

    return lx.FunctionLinearOperator(mv, structure, tags)


def flattened(tree):
    return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def sums(matrix, tags):
    """Of its two triangles: halves of the smallest numbers need not be numbers."""
    upper, lower = vectors(jnp.triu(matrix), ()), jnp.tril(matrix, -1)
    return lx.TaggedLinearOperator(upper + lx.MatrixLinearOperator(lower), tags)


def products(matrix, tags):
    structure = jax.ShapeDtypeStruct(matrix.shape[1:], matrix.dtype)
    signs = (-1) ** jnp.arange(len(matrix))
    flip = lx.DiagonalLinearOperator(signs.astype(matrix.dtype))
    inner = vectors(matrix * signs.astype(matrix.dtype), ())
    identity = lx.IdentityLinearOperator(structure)
    return lx.TaggedLinearOperator(identity @ inner @ flip, tags)


def jacobians(matrix, tags):
    point = jnp.zeros(len(matrix), matrix.dtype)
    return lx.JacobianLinearOperator(lambda v, _: matrix @ v, point, None, tags)


def sparse(matrix, tags):
    return tx.sparse(BCOO.fromdense(matrix, nse=matrix.size), tags)


def kronecker(matrix, tags):
    """With a factor of one row, so that the matrix may be any."""
    one = lx.IdentityLinearOperator(jax.ShapeDtypeStruct((1,), matrix.dtype))
    return tx.kronecker(lx.TaggedLinearOperator(one, tags), vectors(matrix, tags))


STRUCTURES = {
    "vector": vectors,
    "tree": trees,
    "matrix": lx.MatrixLinearOperator,
    "sum": sums,
    "product": products,
    "jacobian": jacobians,
    "sparse": sparse,
    "kronecker": kronecker,
}


class Quantity(NamedTuple):
    """What is estimated, of matrices of a `kind`: `psd`, `hermitian` or `general`."""

    solve: Callable[..., tx.Solution]  # of an operator and settings
    exact: Callable[[np.ndarray], Any]  # of the matrix in double precision
    kind: str = "general"
    samples: int = 20  # that it takes to have no equal ones by chance
    most: Callable[[int, int], int] = lambda k, num_steps: k  # products
    krylov: bool = False
    real: bool = False  # only
    structures: tuple[str, ...] = tuple(STRUCTURES)


# Quantities whose functions have no bracket.
WITHOUT_BRACKET = ("exp", "exp-krylov-aware", "cube", "tanh", "cube-general")


class Call(NamedTuple):
    """All that a compiled program depends on. Without `num_steps` they are chosen."""

    quantity: str
    dtype: Any = np.float32
    n: int = 64
    k: int | tx.Adaptive = 40
    num_steps: int | None = 8
    structure: str = "vector"
    execution: tx.AbstractExecution = tx.Local()

    @property
    def most(self):
        """The products that it may make: where steps are chosen, by one or two runs, and
        the exact answer after them."""
        quantity = QUANTITIES[self.quantity]
        if self.num_steps is not None or not quantity.krylov:
            return quantity.most(self.k, self.num_steps)
        return quantity.most(self.k + 2, min(self.n, 128)) + self.n

    def solve(self, matrix, key, make=None, **settings):
        quantity = QUANTITIES[self.quantity]
        tags = {"psd": PSD, "hermitian": tx.hermitian_tag, "general": ()}[quantity.kind]
        usual = {"k": self.k, "key": key, "throw": False, "execution": self.execution}
        if quantity.krylov and self.num_steps is not None:
            usual["num_steps"] = self.num_steps
        operator = (make or STRUCTURES[self.structure])(matrix, tags)
        return quantity.solve(operator, matrix, usual | settings)


# --- quantities ---


def by(function, *arguments):
    """A public function of an operator and these arguments."""
    return lambda operator, _, settings: function(operator, *arguments, **settings)


def colours(n):
    """Of five colours, or fewer: the entries by turns."""
    return tx.ColouredSampler(np.arange(n) % min(n, 5))


def coloured_trace(operator, matrix, settings):
    estimator = tx.HutchinsonEstimator(colours(len(matrix)))
    return tx.trace(operator, estimator, **settings)


def coloured_logdet(operator, matrix, settings):
    return tx.logdet(operator, tx.SLQEstimator(colours(len(matrix))), **settings)


def random_logdet(operator, matrix, settings):
    start = settings.get("num_steps", 8)
    steps = tx.RandomSteps(start, max_steps=max(24, start))
    return tx.logdet(operator, **settings | {"num_steps": steps})


def leaf_traces(matrix):
    n = len(matrix)
    rows = max(0, n - 4) // 3
    parts = np.split(np.diag(matrix), [1, n - 3 * rows])
    return np.array([np.sum(part) for part in parts])


def signs(n):
    return np.where(np.arange(n) % 3, 1, -1)


def joint(operator, matrix, settings):
    other = lx.DiagonalLinearOperator(jnp.asarray(signs(len(matrix)), matrix.dtype))
    quantities = {"product": tx.TraceOfProduct(other), "trace": tx.Trace()}
    return tx.estimate(operator, quantities, **settings)


def exact_joint(matrix):
    return np.array([signs(len(matrix)) @ np.diag(matrix), np.trace(matrix)])


def controlled_trace(operator, matrix, settings):
    control = vectors(enlarged(matrix), ()), jnp.trace(enlarged(matrix))
    return tx.trace(operator, control=control, **settings)


def frobenius_products(operator, matrix, settings):
    diagonal = lx.DiagonalLinearOperator(matrix.diagonal())
    return tx.frobenius_products([operator, diagonal], **settings)


def exact_products(matrix):
    pair = np.stack([matrix, np.diag(np.diag(matrix))])
    return np.einsum("iab,jab->ij", pair.conj(), pair)


def difference(operator, matrix, settings):
    other = vectors(enlarged(matrix), operator.tags)
    return tx.trace_difference(operator, other, tx.Log(), **settings)


def exact_difference(matrix):
    return logdet(matrix) - logdet(enlarged(matrix))


def enlarged(matrix):
    return matrix + (matrix / 8) * np.eye(len(matrix), dtype=matrix.dtype)


def rows(n):
    """Five rows with entries in [-1, 1]."""
    return np.cos(np.outer(np.arange(1, 6), np.arange(n)))


def product_diagonal(operator, matrix, settings):
    factor = lx.MatrixLinearOperator(jnp.asarray(rows(len(matrix)), matrix.dtype))
    return tx.diagonal_of_product(factor, operator, tx.Inverse(), **settings)


def exact_product_diagonal(matrix):
    eigenvalues, vectors = np.linalg.eigh(matrix)
    return np.abs(rows(len(matrix)) @ vectors) ** 2 @ (1 / eigenvalues)


def residual(n):
    """The same in every dtype."""
    return (np.arange(n) % 7 - 3) / 4


def log_prob(operator, matrix, settings):
    r = jnp.asarray(residual(len(matrix)), matrix.dtype)
    return tx.gaussian_log_prob(operator, r, **settings)


def exact_log_prob(matrix):
    r = residual(len(matrix))
    form = r @ np.linalg.lstsq(matrix, r)[0]
    return -0.5 * (form + logdet(matrix) + len(r) * np.log(2 * np.pi))


def logdet(matrix):
    return np.linalg.slogdet(matrix)[1]


def log_trace_exp(matrix):
    eigenvalues = np.linalg.eigvalsh(matrix)
    largest = eigenvalues[-1]
    return largest + np.log(np.sum(np.exp(eigenvalues - largest)))


def divergence(operator, matrix, settings):
    x = jnp.asarray(residual(len(matrix)), matrix.dtype)
    return tx.divergence(lambda x: matrix @ jnp.sin(x), x, **settings)[1]


def exact_divergence(matrix):
    return np.sum(np.diag(matrix) * np.cos(residual(len(matrix))))


def laplacian(operator, matrix, settings):
    x = jnp.asarray(residual(len(matrix)), matrix.dtype)
    settings = {name: settings[name] for name in ("k", "key", "throw")}
    return tx.laplacian(lambda x: x @ (matrix @ jnp.sin(x)), x, **settings)[2]


def exact_laplacian(matrix):
    """The Hessian is `A C + C A^T - diag(s * (x A))`."""
    x = residual(len(matrix))
    return np.sum(2 * np.diag(matrix) * np.cos(x) - np.sin(x) * (x @ matrix))


def schatten(p):
    return lambda matrix: np.sum(np.linalg.svd(matrix)[1] ** p) ** (1 / p)


class Spectral(NamedTuple):
    """The trace of a function of a Hermitian matrix."""

    function: Callable[[np.ndarray], np.ndarray]

    def __call__(self, matrix):
        return np.sum(self.terms(matrix))

    def terms(self, matrix):
        return self.function(np.linalg.eigvalsh(matrix))


HERMITIAN = {
    "kind": "hermitian",
    "most": lambda k, num_steps: k * num_steps,
    "krylov": True,
}
DEFINITE = HERMITIAN | {"kind": "psd"}
GENERAL = HERMITIAN | {"kind": "general"}
ENTRIES = {"samples": 30}
FIELD = {"real": True, "structures": ("vector",)}

QUANTITIES = {
    "trace": Quantity(by(tx.trace), np.trace, samples=10),
    "trace-psd": Quantity(by(tx.trace), np.trace, "psd", samples=10),
    "hutchinson": Quantity(by(tx.trace, tx.HutchinsonEstimator()), np.trace),
    "coloured": Quantity(coloured_trace, np.trace),
    "hutchpp": Quantity(by(tx.trace, tx.HutchPlusPlusEstimator()), np.trace, samples=10),
    "xtrace": Quantity(by(tx.trace, tx.XTraceEstimator()), np.trace, samples=10),
    "nystrompp": Quantity(
        by(tx.trace, tx.NystromPlusPlusEstimator()), np.trace, "psd", samples=10
    ),
    "xnystrace": Quantity(
        by(tx.trace, tx.XNysTraceEstimator()), np.trace, "psd", samples=10
    ),
    "diagonal": Quantity(by(tx.diagonal), np.diag, **ENTRIES),
    "diagonal-hutchinson": Quantity(
        by(tx.diagonal, tx.HutchinsonEstimator()), np.diag, **ENTRIES
    ),
    "diagonal-diagpp": Quantity(
        by(tx.diagonal, tx.DiagPlusPlusEstimator()), np.diag, **ENTRIES
    ),
    "diagonal-xdiag": Quantity(by(tx.diagonal, tx.XDiagEstimator()), np.diag, **ENTRIES),
    "diagonal-xnysdiag": Quantity(
        by(tx.diagonal, tx.XNysDiagEstimator()), np.diag, "psd", **ENTRIES
    ),
    "leaf-traces": Quantity(by(tx.leaf_traces), leaf_traces, structures=("tree",)),
    "joint": Quantity(joint, exact_joint, structures=("vector",)),
    "controlled-trace": Quantity(controlled_trace, np.trace, structures=("vector",)),
    "frobenius-norm": Quantity(by(tx.frobenius_norm), np.linalg.norm),
    "frobenius-norm-xnystrace": Quantity(
        by(tx.frobenius_norm, tx.XNysTraceEstimator()), np.linalg.norm, samples=10
    ),
    "row-norms": Quantity(
        by(tx.row_norms), lambda matrix: np.linalg.norm(matrix, axis=1), **ENTRIES
    ),
    "frobenius-products": Quantity(
        frobenius_products, exact_products, structures=("vector",)
    ),
    "divergence": Quantity(divergence, exact_divergence, **FIELD),
    "laplacian": Quantity(laplacian, exact_laplacian, **FIELD),
    "schatten-1": Quantity(
        by(tx.schatten_norm, 1),
        schatten(1),
        most=lambda k, num_steps: 2 * k * num_steps,
        krylov=True,
    ),
    "schatten-3": Quantity(
        by(tx.schatten_norm, 3),
        schatten(3),
        most=lambda k, num_steps: 2 * k * num_steps,
        krylov=True,
    ),
    "logdet": Quantity(by(tx.logdet), logdet, **DEFINITE),
    "coloured-logdet": Quantity(coloured_logdet, logdet, **DEFINITE),
    "random-logdet": Quantity(
        random_logdet,
        logdet,
        **DEFINITE | {"most": lambda k, num_steps: max(24, num_steps) * (k + 1)},
    ),
    "logdet-general": Quantity(
        by(tx.logdet),
        logdet,
        most=lambda k, num_steps: 2 * k * num_steps,
        krylov=True,
    ),
    "inverse": Quantity(
        by(tx.trace_of_function, tx.Inverse()), Spectral(lambda x: 1 / x), **DEFINITE
    ),
    "inverse-by-solves": Quantity(
        by(tx.trace_of_solves, ()),
        Spectral(lambda x: 1 / x),
        "psd",
        most=lambda k, num_steps: np.inf,  # as many as the solver takes
    ),
    "shifted-inverse": Quantity(
        by(tx.trace_of_function, tx.Inverse(0.1)),
        Spectral(lambda x: 1 / (x + 0.1)),
        **DEFINITE,
    ),
    "root": Quantity(
        by(tx.trace_of_function, tx.Power(0.5)),
        Spectral(lambda x: np.sqrt(np.maximum(x, 0))),
        **DEFINITE,
    ),
    "entropy": Quantity(
        by(tx.trace_of_function, tx.Entropy()),
        Spectral(lambda x: -x * np.log(np.maximum(x, 1e-300))),
        **DEFINITE,
    ),
    "cube": Quantity(
        by(tx.trace_of_function, tx.Power(3)), Spectral(lambda x: x**3), **HERMITIAN
    ),
    "exp": Quantity(
        by(tx.trace_of_function, tx.Exp(-1.0)),
        Spectral(lambda x: np.exp(-x)),
        **HERMITIAN,
    ),
    "tanh": Quantity(by(tx.trace_of_function, jnp.tanh), Spectral(np.tanh), **HERMITIAN),
    "exp-krylov-aware": Quantity(
        by(tx.trace_of_function, tx.Exp(-1.0), tx.KrylovAwareEstimator()),
        Spectral(lambda x: np.exp(-x)),
        samples=10,
        **HERMITIAN,
    ),
    "cube-general": Quantity(
        by(tx.trace_of_function, tx.Power(3)),
        lambda matrix: np.trace(matrix @ matrix @ matrix),
        **GENERAL,
    ),
    "inverse-general": Quantity(
        by(tx.trace_of_function, tx.Inverse()),
        lambda matrix: np.trace(np.linalg.pinv(matrix, 0)),
        **GENERAL,
    ),
    "diagonal-of-inverse": Quantity(
        by(tx.diagonal_of_function, tx.Inverse(), tx.HutchinsonEstimator()),
        lambda matrix: np.diag(dense_function(lambda x: 1 / x, matrix)),
        **DEFINITE | {"samples": 30, "most": lambda k, num_steps: (k + 1) * num_steps},
    ),
    "diagonal-of-exp": Quantity(
        by(tx.diagonal_of_function, tx.Exp(-1.0)),
        lambda matrix: np.diag(dense_function(lambda x: np.exp(-x), matrix)),
        **HERMITIAN | {"samples": 30, "most": lambda k, num_steps: (k + 1) * num_steps},
    ),
    "diagonal-of-product": Quantity(
        product_diagonal,
        exact_product_diagonal,
        structures=("vector",),
        **DEFINITE | {"samples": 30, "most": lambda k, num_steps: (k + 1) * num_steps},
    ),
    "log-trace-exp": Quantity(by(tx.log_trace_exp), log_trace_exp, **HERMITIAN),
    "log-prob": Quantity(
        log_prob,
        exact_log_prob,
        **DEFINITE | FIELD | {"most": lambda k, num_steps: np.inf},
    ),
    "log-difference": Quantity(
        difference, exact_difference, structures=("vector",), **DEFINITE
    ),
}


def dense_function(function, matrix):
    eigenvalues, vectors = np.linalg.eigh(matrix)
    return (vectors * function(eigenvalues)) @ vectors.conj().T


# Of these no call on a finite operator may fail: all that can go wrong is overflow.
LINEAR = {
    "trace",
    "trace-psd",
    "hutchinson",
    "coloured",
    "hutchpp",
    "xtrace",
    "nystrompp",
    "xnystrace",
}
LINEAR |= {"leaf-traces", "joint", "divergence", "laplacian"}
LINEAR |= {name for name in QUANTITIES if name.startswith("diagonal")}
LINEAR -= {"diagonal-of-exp", "diagonal-of-inverse", "diagonal-of-product"}

# Adaptive runs of these end where one without interruption ends; others plan for `max_k`.
PLANNING = {"hutchpp", "nystrompp", "diagonal-diagpp", "exp-krylov-aware", "laplacian"}
RESUMABLE = [name for name in QUANTITIES if name not in PLANNING]

# Of these the products are those of a function, not of an operator.
FIELDS = {"divergence", "laplacian"}

# The calls of the short profile.
SHORT = {
    call.quantity: call
    for call in [
        Call("trace"),
        Call("coloured"),
        Call("hutchpp", jnp.float64),
        Call("nystrompp"),
        Call("xnystrace", jnp.complex64, k=20),
        Call("diagonal", BRAIN, k=62),
        Call("diagonal-xdiag", k=62),
        Call("leaf-traces", structure="tree"),
        Call("joint"),
        Call("controlled-trace"),
        Call("frobenius-norm"),
        Call("laplacian"),
        Call("schatten-1", k=20),
        Call("logdet", k=20),
        Call("coloured-logdet", k=20),
        Call("random-logdet", k=20),
        Call("logdet-general", k=20),
        Call("entropy", jnp.float64, k=20),
        Call("inverse", jnp.float64, k=20, num_steps=None),
        Call("inverse-by-solves", jnp.float64, k=20),
        Call("exp", k=20, structure="sparse"),
        Call("diagonal-of-product", jnp.float64, num_steps=None),
        Call("log-trace-exp", k=20),
        Call("log-prob", jnp.float64, k=20),
    ]
}
NAMES = list(QUANTITIES if LONG else SHORT)


@st.composite
def calls(draw, name):
    """In the short profile one for each quantity, in the long one any."""
    if not LONG:
        return SHORT[name]
    quantity = QUANTITIES[name]
    one_of = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    dtypes = [np.float32, np.float64, HALF, BRAIN]
    if not quantity.real:
        dtypes += [np.complex64, np.complex128]
    blocks = [tx.Local(), tx.Local(block_size=1), tx.Local(block_size=7)]
    meshes = [tx.Sharded(tx.probe_mesh(jax.devices()[:d])) for d in (1, 2, 3, 5, 8)]
    return Call(
        name,
        dtype=one_of(*dtypes),
        n=one_of(64, 100, 33, 64, 100, 5, 1),
        k=one_of(40, 30, 20, 60, 95, 6, 100),
        num_steps=one_of(8, 3, 20, 100, None, None),
        structure=one_of(*quantity.structures),
        execution=one_of(*blocks, *([] if name == "laplacian" else meshes)),
    )


# --- answers ---


class Answers(NamedTuple):
    """Of several calls, stacked; PyTrees as flat vectors. `low` and `high` are the ends
    of an interval of eight standard errors, about the value where the steps were chosen,
    and elsewhere about what is proven of it."""

    value: Any
    std_err: Any
    low: Any
    high: Any
    samples: Any
    products: Any
    result: Any
    exact: Any
    solve: Any


def answer(call, solution):
    value, std_err = flattened(solution.value), flattened(solution.std_err)
    stats, unit = solution.stats, 1 + 1j if jnp.iscomplexobj(value) else 1
    below = above = 8 * std_err
    exact = stats["exact"]
    if "proven_bounds" in stats:
        ends = stats["proven_bounds"]
        end = lambda *at: flattened(jax.tree.map(lambda x: x[at], ends))  # noqa: E731
        # Those of functions without a bracket are estimates, good to a factor of two.
        proves = "bracket" in stats and call.quantity not in WITHOUT_BRACKET
        factor = 1 if proves else 2
        proven = exact | (call.num_steps is not None)
        to_low = factor * jnp.maximum(value.real - end(0, 0), 0) + 8 * end(0, 1)
        to_high = factor * jnp.maximum(end(1, 0) - value.real, 0) + 8 * end(1, 1)
        below = jnp.where(proven, to_low, below)
        above = jnp.where(proven, to_high, above)
    count = stats.get("num_samples", 1)
    if "samples" in stats:
        count = jnp.sum(jnp.isfinite(stats["samples"]))
    return Answers(
        value,
        std_err,
        value - unit * below,
        value + unit * above,
        jnp.asarray(count),
        jnp.asarray(stats["num_matvecs"]),
        solution.result,
        exact,
        stats.get("solve"),
    )


def solve(call, matrix, key, make=None, **settings):
    found = answer(call, call.solve(matrix, key, make, **settings))
    return found._replace(result=found.result == tx.RESULTS.successful)


@eqx.filter_jit
def solve_all(call, matrices, keys, make=None):
    """One after another, for each matrix and its key."""
    one = lambda pair: solve(call, *pair, make)  # noqa: E731
    return jax.lax.map(one, (matrices, keys))
