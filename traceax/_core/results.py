"""How calls end: the results, whose values are the messages that users read."""

from typing import Any

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Bool


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
Rounding errors of the products, or an operator that is not Hermitian as its tag says,
change the value by a large part of the error that is reported, or by far more than an
adaptive budget asks for. A function of an operator is then too ill conditioned for their
precision, and what depends on its smallest eigenvalues is unknown: its
`solution.stats["ritz_values"]` has the smallest and the largest that were seen.

Likely remedies:

(a) if the operator is not Hermitian, leave out the tag that says so, also a semidefinite
    one; or

(b) make the products in a wider dtype: float64, or for an operator in bfloat16 or float16
    float32, in which products with such a matrix can be accumulated too; or

(c) on an accelerator ask for products in full precision:
    `jax.default_matmul_precision("highest")`; or

(d) for a log-determinant a preconditioner, whose products are better conditioned; or

(e) add a multiple of the identity (`jitter`), larger than the rounding errors; or

(f) loosen the tolerance of an adaptive budget, or let `max_k` be n and a round or more.
""".strip()

_too_few_steps_msg = """
As many Krylov steps as the call allows itself are too few: they leave a quadrature error
that is larger than the error bar, or than the tolerance of an adaptive budget; or the
function is infinite at zero, and after so many steps the operator cannot be told from a
singular one. More probes do not help.

Likely remedies:

(a) more steps: `num_steps=traceax.AdaptiveSteps(max_steps=...)`; or

(b) for a log-determinant, and for the diagonal of an inverse, a preconditioner; or

(c) for an operator that is known not to have eigenvalues below some number, tell it:
    `traceax.SLQEstimator(lower_bound=...)`; or

(d) for one that may be singular, a multiple of the identity (`jitter`), a function that
    is finite at zero, or the complement of its null space; or

(e) the exact answer, by `k >= n`; up to n = 4096 (1024 for a function of an operator that
    is not tagged Hermitian) it is taken by itself where `num_steps` is left out; or

(f) a number as `num_steps`, which is taken as it is: `solution.interval()` has the
    quadrature error then.
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

_interrupted_msg = """
The `callback` of an adaptive budget raised an exception, which is printed above, and the
run ended after that round.
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
    - `too_few_steps`: for functions of operators, as many steps as
        [`traceax.AdaptiveSteps`][] allows leave a quadrature error above the error bar or
        the tolerance, or cannot tell the operator from a singular one.
    - `interrupted`: inside a compiled function, the `callback` of an adaptive budget
        raised an exception, and the run ended after that round.
    - `max_steps_reached`, of lineax: a linear solve did not converge.
    - `outside_domain`: for another function, a Ritz value was outside of its domain, or
        not to be told from a pole at zero.

    `RESULTS[solution.result]` is the message, empty for a success. `print` shows no name:
    compare with a member, or look at `solution.successful`. (`bool(solution.result)` is
    True for every member.)

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
    too_few_steps = _too_few_steps_msg
    max_matvecs_reached = _max_matvecs_reached_msg
    interrupted = _interrupted_msg


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
