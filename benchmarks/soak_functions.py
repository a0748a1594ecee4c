"""Functions of operators and eigenvalues as random jobs for the [soak](soak.py)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
from soak_calls import (
    budget,
    flat,
    Found,
    found_alone,
    found_of,
    Job,
    MODES,
    point_of,
    REAL,
    real_dtype,
    slq,
    SQUARE,
    steps,
)
from soak_operators import Draw, random_subject, Subject, tags_of

import traceax as tx


HERMITIAN = "psd", "hermitian"
# Their derivatives are NaN where values cannot be told apart.
WITHOUT_GRADIENT = "plain", "jit", "vmap"


class Function(NamedTuple):
    """For traceax, and for NumPy arrays of eigenvalues."""

    jax: Any
    numpy: Callable[[np.ndarray], np.ndarray]

    def terms(self, matrix: np.ndarray) -> np.ndarray:
        """The values at the eigenvalues."""
        is_hermitian = np.array_equal(matrix, matrix.conj().T)
        eigenvalues = (np.linalg.eigvalsh if is_hermitian else np.linalg.eigvals)(matrix)
        return self.numpy(eigenvalues)

    def trace(self, matrix: np.ndarray) -> Any:
        value = np.sum(self.terms(matrix))
        return value if np.iscomplexobj(matrix) else value.real

    def size(self, matrix: np.ndarray) -> float:
        return np.sum(np.abs(self.terms(matrix)))

    def of(self, matrix: np.ndarray) -> np.ndarray:
        """The function of a Hermitian matrix."""
        eigenvalues, vectors = np.linalg.eigh(matrix)
        return (vectors * self.numpy(eigenvalues)) @ vectors.conj().T


def size_of(subject: Subject) -> float:
    return float(np.linalg.norm(subject.matrix, 2)) or 1.0


def function(draw: Draw, subject: Subject) -> Function:
    size = size_of(subject)
    functions = [
        Function(tx.Exp(-1 / size), lambda x: np.exp(-x / size)),
        Function(tx.Power(3), lambda x: x**3),
    ]
    if subject.kind != "general":
        functions.append(
            Function(lambda x: jnp.tanh(x / size), lambda x: np.tanh(x / size))
        )
    if subject.kind == "psd":
        functions += [
            Function(tx.Log(), np.log),
            Function(tx.Inverse(), lambda x: 1 / x),
            Function(tx.Inverse(size), lambda x: 1 / (x + size)),
            Function(tx.Power(0.5), lambda x: np.sqrt(np.maximum(x, 0))),
            Function(tx.Entropy(), lambda x: -x * np.log(np.maximum(x, 1e-300))),
        ]
    return draw.one_of(*functions)


def trace_of_function(draw: Draw) -> Job:
    subject = random_subject(draw, SQUARE)
    f = function(draw, subject)
    options = {"function": f.jax} | budget(draw, len(subject.matrix)) | steps(draw)
    estimator = slq(draw, subject)
    options["estimator"] = draw.one_of(estimator, estimator, tx.KrylovAwareEstimator())
    if draw.one_of(True, False, False):
        options["num_steps"] = tx.RandomSteps(draw.one_of(2, 8), max_steps=40)
    return Job(subject, tx.trace_of_function, options, f.trace, f.size)


def logarithm(matrix: np.ndarray) -> Any:
    return np.linalg.slogdet(matrix)[1]


def logarithms(matrix: np.ndarray) -> Any:
    """The size of the terms of a log-determinant."""
    return np.sum(np.abs(np.log(np.linalg.svd(matrix)[1])))


def logdet(draw: Draw) -> Job:
    subject = random_subject(draw, SQUARE)
    options = budget(draw, len(subject.matrix)) | steps(draw)
    options["estimator"] = slq(draw, subject)
    preconditioners = [tx.AutoPreconditioner(), None] if subject.kind == "psd" else [None]
    if draw.one_of(True, False):
        options["preconditioner"] = draw.one_of(*preconditioners)
    if subject.kind == "psd" and draw.one_of(True, False):
        options["gradient"] = tx.SolveGradient(lx.CG(rtol=1e-4, atol=1e-4))
    return Job(subject, tx.logdet, options, logarithm, logarithms)


def preconditioned_logdet(draw: Draw) -> Job:
    subject = random_subject(draw, ("psd",))
    kind, rank = draw.one_of("nystrom", "cholesky", "jacobi"), draw.one_of(1, 3, 10)
    shift = draw.one_of(None, 1e-3 * size_of(subject))

    def call(operator, *, key, throw, **options):
        if kind == "cholesky":
            settings = {"shift": shift, "throw": throw}
            made = tx.pivoted_cholesky_preconditioner(operator, rank, **settings)
        elif kind == "nystrom":
            settings = {"key": jr.fold_in(key, 1), "shift": shift, "throw": throw}
            made = tx.nystrom_preconditioner(operator, rank, **settings)
        else:
            made = tx.jacobi_preconditioner(operator, k=10, key=key, throw=throw)
        return tx.logdet(operator, preconditioner=made, key=key, throw=throw, **options)

    options = budget(draw, len(subject.matrix)) | steps(draw)
    return Job(subject, call, options, logarithm, logarithms)


def gaussian_log_prob(draw: Draw) -> Job:
    subject = random_subject(draw, ("psd",), REAL)

    def call(operator, **options):
        r = point_of(operator)
        solution = tx.gaussian_log_prob(operator, r, **options)
        found = found_of(solution, isinstance(options.get("num_steps"), int))
        # What the solve leaves makes the value too large, and is in no error bar.
        left = solution.stats["solve_residual"] ** 2 * jnp.sum(flat(r) ** 2)
        least = max(np.linalg.eigvalsh(subject.matrix)[0], 1e-300)
        return found._replace(below=found.below + left / least)

    def parts(matrix):
        r = [np.cos(np.arange(size)) for size in subject.sizes]
        r = np.concatenate(r).astype(subject.dtype).astype(float)
        form = r @ np.linalg.lstsq(matrix, r)[0]
        return -0.5 * np.array([form, logarithm(matrix), len(r) * np.log(2 * np.pi)])

    exact = lambda matrix: np.sum(parts(matrix))  # noqa: E731
    terms = lambda matrix: np.sum(np.abs(parts(matrix)))  # noqa: E731
    options = budget(draw, len(subject.matrix)) | steps(draw)
    return Job(subject, call, options, exact, terms)


def trace_difference(draw: Draw) -> Job:
    """From the operator plus a tenth of its norm."""
    subject = random_subject(draw, SQUARE)
    f, shift = function(draw, subject), 0.1 * size_of(subject)

    def call(operator, **options):
        multiple = jnp.asarray(shift, real_dtype(subject))
        other = operator + multiple * lx.IdentityLinearOperator(operator.in_structure())
        other = tx.as_operator(other, tags=tags_of(subject.kind, subject.dtype))
        return tx.trace_difference(operator, other, **options)

    def moved(matrix):
        return matrix + shift * np.eye(len(matrix))

    exact = lambda matrix: f.trace(matrix) - f.trace(moved(matrix))  # noqa: E731
    terms = lambda matrix: f.size(matrix) + f.size(moved(matrix))  # noqa: E731
    options = {"function": f.jax} | budget(draw, len(subject.matrix)) | steps(draw)
    return Job(subject, call, options, exact, terms)


def trace_of_solves(draw: Draw) -> Job:
    subject = random_subject(draw, ("psd",))

    def call(operator, **options):
        return tx.trace_of_solves(operator, [(), (operator,)], **options)

    # The second trace is n.
    exact = lambda matrix: np.array([np.trace(np.linalg.inv(matrix)), len(matrix)])  # noqa: E731
    options = budget(draw, len(subject.matrix))
    return Job(subject, call, options, exact, exact)


def schatten_norm(draw: Draw) -> Job:
    subject = random_subject(draw, (*SQUARE, "rectangular"))
    p = draw.one_of(0.5, 1, 2, 3.5)

    def exact(matrix):
        values = np.linalg.svd(matrix)[1]
        return values[0] * np.sum((values / values[0]) ** p) ** (1 / p)

    options = {"p": p} | budget(draw, min(subject.matrix.shape)) | steps(draw)
    options["estimator"] = slq(draw, subject)
    return Job(subject, tx.schatten_norm, options, exact, exact, modes=WITHOUT_GRADIENT)


def log_trace_exp(draw: Draw) -> Job:
    subject = random_subject(draw, HERMITIAN)
    scale = draw.one_of(-1, 1, 30) / size_of(subject)

    def exact(matrix):
        exponents = scale * np.linalg.eigvalsh(matrix)
        return np.max(exponents) + np.log(np.sum(np.exp(exponents - np.max(exponents))))

    def terms(matrix):
        return abs(scale) * np.linalg.norm(matrix) + np.log(len(matrix)) + 1

    options = {"scale": scale} | budget(draw, len(subject.matrix)) | steps(draw)
    return Job(subject, tx.log_trace_exp, options, exact, terms)


def diagonal_of_function(draw: Draw) -> Job:
    subject = random_subject(draw, HERMITIAN)
    f = function(draw, subject)
    exact = lambda matrix: np.diag(f.of(matrix))  # noqa: E731
    options = {"function": f.jax} | budget(draw, len(subject.matrix)) | steps(draw)
    terms = lambda matrix: np.max(np.abs(f.terms(matrix)))  # noqa: E731
    return Job(subject, tx.diagonal_of_function, options, exact, terms)


def diagonal_of_product(draw: Draw) -> Job:
    """With a matrix of five rows, or the operator itself on both sides."""
    subject = random_subject(draw, HERMITIAN)
    f, factor = function(draw, subject), None
    if subject.on_vectors:
        factor = draw.normal(5, len(subject.matrix), dtype=subject.dtype)
        factor = factor.astype(subject.dtype)

    def call(operator, **options):
        x = operator if factor is None else lx.MatrixLinearOperator(jnp.asarray(factor))
        return tx.diagonal_of_product(x, operator, **options)

    x = subject.matrix if factor is None else factor.astype(subject.matrix.dtype)
    exact = lambda matrix: np.diag(x @ f.of(matrix) @ x.conj().T).real  # noqa: E731
    rows = np.linalg.norm(x, axis=1) ** 2
    terms = lambda matrix: rows * np.max(np.abs(f.terms(matrix)))  # noqa: E731
    options = {"function": f.jax} | budget(draw, len(subject.matrix)) | steps(draw)
    modes = MODES if factor is not None else WITHOUT_GRADIENT
    return Job(subject, call, options, exact, terms, modes=modes)


def function_of(draw: Draw) -> Job:
    """One product. It is NaN where the steps are too few, as documented."""
    subject = random_subject(draw, HERMITIAN)
    f = function(draw, subject)
    vector = point_of(subject.make(subject.parts))

    def call(operator, *, key, throw, execution, function):
        value = flat(tx.function_of(operator, function).mv(vector))
        bar = jnp.full(value.shape, 1e-5 * jnp.linalg.norm(value))
        finite = jnp.all(jnp.isfinite(value))
        result = tx.RESULTS.where(
            finite, tx.RESULTS.successful, tx.RESULTS.nonfinite_product
        )
        return found_alone(value, bar, result)

    v = np.asarray(flat(vector)).astype(subject.matrix.dtype)
    terms = lambda matrix: np.linalg.norm(v) * np.max(np.abs(f.terms(matrix)))  # noqa: E731
    exact = lambda matrix: f.of(matrix) @ v  # noqa: E731
    return Job(subject, call, {"function": f.jax}, exact, terms)


# --- spectra ---


def eigsh(draw: Draw) -> Job:
    subject = random_subject(draw, HERMITIAN)
    n = len(subject.matrix)
    num, which = draw.one_of(1, 2, 5), draw.one_of("largest", "smallest", "both")

    def exact(matrix):
        values = np.linalg.eigvalsh(matrix)
        low = {"largest": 0, "smallest": num, "both": num // 2}[which]
        return np.concatenate([values[:low], values[n - (num - low) :]])

    options = {"num": num, "which": which, "rtol": draw.one_of(1e-4, 1e-2)}
    call = lambda operator, **options: pairs(tx.eigsh(operator, **options))  # noqa: E731
    return Job(subject, call, options, exact, modes=WITHOUT_GRADIENT)


def svds(draw: Draw) -> Job:
    subject = random_subject(draw, (*SQUARE, "rectangular"))
    num = draw.one_of(1, 2, 5)
    exact = lambda matrix: np.linalg.svd(matrix)[1][:num][::-1]  # noqa: E731
    call = lambda operator, **options: pairs(tx.svds(operator, **options))  # noqa: E731
    return Job(subject, call, {"num": num}, exact, modes=WITHOUT_GRADIENT)


def pairs(extremes: Any) -> Found:
    """The values in order; half the width of an interval is their error bar."""
    low, high = extremes.interval()
    order = jnp.argsort(extremes.values)
    value, bar = extremes.values[order], ((high - low) / 2)[order]
    return found_alone(value, bar, extremes.result)


def spectral_density(draw: Draw) -> Job:
    """The mean eigenvalue."""
    subject = random_subject(draw, HERMITIAN)

    def call(operator, **options):
        density = tx.spectral_density(operator, **options)
        # In double precision, where squares of tiny numbers do not vanish.
        nodes, weights = (x.astype(float) for x in (density.nodes, density.weights))
        means = jnp.sum(nodes * weights, axis=1) / jnp.sum(weights, axis=1)
        bar = jnp.std(means, ddof=1) / len(means) ** 0.5
        return found_alone(
            jnp.mean(means)[None], bar[None], density.result, len(means) - 1
        )

    mean = lambda matrix: np.trace(matrix).real / len(matrix)  # noqa: E731
    options = {"k": draw.one_of(10, 30)} | steps(draw)
    return Job(subject, call, options, mean, linear=True, modes=WITHOUT_GRADIENT)


def check_operator(draw: Draw) -> Job:
    """The number of problems that it reports of a sound operator."""
    subject = random_subject(draw, (*SQUARE, "rectangular"))

    def call(operator, *, key, throw, execution):
        report = tx.check_operator(operator, key=key)
        value = jnp.asarray([float(len(report.problems))])
        return found_alone(value, jnp.zeros(1), tx.RESULTS.successful)

    none = lambda matrix: np.zeros(1)  # noqa: E731
    return Job(subject, call, {}, none, none, linear=True, modes=("plain",))
