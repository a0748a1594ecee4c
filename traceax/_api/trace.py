"""The trace of an operator."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, PRNGKeyArray, PyTree

from .._core.quantity import Trace
from .._core.solution import Solution
from .._estimators.auto import AutoTraceEstimator
from .._estimators.base import AbstractEstimator
from .._operators.checks import operator_first
from .._operators.convert import OperatorLike
from .._run.adaptive import Adaptive, DEFAULT_BUDGET
from .._run.execution import AbstractExecution, Local
from .measure import measure


@operator_first
def trace(
    operator: OperatorLike,
    estimator: AbstractEstimator = AutoTraceEstimator(),
    *,
    k: int | Adaptive = DEFAULT_BUDGET,
    key: PRNGKeyArray | None = None,
    state: PyTree[Array] | None = None,
    deflation: PyTree[Array] | None = None,
    control: Any = None,
    execution: AbstractExecution = Local(),
    throw: bool = True,
) -> Solution[Array]:
    r"""Estimate the trace of a square linear operator from `k` matvecs.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jax.random.normal(jax.random.key(0), (500, 20))
        operator = lx.FunctionLinearOperator(
            lambda v: x @ (x.T @ v),
            jax.ShapeDtypeStruct((500,), jnp.float32),
            lx.positive_semidefinite_tag,
        )
        solution = tx.trace(operator, k=40, key=jax.random.key(1))
        print(solution.value, "+-", solution.std_err)
        ```

    **Arguments:**

    - `operator`: a square matrix, or an operator on arrays or PyTrees, real or complex,
        of any floating dtype. See [`traceax.as_operator`][].
    - `estimator`: which estimator to use. Default: [`traceax.AutoTraceEstimator`][].
    - `k`: the number of matrix-vector products, a Python integer (static under
        `jax.jit`), which is never exceeded. With `k >= n` the answer is exact. Or
        [`traceax.Adaptive`][]: as many as it takes to reach a tolerance. Default: 1%, at
        95% confidence.
    - `key`: a JAX PRNG key. Probe `i` is drawn from `jax.random.fold_in(key, i)`. Not
        needed where nothing is random.
    - `state`: `solution.state` of an earlier call with [`traceax.Adaptive`][], which this
        call continues. Estimator, settings, key, `norm` and `round_size` must be the
        same. So must the operator and the arrays in the settings, but their numbers are
        not checked. `max_k` must not be smaller. Numbers of steps and ranks that were
        chosen automatically stay as they are.
    - `deflation`: vectors whose span is treated exactly, such as eigenvectors of the
        largest eigenvalues, for an operator tagged Hermitian: with an orthonormal basis Q
        of the span only $(I - QQ^*) A (I - QQ^*)$ is estimated. The value is unbiased for
        any vectors. An array of columns, of shape `(n, r)`, for operators on one vector
        of shape `(n,)`; otherwise a PyTree of the structure of a vector, with a leading
        axis of size r in each leaf. (An array of shape `(r, n)` is read in that way too,
        unless r is n.) They take r of the `k` matvecs and need not be orthonormal;
        dependent ones are dropped, and derivatives take them as constant.
    - `control`: a control variate, for an estimator with independent samples (by default
        [`traceax.HutchinsonEstimator`][]): a pair `(B, known)` of an operator like A, of
        the same structure, and its known trace. The structure of some operators gives it
        (see [`traceax.as_operator`][]); then `control=B` will do. Each probe is applied
        to both, and the samples are $a_i - c_i (b_i - \mathrm{known})$, with the
        regression coefficient $c_i$ of the other samples: unbiased, for any B. If samples
        of the two have the correlation $\rho$, the variance is $1 - \rho^2$ times as
        large, and with 8 probes or more at most 1.4 times that, since $c_i$ is noisy.
        With 4 probes a weak control does harm, and below 4 $c_i$ is 0. `k` counts matvecs
        with A, and there are as many with B.
    - `execution`: where matvecs run, and how many at a time. Default:
        [`traceax.Local`][].
    - `throw`: whether to raise if the result is not `RESULTS.successful`. With `False`,
        look at `solution.result`.

    **Returns:**

    A [`traceax.Solution`][]: `value`, its standard error `std_err`, `result`, `stats`.
    The estimate is unbiased. Matvecs, samples and memory of each estimator are in [the
    table of costs](../choose_estimator.md). Operators in bfloat16 or float16 are applied
    in their own dtype; everything else is float32, and so are `value` and `std_err`.

    With a `control`, `stats` has `"control_coefficient"`, the mean of $c_i$;
    `"correlation_with_control"`, $|\rho|$; and `"num_control_matvecs"`, those with B.

    `jit`, `vmap`, `grad`, `jvp` and second derivatives work with respect to the
    operator's arrays. A derivative is an unbiased estimate of the derivative of the
    trace, from the same probes; no factorisation is differentiated.

    **Raises:**

    - `TypeError`: `operator` is neither a matrix nor an operator, or not of floating or
        complex dtype; `k` is not a Python integer; `key` is not a key; `estimator` or
        `execution` is not an instance of its kind.
    - `ValueError`: `operator` is not square; `k` is below 1, or below what the estimator
        needs; `key` is missing; the estimator needs a semidefinite tag that is missing;
        the sampler's dtype does not fit; `deflation` has other shapes than the operator's
        vectors, or the operator lacks a Hermitian tag; `control` has another structure or
        no known answer, or the estimator makes a sketch.
    - An `equinox` run-time error with `throw=True`: a matvec was not finite, a
        semidefinite tag is wrong, or an adaptive budget ended before the tolerance was
        met, or the tolerance is smaller than rounding errors; the samples of `control`
        exclude its known trace.
    """
    return measure(
        Trace(),
        operator,
        estimator,
        k=k,
        key=key,
        state=state,
        deflation=deflation,
        control=control,
        execution=execution,
        throw=throw,
    )
