"""The call for `log tr exp(s A)`."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree, Scalar

from .._core.checks import check_instance, real_scalar
from .._core.solution import Solution
from .._functions.slq import lanczos_of, SLQEstimator
from .._krylov.arnoldi import Arnoldi
from .._operators.checks import check_hermitian
from .._operators.convert import OperatorLike
from .._operators.door import enter
from .._run.adaptive import Adaptive, DEFAULT_BUDGET
from .._run.execution import AbstractExecution, Local
from .._run.solve import solve
from .._run.steps import AdaptiveSteps, check_steps
from .log_trace_exp_task import LogTraceExp
from .log_trace_exp_untagged import LogTraceExpUntagged


def log_trace_exp(
    operator: OperatorLike,
    scale: Scalar | float = 1.0,
    estimator: SLQEstimator = SLQEstimator(),
    *,
    k: int | Adaptive = DEFAULT_BUDGET,
    num_steps: int | AdaptiveSteps = AdaptiveSteps(),
    key: PRNGKeyArray | None = None,
    state: PyTree[Array] | None = None,
    execution: AbstractExecution = Local(),
    throw: bool = True,
) -> Solution[Array]:
    """Estimate $\\log \\mathrm{tr} \\exp(s A)$: the logarithm of a partition function or
    of an Estrada index, or a smooth maximum of eigenvalues.

    Only differences from the largest exponent are exponentiated, so $s A$ may be of any
    size that the dtype can hold. `traceax.trace_of_function` with `Exp` overflows in
    float32 where an eigenvalue of $s A$ is above 88.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jnp.linspace(0.0, 1.0, 300)
        energies = jnp.diag(1e3 * x) + jnp.eye(300, k=1) + jnp.eye(300, k=-1)
        hamiltonian = lx.MatrixLinearOperator(energies, lx.symmetric_tag)

        def log_partition_function(beta):
            settings = {"k": 30, "key": jax.random.key(0)}
            solution = tx.log_trace_exp(hamiltonian, -beta, **settings)
            return solution.value, solution.std_err

        slope = jax.grad(log_partition_function, has_aux=True)
        mean_energy, bar = slope(jnp.array(0.1))
        print(-mean_energy, log_partition_function(0.1), bar)
        ```

    **Arguments:**

    - `operator`: a Hermitian matrix or operator, tagged so, as for
        [`traceax.trace_of_function`][]. Or a real one without a tag, with a positive
        trace of the exponential, for which [`traceax.Arnoldi`][] takes the place of
        Lanczos, with more steps and one more run.
    - `scale`: s, a real number or array of shape `()`.
    - `estimator`: sampler and `window`, `SLQEstimator(sampler, Lanczos(window))`; without
        a tag the sampler alone. A `lower_bound` is of no use here.
    - `k`: the number of probes, a Python integer. With `k >= n` the answer is exact. Or
        [`traceax.Adaptive`][], whose tolerances are those of the logarithm: `atol=0.1` is
        10% of the trace. Default: 1% of the logarithm.
    - `num_steps`: the number of Lanczos steps for each probe, a Python integer; more
        than n count as n. It takes somewhat more than
        $\\sqrt{|s| (\\lambda_{\\max} - \\lambda_{\\min})}$ steps. Or
        [`traceax.AdaptiveSteps`][], the default: one more run chooses a number that makes
        the quadrature error small compared with the sampling error or the tolerance.
    - `key`, `state`, `execution`, `throw`: as in [`traceax.trace`][].

    **Returns:**

    A [`traceax.Solution`][] with a real `value`, the logarithm. It takes at most `k *
    num_steps` matvecs, and one probe more where the steps are adaptive. `std_err` is the
    standard error of the logarithm: with m the mean of the exponentials and s its
    standard error, $\\log m - \\log(m - s)$. It is infinite where $m \\le s$, since the
    samples then give no lower bound. If a single eigenvalue outweighs the others, it is
    about $\\sqrt{2/k}$ for any n. The value is biased downward by about half the square
    of `std_err`.

    `stats` has `"samples"`, the logarithm of $z^* \\exp(s A) z$ for each probe: `value`
    is the logarithm of the mean of their exponentials. It also has `"quadrature_error"`,
    an estimate of the error of `value` from too few steps, which make it too small;
    `"ritz_values"`, the smallest and the largest Ritz value of $A$; and
    `"gradient_residual"` as in [`traceax.SLQEstimator`][]. Without a tag the forms may be
    negative, so `"samples"` are the forms themselves, times $e^{-c}$ with c the
    `"shift"`.

    Derivatives in the operator's arrays are estimates of $s\\, \\mathrm{tr}(e^{sA} dA) /
    \\mathrm{tr}\\, e^{sA}$, by [`traceax.LanczosGradient`][], of first order only.
    Derivatives in `scale` are estimates of $\\mathrm{tr}(A e^{sA}) / \\mathrm{tr}\\,
    e^{sA}$, to all orders. They are corrected for the bias of a logarithm, and so are not
    derivatives of `value`. Memory: `num_steps` vectors of length n for each probe of a
    block, or with `window=0` and no derivative the vectors of one step; and for a
    derivative two vectors for each probe.

    **Raises:**

    - `TypeError`: an argument is not of its kind; `k` or `num_steps` is not a Python
        integer.
    - `ValueError`: `operator` is not square, or is complex and not known to be Hermitian;
        `k` or `num_steps` is too small; `key` is missing.
    - An `equinox` run-time error with `throw=True`: a matvec was not finite; the budget,
        or the largest number of adaptive steps, is too small for the tolerance; the
        estimate of the trace is not positive.

    ??? cite

        ```bibtex
        @article{jaklic1994lanczos,
            author  = {Jakli{\\v{c}}, J. and Prelov{\\v{s}}ek, P.},
            title   = {{Lanczos} Method for the Calculation of Finite-Temperature
                       Quantities in Correlated Systems},
            journal = {Physical Review B},
            volume  = {49},
            pages   = {5065},
            year    = {1994},
        }
        ```
    """
    entered = enter(operator)
    num_steps, scale = check_steps(num_steps, entered.size), real_scalar("scale", scale)
    is_complex = jnp.issubdtype(entered.flat.dtype, jnp.complexfloating)
    if entered.flat.hermitian or is_complex:
        # The trace of a complex one without a tag is complex, and so is the logarithm.
        check_hermitian(entered.flat)
        sampler, krylov = lanczos_of(estimator)
        task = LogTraceExp(
            scale=scale, num_steps=num_steps, sampler=sampler, krylov=krylov
        )
    else:
        check_instance("estimator", estimator, SLQEstimator, "SLQEstimator()")
        krylov = Arnoldi() if estimator.krylov is None else estimator.krylov
        check_instance("estimator.krylov", krylov, Arnoldi, "Arnoldi()")
        task = LogTraceExpUntagged(scale=scale, num_steps=num_steps, estimator=estimator)
    return solve(
        task, entered, k=k, key=key, state=state, execution=execution, throw=throw
    )
