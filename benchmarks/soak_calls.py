"""Every public call of traceax as a random job for the [soak](soak.py)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import scipy.sparse as sp
from soak_operators import Draw, is_complex, random_subject, Subject

import traceax as tx


SQUARE = "psd", "hermitian", "general"
REAL = np.float32, np.float64
MODES = "plain", "jit", "vmap", "grad"


class Found(NamedTuple):
    """An answer, flat. The truth may be lower by `below` or higher by `above`, beside the
    error bars. `freedom` is the number of samples less one, `result` of `RESULTS`."""

    value: Any
    std_err: Any
    below: Any
    above: Any
    freedom: Any
    result: Any
    exact: Any


class Job(NamedTuple):
    """`call(operator, key=key, **options)` gives a `Found`, or a solution. `exact` takes
    the matrix, and gives the flat truth; `terms` the size of what it sums, if these may
    cancel. Values that are `linear` in the operator depend on no eigenvalues."""

    subject: Subject
    call: Callable[..., Any]
    options: dict[str, Any]
    exact: Callable[[np.ndarray], Any]
    terms: Callable[[np.ndarray], Any] = np.linalg.norm
    linear: bool = False
    modes: tuple[str, ...] = MODES


def flat(tree: Any) -> jax.Array:
    return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def found_of(answer: Any, fixed_steps: bool) -> Found:
    """`Found` of what a call returns. Where the number of steps is fixed, the quadrature
    error is in the proven bounds, and not in the standard error. For functions without a
    bracket these are estimates: twice the error is allowed for."""
    if isinstance(answer, Found):
        return answer
    solution = answer[-1] if isinstance(answer, tuple) else answer
    value, std_err, stats = flat(solution.value), flat(solution.std_err), solution.stats
    below = above = jnp.zeros_like(std_err)
    if fixed_steps and "proven_bounds" in stats:
        bounds = stats["proven_bounds"]
        at = lambda *index: flat(jax.tree.map(lambda x: x[index], bounds))  # noqa: E731
        below = 2 * jnp.maximum(value.real - at(0, 0), 0)
        above = 2 * jnp.maximum(at(1, 0) - value.real, 0)
        std_err = jnp.maximum(std_err, jnp.maximum(at(0, 1), at(1, 1)))
    return Found(
        value,
        std_err,
        below,
        above,
        jnp.asarray(stats.get("freedom", stats.get("num_samples", np.inf) - 1)),
        solution.result,
        jnp.asarray(stats.get("exact", False)),
    )


def found_alone(value: Any, std_err: Any, result: Any, freedom: float = np.inf) -> Found:
    """`Found` of a value without quadrature error."""
    zero = jnp.zeros_like(std_err)
    exact = jnp.asarray(False)
    return Found(value, std_err, zero, zero, jnp.asarray(freedom), result, exact)


# --- options ---


def sampler(draw: Draw, subject: Subject) -> tx.AbstractSampler:
    samplers = [tx.RademacherSampler(), tx.NormalSampler(), tx.SphereSampler()]
    if is_complex(subject.dtype):
        samplers.append(tx.SteinhausSampler())
    return draw.one_of(*samplers)


def coloured(draw: Draw, subject: Subject) -> tx.AbstractSampler:
    n = subject.matrix.shape[1]
    if not subject.on_vectors:
        return tx.RademacherSampler()
    path = sp.diags_array([np.ones(n - 1)] * 2, offsets=[-1, 1], shape=(n, n))
    colours = draw.one_of(
        tx.grid_colours((n,), min(n, 4)), tx.graph_colours(path, 2).astype(int)
    )
    return tx.ColouredSampler(colours)


def budget(draw: Draw, n: int) -> dict[str, Any]:
    """Several fixed budgets, adaptive ones, and the default."""
    k = draw.one_of(
        None, 2, 5, 10, 20, 30, n, n + 3, tx.Adaptive(rtol=0.1, max_k=60), tx.Adaptive()
    )
    return {} if k is None else {"k": k}


def steps(draw: Draw) -> dict[str, Any]:
    num_steps = draw.one_of(None, None, 1, 4, 12, 40, tx.AdaptiveSteps(max_steps=40))
    return {} if num_steps is None else {"num_steps": num_steps}


def slq(draw: Draw, subject: Subject) -> tx.SLQEstimator:
    return tx.SLQEstimator(sampler(draw, subject))


# --- traces, diagonals and norms ---


def selected(operator, **options):
    estimator = tx.select_trace_estimator(operator, options["k"])
    return tx.trace(operator, estimator, **options)


def trace(draw: Draw) -> Job:
    subject = random_subject(draw, SQUARE)
    n, probes = len(subject.matrix), sampler(draw, subject)
    options = budget(draw, n)
    if isinstance(options.get("k"), int) and draw.one_of(True, False, False):
        return Job(subject, selected, options, np.trace, linear=True)
    # Others cannot be drawn again in the complement of a sketch.
    invariant = isinstance(probes, tx.NormalSampler | tx.SphereSampler)
    estimators = [
        tx.AutoTraceEstimator(),
        tx.HutchinsonEstimator(probes),
        tx.HutchinsonEstimator(coloured(draw, subject)),
        tx.HutchPlusPlusEstimator(probes),
        tx.XTraceEstimator(probes, improved=invariant),
        tx.ExactTraceEstimator(),
    ]
    if subject.kind == "psd":
        estimators += [
            tx.XNysTraceEstimator(probes, improved=invariant),
            tx.XNysTraceEstimator(probes, improved=False),
            tx.NystromPlusPlusEstimator(probes),
        ]
    options["estimator"] = draw.one_of(*estimators)
    return Job(subject, tx.trace, options, np.trace, linear=True)


def controlled_trace(draw: Draw) -> Job:
    """With the operator plus a multiple of the identity for a control."""
    subject = random_subject(draw, ("general",), (np.float32, np.float64))

    def call(operator, **options):
        identity = lx.IdentityLinearOperator(operator.in_structure())
        known = jnp.trace(jnp.asarray(subject.matrix)) + len(subject.matrix)
        known = known.astype(subject.dtype)
        return tx.trace(operator, control=(operator + identity, known), **options)

    options = budget(draw, len(subject.matrix))
    modes = "plain", "jit", "vmap"
    return Job(subject, call, options, np.trace, linear=True, modes=modes)


def diagonal(draw: Draw) -> Job:
    subject = random_subject(draw, SQUARE)
    probes = sampler(draw, subject)
    estimators = [
        tx.AutoDiagonalEstimator(),
        tx.HutchinsonEstimator(probes),
        tx.HutchinsonEstimator(coloured(draw, subject)),
        tx.DiagPlusPlusEstimator(probes),
        tx.XDiagEstimator(probes),
    ]
    if subject.kind == "psd":
        estimators.append(tx.XNysDiagEstimator(probes))
    options = budget(draw, len(subject.matrix)) | {"estimator": draw.one_of(*estimators)}
    return Job(subject, tx.diagonal, options, np.diag, linear=True)


def leaf_traces(draw: Draw) -> Job:
    subject = random_subject(draw, SQUARE)

    def exact(matrix):
        parts = np.split(np.diag(matrix), np.cumsum(subject.sizes)[:-1])
        return np.array([np.sum(part) for part in parts])

    options = budget(draw, len(subject.matrix))
    return Job(subject, tx.leaf_traces, options, exact, linear=True)


def estimate(draw: Draw) -> Job:
    """A trace, a diagonal, and the trace of the product with the operator itself."""
    subject = random_subject(draw, SQUARE)

    def call(operator, **options):
        product = tx.TraceOfProduct(subject.make(subject.parts))
        quantities = [tx.Trace(), tx.Diagonal(), product]
        return tx.estimate(operator, quantities, **options)

    def exact(matrix):
        product = np.trace(subject.matrix @ matrix)
        return np.array([np.trace(matrix), *np.diag(matrix), product])

    def terms(matrix):
        size = np.linalg.norm(matrix)
        return np.array([size] * (len(matrix) + 1) + [size * size])

    options = budget(draw, len(subject.matrix))
    return Job(subject, call, options, exact, terms, linear=True)


def frobenius_norm(draw: Draw) -> Job:
    subject = random_subject(draw, (*SQUARE, "rectangular"))
    options = budget(draw, min(subject.matrix.shape))
    if draw.one_of(True, False):
        options["estimator"] = draw.one_of(tx.XNysTraceEstimator(), tx.XTraceEstimator())
    return Job(subject, tx.frobenius_norm, options, np.linalg.norm, linear=True)


def row_norms(draw: Draw) -> Job:
    subject = random_subject(draw, (*SQUARE, "rectangular"))
    options = budget(draw, min(subject.matrix.shape))
    exact = lambda matrix: np.linalg.norm(matrix, axis=1)  # noqa: E731
    # The derivative of the norm of a row of zeros does not exist.
    modes = "plain", "jit", "vmap"
    return Job(subject, tx.row_norms, options, exact, linear=True, modes=modes)


def frobenius_products(draw: Draw) -> Job:
    subject = random_subject(draw, SQUARE)

    def call(operator, **options):
        return tx.frobenius_products([operator, operator + operator], **options)

    def exact(matrix):
        return np.linalg.norm(matrix) ** 2 * np.array([1, 2, 2, 4])

    terms = lambda matrix: np.linalg.norm(matrix) ** 2  # noqa: E731
    options = budget(draw, len(subject.matrix))
    return Job(subject, call, options, exact, terms, linear=True)


def minibatch_trace(draw: Draw) -> Job:
    """For linear models of normal data, where the trace for all data is known."""
    n, dtype = draw.one_of(1, 2, 12, 40), draw.one_of(*REAL)
    x = draw.normal(64, n).astype(dtype)
    batches = [x[i : i + 8] for i in range(0, 64, 8)]
    point = jnp.zeros(n, dtype)
    model = lambda w, x: x @ w  # noqa: E731
    half = lambda f, _: jnp.mean(f**2) / 2  # noqa: E731
    make = draw.one_of(
        lambda point: tx.ggn(model, half, point, batches),
        lambda point: tx.hessian(lambda w, x: half(x @ w, x), point, batches),
        lambda point: tx.fisher(
            model,
            point,
            batches,
            likelihood=tx.GaussianLikelihood(),
            key=jr.key(draw.one_of(*range(1000))),
        ),
    )
    subject = Subject("batches", "psd", dtype, np.eye(n), point, make, (n,))
    options = {"k": draw.one_of(2, 10, n + 2)}
    modes = "plain", "jit", "vmap"
    return Job(subject, tx.minibatch_trace, options, np.trace, linear=True, modes=modes)


def dynamic_trace(draw: Draw) -> Job:
    """Three updates, the last one to the operator itself."""
    subject = random_subject(draw, SQUARE)

    def call(operator, *, key, throw, execution, **options):
        dynamic = tx.DynamicTrace(
            lambda size: size * operator, sampler=probes, execution=execution
        )
        sizes = [jnp.asarray(x, real_dtype(subject)) for x in (0.7, 0.8, 0.9, 1)]
        solution = dynamic.init(sizes[0], key=key, throw=throw, **options)
        for size in sizes[1:]:
            solution = dynamic.update(solution.state, size, throw=throw)
        return solution

    probes, options = sampler(draw, subject), budget(draw, len(subject.matrix))
    modes = "plain", "jit", "vmap"
    return Job(subject, call, options, np.trace, linear=True, modes=modes)


def real_dtype(subject: Subject) -> Any:
    return np.zeros(0, subject.dtype).real.dtype


# --- derivatives of functions ---


def point_of(operator):
    """A point of the structure of the operator's vectors."""
    return jax.tree.map(
        lambda leaf: jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape),
        operator.in_structure(),
    )


def cosines(subject: Subject) -> np.ndarray:
    """The same, flat, in double precision of the rounded numbers."""
    parts = [np.cos(np.arange(size)) for size in subject.sizes]
    return np.concatenate(parts).astype(subject.dtype).astype(float)


def divergence(draw: Draw) -> Job:
    subject = random_subject(draw, SQUARE, REAL)

    def call(operator, **options):
        field = lambda x: operator.mv(jax.tree.map(jnp.sin, x))  # noqa: E731
        return tx.divergence(field, point_of(operator), **options)

    def exact(matrix):
        return np.sum(np.diag(matrix) * np.cos(cosines(subject)))

    options = budget(draw, len(subject.matrix))
    return Job(subject, call, options, exact, linear=True)


def laplacian(draw: Draw) -> Job:
    """Of x* A sin(x), whose Hessian is A C + C A* - diag(s * (A* x))."""
    subject = random_subject(draw, SQUARE, REAL)

    def call(operator, **options):
        def fn(x):
            image = operator.mv(jax.tree.map(jnp.sin, x))
            return jnp.sum(flat(x) * flat(image))

        return tx.laplacian(fn, point_of(operator), **options)

    def exact(matrix):
        x = cosines(subject)
        return np.sum(2 * np.diag(matrix) * np.cos(x) - np.sin(x) * (x @ matrix))

    terms = lambda matrix: len(matrix) * np.linalg.norm(matrix)  # noqa: E731
    options = budget(draw, len(subject.matrix))
    return Job(subject, call, options, exact, terms, linear=True)
