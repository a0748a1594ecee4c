import functools as ft
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Inexact, Int, PyTree, Real

from ._moments import sampling_quantiles


_nonfinite_msg = """
A matrix-vector product, or the estimate made from it, was not finite (NaN or inf).

Likely causes:

(a) the operator's arrays hold NaN or inf: check them before the call; or

(b) the operator's function overflows or divides by zero for the probe vectors, which
    have entries of size one: try `operator.mv` on a vector of ones; or

(c) the trace itself is too large for the dtype, or the power from which a norm is made
    too large or too small for it: scale the operator or use a wider one.
""".strip()

_not_semidefinite_msg = """
The operator carries a positive (or negative) semidefinite tag, but its compression to
the probe vectors has an eigenvalue of the wrong sign, beyond rounding.

Likely causes:

(a) the tag is wrong: leave it out, and use an estimator that needs none; or

(b) the operator is not Hermitian: a semidefinite operator must be; or

(c) the products are less accurate than their dtype suggests (an inner iterative solve,
    say): tighten their tolerance, or use `traceax.XTraceEstimator`.
""".strip()


_not_positive_definite_msg = """
The function needs a positive definite operator, and a Ritz value (an eigenvalue of the
operator's compression to a Krylov space) was negative, or not to be told from zero in
the operator's precision. `solution.stats["ritz_values"]` has the smallest and the largest
one; with a preconditioner P they are those of `P^(-1/2) A P^(-1/2)`.

Likely causes:

(a) the operator has an eigenvalue that is not positive; if it is tagged semidefinite, the
    tag is wrong. Add a multiple of the identity (`jitter`), or for a log-determinant
    leave the tag out, and `traceax.logdet` takes the absolute value; or

(b) the operator is not Hermitian; or

(c) the products are less accurate than their dtype suggests, or the operator is singular
    in that dtype: use a wider one.
""".strip()

_zero_determinant_msg = """
The determinant is zero, or not to be told from zero in the operator's precision, so its
logarithm is minus infinity or meaningless.

Likely causes:

(a) the operator is singular: a zero on the diagonal of a triangular operator, or a
    singular value of zero, or no larger than the machine epsilon times the largest
    (`solution.stats["ritz_values"]` has the smallest and largest found); or

(b) it is singular in its dtype: use a wider one.
""".strip()

_outside_domain_msg = """
A Ritz value (an eigenvalue of the operator's compression to a Krylov space) was outside
the domain of the function, beyond rounding, or the function was not finite there.
`solution.stats["ritz_values"]` has the smallest and the largest one.

Likely causes:

(a) the operator has eigenvalues where the function is not defined, or not to be told
    from zero where that is a pole: add a multiple of the identity, or take a function
    that is defined there; or

(b) the function overflows: scale the operator or use a wider dtype.
""".strip()


_precision_lost_msg = """
Rounding errors of the products change the value by a large part of the error that is
reported, or by far more than an adaptive budget asks for. A function of an operator is
then too ill conditioned for their precision, and what depends on its smallest eigenvalues
is unknown: its `solution.stats["ritz_values"]` has the smallest and the largest that were
seen.

Likely remedies:

(a) make the products in a wider dtype: float64, or for an operator in bfloat16 or float16
    float32, in which products with such a matrix can be accumulated too; or

(b) on an accelerator ask for products in full precision:
    `jax.default_matmul_precision("highest")`; or

(c) for a log-determinant a preconditioner, whose products are better conditioned; or

(d) add a multiple of the identity (`jitter`), larger than the rounding errors; or

(e) loosen the tolerance of an adaptive budget, or let `max_k` be n and a round or more.
""".strip()

_max_matvecs_reached_msg = """
The budget ended before the error bar was as small as asked.

Likely remedies:

(a) raise `max_k`: the error of most estimators falls as one over the square root of the
    number of samples, and from n and a round on, the exact answer is taken where they are
    not enough. `state=solution.state` keeps what has been spent already (for the exact
    answer, `max_k` then has to be n more than before). `max_k` must have room for
    `min_samples` samples; one of XTrace takes two products; or

(b) use an estimator that fits the operator better (see "Choosing an estimator"), or for
    a log-determinant a preconditioner; or

(c) loosen the tolerance: `throw=False` returns what there is.
""".strip()


class RESULTS(lx.RESULTS):  # pyright: ignore[reportGeneralTypeIssues]
    """How a call ended. The members of `lineax.RESULTS`, and:

    - `nonfinite_product`: a product or the estimate was NaN or infinite.
    - `not_semidefinite`: an operator tagged semidefinite was seen not to be.
    - `not_positive_definite`: for a logarithm or a negative power, a Ritz value was
        negative, or not to be told from zero.
    - `zero_determinant`: the determinant of a structured or a general operator is zero,
        or not to be told from zero.
    - `precision_lost`: for functions of operators, rounding errors of the products are a
        large part of the error that is reported; for diagonals of functions and exact
        answers, they change the second digit. With an adaptive budget
        for a scalar, they alone are far above the tolerance.
    - `max_matvecs_reached`: an adaptive budget ended before the tolerance was met.
    - `max_steps_reached`, of lineax: as many steps as [`traceax.AdaptiveSteps`][] allows
        were too few for the tolerance; or a linear solve did not converge.
    - `outside_domain`: for another function, a Ritz value was outside of its domain, or
        not to be told from a pole at zero.

    `RESULTS[solution.result]` is the message, empty for a success. `print` shows no name:
    compare with a member, `solution.result == RESULTS.successful`.

    !!! Example

        ```python
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        operator = lx.MatrixLinearOperator(jnp.full((3, 3), jnp.nan))
        solution = tx.trace(operator, k=3, throw=False)
        print(solution.result == tx.RESULTS.nonfinite_product)  # True
        print(tx.RESULTS[solution.result])
        ```
    """

    nonfinite_product = _nonfinite_msg
    not_semidefinite = _not_semidefinite_msg
    not_positive_definite = _not_positive_definite_msg
    outside_domain = _outside_domain_msg
    zero_determinant = _zero_determinant_msg
    precision_lost = _precision_lost_msg
    max_matvecs_reached = _max_matvecs_reached_msg


def first_failure(*results: Any) -> Any:
    """The first that is neither None nor successful, if any is not None."""
    first, *others = [result for result in results if result is not None] or [None]
    for other in others:
        first = RESULTS.where(first == RESULTS.successful, other, first)
    return first


def failure(failed: Bool[Array, ""] | bool, how: Any) -> Any:
    """The result of a test.

    **Arguments:**

    - `failed`: a boolean of shape `()`, which may be traced.
    - `how`: the member of [`traceax.RESULTS`][] for a test that failed.

    **Returns:**

    `how` where `failed` is true, else `RESULTS.successful`.
    """
    successful: Any = RESULTS.successful
    return RESULTS.where(jnp.asarray(failed), how, successful)


class Estimate(eqx.Module):
    """What an estimator returns: the estimate, its standard error, and how it was made.

    - `value`: the estimate, real or complex, of the shape that the quantity reads, for a
        trace `()`. The only field that carries derivatives.
    - `std_err`: its standard error, of the same shape, real.
    - `samples`: the per-sample estimates, shape `(m,)`, of which `value` is the mean, if
        that is a scalar; else None.
    - `num_matvecs`: products with the operator, an integer, which may be traced.
    - `rounding`: relative size of rounding errors in `value`, a Python number; 0 for
        exact answers.
    - `magnitude`: what they are relative to, if it is larger than `value`: of its shape,
        or of shape `()`.
    - `unresolved`: about how far else rounding may have moved `value`, of its shape;
        `bounds` count it already.
    - `result`: a `RESULTS` member, or None for `RESULTS.successful`.
    - `extra`: further entries for `Solution.stats`.
    - `state`: of the loop, if there is one.
    - `num_samples`: how many samples there are, needed where `samples` is None.
    - `skewness`: theirs, of the shape of `value`, if `samples` is None; None if 0.
    - `probes`: a function that makes the probes, shape `(n, p)`, from whose products the
        derivative of `value` is made; the mean of their outer products is the identity.
    - `bounds`: bounds of what `value` would be without quadrature error and rounding,
        for the same samples, shape `(2, 2)`, or `(2, 2, ...)` where `value` is no scalar:
        the lower one with its standard error, and the upper one with its own; None if
        there are no such errors, beside `rounding`.
    """

    value: Inexact[Array, "*q"]
    std_err: Real[Array, "*q"]
    samples: Inexact[Array, " m"] | None
    num_matvecs: Int[Array, ""] | int
    rounding: float = eqx.field(static=True)
    magnitude: Real[Array, "*q"] | Real[Array, ""] | float = 0.0
    unresolved: Real[Array, "*q"] | float = 0.0
    result: Any = None
    extra: dict[str, Array] = eqx.field(default_factory=dict)
    state: PyTree[Array] = None
    num_samples: Real[Array, ""] | int = 1
    skewness: Real[Array, "*q"] | None = None
    probes: Callable[[], Inexact[Array, "n p"]] | None = None
    bounds: Real[Array, "2 2 *q"] | None = None


class Solution(eqx.Module):
    """The answer of [`traceax.trace`][], [`traceax.diagonal`][], [`traceax.logdet`][] and
    the others.

    !!! Example

        ```python
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        operator = lx.DiagonalLinearOperator(jnp.array([1.0, 2.0, 3.0]))
        solution = tx.trace(operator, k=3)
        print(solution.value, solution.std_err)  # 6.0 0.0
        print(solution.result == tx.RESULTS.successful)  # True
        print(solution.stats["num_matvecs"])  # 0
        ```

    **Attributes:**

    - `value`: the estimate, a scalar or, for a quantity with entries, a PyTree, of the
        operator's dtype (float32 for operators in bfloat16 or float16); real for norms,
        log-determinants and traces of functions of Hermitian operators.
    - `std_err`: the standard error of `value`, real, of its structure and in its units.
        `inf` where one sample leaves it unknown; 0 where the value is exact, but for
        `trace_difference` and `gaussian_log_prob`, which count rounding then too.
    - `result`: a [`traceax.RESULTS`][] member; `RESULTS[result]` is its message.
    - `stats`: a dictionary. `"num_matvecs"` is the number of products with the
        operator. `"samples"` are the per-sample estimates, shape `(m,)`. Their mean is
        `value`; for norms it is a power of `value`, and for `log_trace_exp` `value` is
        the logarithm of the mean of their exponentials. Where `value` is not a scalar,
        there is their number m instead, `"num_samples"`, and where they are skewed
        `"skewness"`, of the structure of `value`. `"std.err"` is the standard
        error again, under the name that traceax 1.0 gave it. Functions of operators (but
        for log-determinants that are known from the structure) have `"bounds"`, shape
        `(2, 2)`, for diagonals `(2, 2, ...)` in each leaf: a lower bound of what `value`
        would be without quadrature error and rounding, for the same probes, with its
        standard error; and an upper bound with its own. Estimators may add entries, which
        their documentation describes.
    - `state`: with an adaptive budget, what a further call goes on from; `None` for a
        fixed one.

    Only `value` carries derivatives; those of the other fields are zero.
    """

    value: PyTree[Inexact[Array, "..."]]
    std_err: PyTree[Real[Array, "..."]]
    result: RESULTS
    stats: dict[str, Any]
    state: PyTree[Any]
    estimated: ClassVar[tuple[str, ...]] = ("value",)

    def interval(
        self, confidence: Any = 0.95
    ) -> tuple[PyTree[Inexact[Array, "..."]], PyTree[Inexact[Array, "..."]]]:
        """A confidence interval, which counts the errors of sampling, of quadrature and
        of rounding.

        The sampling error is the standard error times a quantile of Student's t, above
        95% widened for skewed samples. For functions of operators, log-determinants and
        Schatten norms it is added at both ends of `stats["bounds"]`, each with its own
        standard error. Where a call failed (see `result`), the interval means nothing.

        !!! Example

            ```python
            import jax
            import jax.numpy as jnp
            import lineax as lx
            import traceax as tx

            matrix = jnp.diag(jnp.linspace(1.0, 100.0, 300))
            operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
            solution = tx.logdet(operator, k=20, num_steps=20, key=jax.random.key(0))
            low, high = solution.interval()
            print(low, "to", high)
            ```

        **Arguments:**

        - `confidence`: the probability with which the truth is to be inside, between 0
            and 1; a number or a scalar array, which may be traced.

        **Returns:**

        Lower and upper end, each of the structure of `value`. Entries of a diagonal have
        an interval each, and so have the real and the imaginary part of a complex value.

        **Raises:**

        `TypeError` for a `confidence` that is no number, `ValueError` for one that is not
        between 0 and 1, or an `equinox` run-time error where it is traced. `ValueError`
        for a batch of solutions.
        """
        names = ("bounds", "samples", "num_samples", "skewness")
        known = {name: self.stats[name] for name in names if name in self.stats}
        dimensions = {"num_matvecs": 0, "num_samples": 0, "samples": 1}
        shapes = {name: jnp.shape(self.stats.get(name, 0)) for name in dimensions}
        if any(len(shapes[name]) > least for name, least in dimensions.items()):
            raise ValueError(
                "This is a batch of solutions. Take one at a time: `jax.vmap(lambda "
                "solution: solution.interval())(solutions)`."
            )
        answer = jax.lax.stop_gradient((self.value, self.std_err, known))
        return _interval(*answer, _checked(confidence))

    @property
    def details(self) -> str:
        """What the numbers of a failed call say, beside the message of its result."""
        if self.result == RESULTS.max_matvecs_reached:
            reached = ""
            if eqx.is_array(self.value) and self.value.ndim == 0:
                reached = f"{self.value} with a standard error of {self.std_err} after "
            return f"Reached {reached}{self.stats['num_matvecs']} products."
        if "ritz_values" in self.stats:
            smallest, largest = self.stats["ritz_values"]
            return f"Found Ritz values from {smallest} to {largest}."
        return ""


def _checked(confidence: Any) -> Array:
    fix = "Pass, for example, 0.95."
    if isinstance(confidence, Tracer):
        inside = (confidence > 0) & (confidence < 1)
        return eqx.error_if(confidence, ~inside, "`confidence` must be between 0 and 1.")
    if not eqx.is_array_like(confidence) or isinstance(confidence, bool | complex):
        raise TypeError(
            f"`confidence` must be a number between 0 and 1. Found {confidence!r} of "
            f"type {type(confidence).__name__}. {fix}"
        )
    rounded = np.asarray(confidence, jax.dtypes.canonicalize_dtype(float))
    if rounded.ndim != 0 or not 0 < rounded < 1:
        raise ValueError(
            f"`confidence` must be between 0 and 1. Found {confidence!r}, as {rounded}. "
            f"{fix}"
        )
    return jax.device_put(rounded)


@eqx.filter_jit
def _interval(
    value: PyTree[Array], std_err: PyTree[Array], known: dict[str, Any], confidence: Array
) -> tuple[PyTree[Array], PyTree[Array]]:
    quantiles = sampling_quantiles(confidence, value, known)

    def end(side, value, std_err, quantile, bounds=None):
        beyond = 0
        if bounds is not None:
            bound, std_err = bounds[0] if side < 0 else bounds[1]
            beyond = jnp.maximum(side * (bound - value.real), 0)
        half = side * (beyond + quantile.astype(std_err.dtype) * std_err)
        return value + (jax.lax.complex(half, half) if jnp.iscomplexobj(value) else half)

    bounds = [known["bounds"]] if "bounds" in known else []
    leaves = [value, std_err, quantiles, *bounds]
    low, high = (jax.tree.map(ft.partial(end, side), *leaves) for side in (-1, 1))
    return low, high
