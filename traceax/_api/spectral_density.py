"""The spectral measure `sum_i delta(lambda_i) / n` by stochastic Lanczos quadrature.

Lin, Saad and Yang 2016, for the measure; Golub and Welsch 1969, for the rules. What is
read from them is in `spectral_measure.py`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray, Real

from .._core.checks import check_key, check_positive
from .._core.results import failure, RESULTS
from .._core.sampler import check_full_support, draw_for
from .._functions.slq import lanczos_of, SLQEstimator
from .._krylov.lanczos_recurrence import lanczos_run, LanczosState
from .._operators.checks import check_hermitian
from .._operators.convert import OperatorLike
from .._operators.door import enter
from .._quadrature.distance import sampling_distance, wasserstein
from .._quadrature.tridiagonal import ritz
from .._run.adaptive import Adaptive
from .._run.call import call
from .._run.execution import AbstractExecution, Local
from .._run.steps import AdaptiveSteps, check_steps, choose_steps, excess, Steps
from .spectral_measure import SpectralDensity


def _rule(
    state: LanczosState, steps: Int[Array, ""] | int
) -> tuple[Real[Array, " s"], Real[Array, " s"]]:
    """The nodes and the weights of the Gauss rule of a run of `steps` steps."""
    run = lanczos_run(state, steps)
    nodes, vectors = ritz(run.alpha, run.beta)
    # A run has unit vectors, so the norm of the probe does not enter.
    return nodes, vectors[0] ** 2


def _measure(opened, k, num_steps, key, estimator, execution) -> SpectralDensity:
    flat = opened[0].frozen
    sampler, krylov = lanczos_of(estimator)
    check_full_support("estimator.sampler", sampler)

    def probe(flat, index):
        return draw_for(flat, sampler, key, index[None])[:, 0]

    def excess_after(flat, state, steps):
        # The change of the last half of the steps is about the error before it, and so
        # more than the error after it.
        nodes, weights = _rule(state, steps)
        earlier_nodes, earlier_weights = _rule(state, -(-steps // 2))
        change = wasserstein(nodes, weights, earlier_nodes, earlier_weights)
        rounding = flat.rounding * jnp.max(jnp.abs(nodes))
        return excess(change - rounding, sampling_distance(nodes, weights, flat.size, k))

    def choose(adaptive):
        return choose_steps(
            adaptive,
            krylov=krylov,
            operator=flat,
            probe=probe(flat, jnp.zeros((), int)),
            first=2,
            excess_after=excess_after,
            execution=execution,
        )

    steps = Steps.of(num_steps, choose)

    def rule(flat, index):
        state = krylov.start(flat, probe(flat, index), steps.most)
        state = krylov.advance(flat, state, 0, steps.made)
        return jnp.stack(_rule(state, steps.made))

    rules = execution.map(rule, flat, jnp.arange(k), width=steps.most)
    result = failure(~jnp.all(jnp.isfinite(rules)), RESULTS.nonfinite_product)
    return SpectralDensity(
        nodes=rules[:, 0],
        weights=rules[:, 1],
        num_matvecs=k * steps.made + steps.spent,
        num_steps=steps.made,
        result=result,
    )


def spectral_density(
    operator: OperatorLike,
    estimator: SLQEstimator = SLQEstimator(),
    *,
    k: int = 10,
    num_steps: int | AdaptiveSteps = AdaptiveSteps(),
    key: PRNGKeyArray | None = None,
    execution: AbstractExecution = Local(),
    throw: bool = True,
) -> SpectralDensity:
    r"""Estimate the distribution of the eigenvalues of a Hermitian operator, by
    stochastic Lanczos quadrature.

    The spectral measure of $A$ has the mass $1/n$ at each eigenvalue. Lanczos from a
    probe $z$ gives a Gauss rule for the measure with the moments $z^* A^p z / z^* z$. It
    is exact for $p < 2\, \mathrm{num\_steps}$, and the mean over probes of these moments
    is $\mathrm{tr}(A^p) / n$.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jax.random.normal(jax.random.key(0), (500, 500)) / 500**0.5
        operator = lx.MatrixLinearOperator((x + x.T) / 2**0.5, lx.symmetric_tag)
        key = jax.random.key(1)
        measure = tx.spectral_density(operator, k=10, num_steps=40, key=key)
        density, std_err = measure(jnp.linspace(-3, 3, 7), width=0.1)
        fraction, std_err = measure.cumulative(0.0)
        print(fraction, "+-", std_err)
        ```

    **Arguments:**

    - `operator`: a Hermitian operator, and tagged so, as in
        [`traceax.trace_of_function`][]; on arrays or PyTrees, of any floating dtype.
    - `estimator`: the sampler of the probes (only their directions count) and the
        `window` of Lanczos, as `SLQEstimator(sampler, Lanczos(window))`. With `window=0`
        an eigenvalue may come as several nodes that share its weight. A `lower_bound` is
        of no use here.
    - `k`: the number of probes, a Python integer. Default: 10, for which the standard
        error of a fraction of the eigenvalues is at most about `0.45 / n**0.5`.
    - `num_steps`: the number of Lanczos steps for each probe, a Python integer; more than
        n count as n. Or [`traceax.AdaptiveSteps`][], the default: the first probe makes
        steps until the last half of them has changed the measure by at most `share` of
        its sampling error, or until `max_steps`. Both are Wasserstein distances. Where
        the eigenvalues are few or in clusters these are few steps; a broad spectrum takes
        `max_steps`, and that is no failure, since further steps only show finer details.
    - `key`, `execution`, `throw`: as in [`traceax.trace`][].

    **Returns:**

    A [`traceax.SpectralDensity`][], which is called for the smoothed density, and whose
    `cumulative` is the distribution function. Real arrays of the operator's precision,
    float32 for operators in bfloat16 or float16.

    There are two errors. The sampling error falls with `k`, and its methods report it as
    a standard error. The quadrature error falls with `num_steps`, and is small where the
    smoothing is wider than the range of the spectrum over `num_steps`; no number of
    probes reduces it.

    The result is constant to all derivatives. For the derivative of a moment use
    [`traceax.trace_of_function`][]. `jit` and `vmap` work; `jax.vmap` over keys gives a
    batch of measures.

    Cost: `k * num_steps` matvecs, one in each step, and one probe more where the steps
    are chosen; `O(n k num_steps^2)` operations. Memory: `num_steps` vectors of length n
    for each probe of a block (with `window=0` a few), and `2 k num_steps` numbers for the
    result. If steps are chosen, `max_steps` takes the place of `num_steps`.

    **Raises:**

    - `TypeError`: an argument is not of its kind; `k` or `num_steps` is not a Python
        integer.
    - `ValueError`: `operator` is not square or not known to be Hermitian; `k` or
        `num_steps` is below 1; `key` is missing; the sampler's dtype does not fit.
    - An `equinox` run-time error with `throw=True`: a matvec was not finite.

    ??? cite

        ```bibtex
        @article{lin2016approximating,
            author  = {Lin, Lin and Saad, Yousef and Yang, Chao},
            title   = {Approximating Spectral Densities of Large Matrices},
            journal = {SIAM Review},
            volume  = {58},
            number  = {1},
            pages   = {34--65},
            year    = {2016},
        }

        @article{golub1969calculation,
            author  = {Golub, Gene H. and Welsch, John H.},
            title   = {Calculation of {Gauss} Quadrature Rules},
            journal = {Mathematics of Computation},
            volume  = {23},
            number  = {106},
            pages   = {221--230},
            year    = {1969},
        }
        ```
    """
    entered = enter(operator)
    check_hermitian(entered.flat)
    check_key(key)
    if isinstance(k, Adaptive):
        raise ValueError(
            "`spectral_density` needs a fixed budget. Found `k=traceax.Adaptive(...)`. "
            "Pass the number of probes, an integer."
        )
    k = check_positive("k", k)
    num_steps = check_steps(num_steps, entered.size)
    lanczos_of(estimator)
    return call(
        _measure,
        entered,
        k,
        num_steps,
        key,
        estimator,
        execution,
        name="spectral_density",
        execution=execution,
        throw=throw,
    )
