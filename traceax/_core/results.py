"""Results of calls, whose values are the messages that users read."""

import re
from typing import Any

import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Bool


_nonfinite_msg = """
A matrix-vector product, or the estimate made from it, was not finite (NaN or inf).

Likely causes:

(a) the operator's arrays hold NaN or inf: check them before the call; or

(b) the operator's function overflows or divides by zero for the probe vectors, which
    have entries of size one: try `operator.mv` on a vector of ones; or

(c) the trace itself is too large for the dtype, or the power from which a norm is made
    too large or too small for it: scale the operator or use a wider one; or

(d) the operator is made by `traceax.function_of`, whose products are NaN where the
    largest number of steps is too few, or an eigenvalue outside of the domain of the
    function: pass `num_steps=traceax.AdaptiveSteps(max_steps)` with more of them.
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

_assumed_sign_msg = """
The operator was taken to be semidefinite, because it is a sum or a multiple of operators
that are tagged so. For that a scalar or a diagonal in it, which is traced and has no
value before the call runs, was assumed to have no negative entry. It has one.

Likely remedies:

(a) if the operator is semidefinite nevertheless, say so of the sum:
    `lineax.TaggedLinearOperator(operator, lineax.positive_semidefinite_tag)`; or

(b) if the entry is negative on purpose, show the sign, `A - c * B` with a positive c; or
    tag the terms `lineax.symmetric_tag` in the place of a semidefinite tag; or

(c) for a trace or a diagonal, name an estimator that needs no sign, such as
    `traceax.XTraceEstimator` or `traceax.XDiagEstimator`.
""".strip()

_not_positive_definite_msg = """
The function needs a positive definite operator, and a Ritz value (an eigenvalue of the
operator's compression to a Krylov space) was negative, or zero to within the operator's
precision. `solution.stats["ritz_values"]` has the smallest and the largest Ritz value;
with a preconditioner P they belong to `P^(-1/2) A P^(-1/2)`.

Likely causes:

(a) the operator has an eigenvalue that is not positive; if it is tagged semidefinite, the
    tag is wrong. Add a multiple of the identity (`jitter`), pass a basis of the null
    space (`null_space`), or for a log-determinant leave the tag out, and `traceax.logdet`
    takes the absolute value; or

(b) the operator is not Hermitian; or

(c) the products are less accurate than their dtype suggests, or the operator is singular
    in that dtype: use a wider one.
""".strip()

_zero_determinant_msg = """
The determinant is zero, or zero to within the operator's precision, so its logarithm is
minus infinity or meaningless.

Likely causes:

(a) the operator is singular: it is triangular with a zero on its diagonal, or has a
    singular value that is at most the machine epsilon times the largest
    (`solution.stats["ritz_values"]` has the smallest and the largest computed one); or

(b) it is singular in its dtype: use a wider one.
""".strip()

_outside_domain_msg = """
A Ritz value (an eigenvalue of the operator's compression to a Krylov space) was outside
the domain of the function, beyond rounding, or the function was not finite there.
`solution.stats["ritz_values"]` has the smallest and the largest one.

Likely causes:

(a) the operator has eigenvalues where the function is not defined, or eigenvalues that
    are zero to within rounding where the function has a pole there: add a multiple of the
    identity, or use a function that is defined there; or

(b) the function overflows: scale the operator or use a wider dtype.
""".strip()


_not_positive_msg = """
The estimate of a trace is not positive, so that its logarithm is not a real number.

Likely causes:

(a) there are too few probes for the spread of their samples, which may have either sign
    for an operator that is not Hermitian: raise `k`; or

(b) the trace itself is not positive, or it is that of `exp(A)` for an A whose powers grow
    far beyond its eigenvalues: `traceax.trace_of_function` estimates the trace itself.
""".strip()

_precision_lost_msg = """
Rounding errors of the products, or an operator that is not Hermitian as its tag says,
change the value by a large part of the reported error bar, or by far more than the
tolerance of an adaptive budget. A function of an operator is then too ill conditioned for
the precision of the matrix-vector products, and the contribution of the smallest
eigenvalues is unknown: `solution.stats["ritz_values"]` has the smallest and the largest
computed one.

Likely remedies:

(a) if the operator is not Hermitian, leave out the tag that says so, also a semidefinite
    one; or

(b) make the products in a wider dtype: float64, or for an operator in bfloat16 or float16
    float32, in which products with such a matrix can be accumulated too; or

(c) on an accelerator ask for products in full precision:
    `jax.default_matmul_precision("highest")`; or

(d) for a log-determinant use a preconditioner, which makes the operator better
    conditioned; or

(e) add a multiple of the identity (`jitter`), larger than the rounding errors; or

(f) loosen the tolerance of an adaptive budget, or let `max_k` be n and a round or more.
""".strip()

_too_few_steps_msg = """
The largest number of Krylov steps that the call may take is too few. The quadrature error
is then larger than the error bar, the tolerance of an adaptive budget, or for a gradient
its sampling error; or the function is infinite at zero, and after these steps the
operator cannot be told from a singular one. More probes do not help.

Likely remedies:

(a) allow more steps: `num_steps=traceax.AdaptiveSteps(max_steps=...)`, or where their
    number is random a larger `start` or `max_steps` of `traceax.RandomSteps`; or

(b) for a log-determinant, or the diagonal of an inverse, use a preconditioner; or

(c) if you know a lower bound of the eigenvalues, pass it:
    `traceax.SLQEstimator(lower_bound=...)`; or

(d) if the operator is singular, pass a basis of its null space, `null_space=...`; if it
    may be, add a multiple of the identity (`jitter`), or use a function that is finite at
    zero; or

(e) ask for the exact answer, by `k >= n`; up to n = 4096 (1024 for a function of an
    operator that is not tagged Hermitian) it is chosen automatically where `num_steps` is
    left out; or

(f) pass a number as `num_steps`: the call then takes exactly that many steps, and
    `solution.interval()` counts the quadrature error.
""".strip()

_infinite_variance_msg = """
The `ratio` of `traceax.RandomSteps` is not between 0 and 1, or too small for the
condition number. In the second case the estimate is unbiased, but its variance is
infinite, and its error bar means nothing. `solution.stats["ritz_values"]` has the
smallest and the largest Ritz value.

Likely remedies:

(a) leave `ratio` out, and it follows from the condition number; or

(b) raise it: with the condition number kappa it must be above rho^4, for
    rho = (sqrt(kappa) - 1) / (sqrt(kappa) + 1); or

(c) for a log-determinant use a preconditioner, which makes kappa smaller.
""".strip()

_max_matvecs_reached_msg = """
The budget ended before the error bar met the tolerance.

Likely remedies:

(a) raise `max_k`: the error of most estimators falls as one over the square root of the
    number of samples. Where samples do not suffice, the exact answer takes their place if
    `max_k` is at least n and a round. `state=solution.state` continues from this call
    (for the exact answer, `max_k` then has to be n more than before). `max_k` must have
    room for `min_samples` samples; a sample of XTrace takes two matvecs; or

(b) use an estimator that fits the operator better (see "Choose an estimator and a
    budget"), or for a log-determinant a preconditioner; or

(c) loosen the tolerance; with `throw=False` the call returns its estimate so far.
""".strip()

_not_converged_msg = """
The residuals of some eigenpairs or singular triplets are above the tolerance. The
intervals count them.

Likely remedies:

(a) raise `k`, the largest number of matrix-vector products: eigenvalues that are close to
    each other, relative to the whole spectrum, take many; or

(b) raise the tolerance `rtol`, or ask for fewer pairs; with `throw=False` the call
    returns what it has found; or

(c) if the operator is not Hermitian, leave out the tag that says so, and use
    `traceax.svds`; or

(d) for the smallest eigenvalues of a positive definite operator, find the largest ones of
    its inverse, whose products are linear solves.
""".strip()

_not_null_space_msg = """
`null_space` must be a basis of vectors that the operator maps to zero. The product with a
random combination of them is not zero to within the operator's precision.

Likely causes:

(a) the basis is of another operator, or of one with other parameters: make it anew; or

(b) its vectors are less precise than the operator, such as eigenvectors in float32 for an
    operator in float64: compute them in the operator's dtype, to its precision; or

(c) the operator has no null space, but eigenvalues that are small: leave `null_space`
    out, or pass their eigenvectors as `deflation`.
""".strip()

_inexact_deflation_msg = """
The vectors of `deflation` are too far from eigenvectors of the operator: what a function
of the operator loses by taking them for eigenvectors may be more than the reported error
bar. `solution.stats["deflation_error"]` is an estimate of it.

Likely remedies:

(a) compute the eigenvectors more accurately, by a smaller tolerance of `traceax.eigsh` or
    in a wider dtype; or

(b) pass only those that have converged. Traces and diagonals of the operator itself are
    exact for any vectors.
""".strip()

_interval_with_zero_msg = """
The function of `Solution.transform` divides by a number whose 95% interval contains zero,
or takes its logarithm or a root. So its error bar is unknown, and reported as infinite.

Likely remedies:

(a) raise `k`, so that the interval becomes narrower; or

(b) use a function that is smooth there: the interval of the number itself is right.
""".strip()

_inconsistent_control_msg = """
The known answer of the control is not what its own samples say: they exclude it with a
confidence of 99.9999%, or it is not finite. An estimate made from it would be wrong by as
much, times `solution.stats["control_coefficient"]`.

Likely causes:

(a) the known answer belongs to another operator, or is another quantity, such as a trace
    where a log-determinant was asked for; or

(b) it is an estimate, or less precise than the products with the control; or

(c) the products with the control are less precise than their dtype suggests.
""".strip()

_interrupted_msg = """
The `callback` of an adaptive budget raised an exception, which is printed above, and the
run ended after that round.
""".strip()


class RESULTS(lx.RESULTS):  # pyright: ignore[reportGeneralTypeIssues]
    """The result of a call: success, or the kind of failure. The members are those of
    `lineax.RESULTS`, and:

    - `nonfinite_product`: a matrix-vector product or the estimate was NaN or infinite.
    - `not_semidefinite`: an operator that is tagged semidefinite turned out not to be.
    - `assumed_sign`: a traced scalar or diagonal, which was assumed to have no negative
        entry so that a sum of semidefinite operators is semidefinite, has one.
    - `not_positive_definite`: for a logarithm or a negative power, a Ritz value was
        negative, or zero to within rounding.
    - `zero_determinant`: the determinant of a structured or a general operator is zero,
        or zero to within rounding.
    - `precision_lost`: for functions of operators, rounding errors of the matvecs are a
        large part of the reported error bar; for diagonals of functions and exact
        answers, they change the second digit. With an adaptive budget for a scalar, they
        alone are far above the tolerance.
    - `max_matvecs_reached`: an adaptive budget ended before the tolerance was met.
    - `too_few_steps`: for functions of operators, the largest number of steps that
        [`traceax.AdaptiveSteps`][] allows leaves a quadrature error above the error bar
        or the tolerance, biases a gradient, or leaves the operator possibly singular.
    - `infinite_variance`: the `ratio` of [`traceax.RandomSteps`][] is too small for the
        condition number, or not between 0 and 1.
    - `not_converged`: a residual of `eigsh` or `svds` is above the tolerance.
    - `interrupted`: inside a compiled function, the `callback` of an adaptive budget
        raised an exception, and the run ended after that round.
    - `not_null_space`: a basis that was passed as `null_space` is not mapped to zero.
        With `throw=True`, and outside of compiled functions, this is a `ValueError`.
    - `inexact_deflation`: for functions of operators, vectors that were passed as
        `deflation` are too far from eigenvectors.
    - `inconsistent_control`: the known answer of a `control` is excluded by the samples
        of the control.
    - `interval_with_zero`: a function of estimates divides by a number whose interval
        contains zero, or takes its logarithm or a root.
    - `max_steps_reached`, of lineax: a linear solve did not converge.
    - `outside_domain`: for any other function, a Ritz value was outside its domain, or
        at a pole at zero to within rounding.
    - `not_positive`: the estimate of a trace whose logarithm is asked for is not
        positive.

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
    assumed_sign = _assumed_sign_msg
    not_positive_definite = _not_positive_definite_msg
    outside_domain = _outside_domain_msg
    zero_determinant = _zero_determinant_msg
    not_positive = _not_positive_msg
    precision_lost = _precision_lost_msg
    too_few_steps = _too_few_steps_msg
    infinite_variance = _infinite_variance_msg
    max_matvecs_reached = _max_matvecs_reached_msg
    not_converged = _not_converged_msg
    interrupted = _interrupted_msg
    not_null_space = _not_null_space_msg
    inexact_deflation = _inexact_deflation_msg
    interval_with_zero = _interval_with_zero_msg
    inconsistent_control = _inconsistent_control_msg


def describe_failures(result: np.ndarray) -> list[str]:
    """The name of each failure in an array of indices of members, with the first sentence
    of its message, and for a batch with its count."""
    texts = []
    for name, item in RESULTS._name_to_item.items():
        count = int(np.sum(result == item._value))
        if name == "successful" or count == 0:
            continue
        sentence, *_ = re.split(r"(?<=\.)\s", " ".join(RESULTS[item].split()))
        many = f"{count} of {result.size}: " if result.shape else ""
        texts.append(f"{many}{name}: {sentence}")
    return texts


def first_failure(*results: Any) -> Any:
    """The first result that is a failure; without failures, a success if any result is
    not None, else None."""
    first, *others = [result for result in results if result is not None] or [None]
    for other in others:
        first = RESULTS.where(first == RESULTS.successful, other, first)
    return first


def failure(failed: Bool[Array, ""] | bool, how: Any) -> Any:
    """Convert the outcome of a test to a result.

    **Arguments:**

    - `failed`: a boolean of shape `()`, which may be traced.
    - `how`: the member of [`traceax.RESULTS`][] for a failed test.

    **Returns:**

    `how` where `failed` is true, else `RESULTS.successful`.
    """
    successful: Any = RESULTS.successful
    return RESULTS.where(jnp.asarray(failed), how, successful)
