"""The spectral measure `sum_i delta(lambda_i) / n` by stochastic Lanczos quadrature.

Probe i gives a Gauss rule, the masses w_ij (`weights`) at the Ritz values theta_ij
(`nodes`). With k probes, the integral of a function g is estimated by

    (1 / k) sum_i sum_j w_ij g(theta_ij),

where g is a Gaussian around t for the density, and a step for the cumulative one. Lin,
Saad and Yang 2016, for the measure; Golub and Welsch 1969, for the rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, ArrayLike, Int, PRNGKeyArray, Real, Scalar

from .._core.arithmetic import standard_promotion
from .._core.checks import check_key, check_positive
from .._core.jax_interfaces import Tracer
from .._core.moments import Moments
from .._core.report import counted, fetch, has_numbers, table
from .._core.results import describe_failures, failure, RESULTS
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


class SpectralDensity(eqx.Module):
    r"""An estimate, from `k` probes, of the spectral measure, which has the mass $1/n$ at
    each eigenvalue. Made by [`traceax.spectral_density`][].

    Probe $i$ gives a Gauss rule, with masses $w_{ij}$ at the nodes $\theta_{ij}$.
    Quantities of the measure are computed for each rule, and reported as their mean over
    rules with its standard error.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        operator = lx.DiagonalLinearOperator(jnp.array([1.0, 2.0, 3.0, 4.0]))
        measure = tx.spectral_density(operator, k=5, num_steps=4, key=jax.random.key(0))
        fraction, std_err = measure.cumulative(2.5)
        print(f"{fraction:.2f}")  # 0.50
        density, std_err = measure(jnp.linspace(0, 5, 6), width=0.2)
        ```

    **Attributes:**

    - `nodes`: the Ritz values, shape `(k, num_steps)`, ascending in each row, real, in
        the units of the eigenvalues.
    - `weights`: the masses, of the same shape. Each row sums to 1.
    - `num_matvecs`: the number of matvecs that it was made from, an integer.
    - `num_steps`: the number of steps of each probe, an integer. If it was chosen, arrays
        have room for more: the further nodes have no weight.
    - `result`: a [`traceax.RESULTS`][] member: `successful` or `nonfinite_product`.

    Where a Krylov space was exhausted early, as with few distinct eigenvalues, the other
    nodes of a row are inside the spectrum and have no weight, or share that of a node
    from which they differ by rounding.
    """

    nodes: Real[Array, "k s"]
    weights: Real[Array, "k s"]
    num_matvecs: Int[Array, ""] | int
    num_steps: Int[Array, ""] | int
    result: Any = eqx.field(default_factory=lambda: RESULTS.successful)
    estimated: ClassVar[tuple[str, ...]] = ("nodes", "weights")

    def __repr__(self) -> str:
        parts = self.nodes, self.weights, jax.tree.leaves(self.result)
        counts = self.num_matvecs, self.num_steps
        if not has_numbers(*parts, counts):
            return eqx.tree_pformat(self)
        nodes, weights, (result,), (num_matvecs, num_steps) = fetch((*parts, counts))
        used, (*batch, k, _) = nodes[weights > 0], nodes.shape
        rows = [("result", text) for text in describe_failures(result)]
        if used.size:
            rows.append(("Ritz values", f"{used.min():.4g} to {used.max():.4g}"))
        rules = f"{counted(k, 'probe')} of {counted(num_steps, 'step')}"
        rows.append(("cost", f"{counted(num_matvecs, 'matvec')}, {rules}"))
        suffix = f", a batch of shape {tuple(batch)}" if batch else ""
        return table(f"Spectral density{suffix}", rows)

    def __call__(
        self, t: Real[ArrayLike, "*p"], width: Scalar | float
    ) -> tuple[Real[Array, "*p"], Real[Array, "*p"]]:
        """The density at `t`, smoothed by a Gaussian.

        **Arguments:**

        - `t`: real points of any shape, in the units of the eigenvalues.
        - `width`: the standard deviation of the Gaussian, a positive real number in the
            same units. If it is the range of the spectrum over `num_steps`, quadrature
            errors were below a thousandth of the peak of the density in measurements. At
            half of that width, single nodes show as bumps.

        **Returns:**

        The pair `density, std_err`, both of the shape of `t`, in inverse units of the
        eigenvalues. The integral of the density is 1. `std_err` is the standard error of
        the mean over probes at each point alone, `inf` with one probe; errors at
        neighbouring points are correlated. No matvec is made. Memory is an array of
        `points * k * num_steps` numbers, so use `jax.lax.map` for very many points.

        **Raises:**

        - `TypeError`: `t` or `width` is not real.
        - `ValueError`: `width` is not one positive number; the measure is a batch of
            several.
        """
        width = _real("width", width, self.nodes.dtype)
        if width.shape != () or not (isinstance(width, Tracer) or width > 0):
            raise ValueError(
                f"`width` must be one positive number. Found {width}. Pass, for example, "
                "a fiftieth of the range of the eigenvalues."
            )
        return self._mean(Partial(_gaussian, width), t)

    def cumulative(
        self, t: Real[ArrayLike, "*p"]
    ) -> tuple[Real[Array, "*p"], Real[Array, "*p"]]:
        """The fraction of the eigenvalues that are at most `t`.

        A rule jumps at its nodes, by their weights. Between two nodes its error is at
        most the larger of their weights (the inequalities of Chebyshev, Markov and
        Stieltjes). The standard error does not count this error, and more steps reduce
        it. At an eigenvalue itself, rounding decides on which side it counts.

        **Arguments:**

        - `t`: real points of any shape, in the units of the eigenvalues.

        **Returns:**

        The pair `fraction, std_err`, both of the shape of `t`. Memory is that of a call
        of the density.

        **Raises:**

        - `TypeError`: `t` is not real.
        - `ValueError`: the measure is a batch of several.
        """
        return self._mean(Partial(_step), t)

    def _mean(self, kernel: Callable[[Array], Array], t: Any) -> tuple[Array, Array]:
        """The mean over rules of the integral of `kernel(t - node)`, and its error."""
        if self.nodes.ndim != 2:
            raise ValueError(
                "This is a batch of measures, with `nodes` of shape "
                f"{self.nodes.shape}. Take one at a time: `jax.vmap(lambda density: "
                "density(t, width))(densities)`."
            )
        return _mean_over_rules(self, kernel, _real("t", t, self.nodes.dtype))


def _real(name: str, value: Any, dtype: Any) -> Array:
    if not eqx.is_array_like(value) and not isinstance(value, list | tuple):
        kind = f"an object of type {type(value).__name__}"
    elif jnp.iscomplexobj(array := jnp.asarray(value)):
        kind = f"the dtype {array.dtype}"
    else:
        return array.astype(dtype)
    raise TypeError(f"`{name}` must be real. Found {kind}. Pass its real part.")


def _gaussian(width: Scalar, distance: Array) -> Array:
    return jnp.exp(-((distance / width) ** 2) / 2) / ((2 * jnp.pi) ** 0.5 * width)


def _step(distance: Array) -> Array:
    return (distance >= 0).astype(distance.dtype)


@eqx.filter_jit
def _mean_over_rules(
    density: SpectralDensity, kernel: Callable[[Array], Array], t: Real[Array, "*p"]
) -> tuple[Real[Array, "*p"], Real[Array, "*p"]]:
    # Samples are means of one rule each: rules of different probes are independent, while
    # the nodes of one rule are not.
    def moments_at(t):
        values = jnp.sum(density.weights * kernel(t - density.nodes), axis=1)
        moments = Moments.of(values)
        return moments.mean, moments.std_err()

    with standard_promotion():
        mean, std_err = jax.vmap(moments_at)(t.reshape(-1))
    return mean.reshape(t.shape), std_err.reshape(t.shape)


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
    - `estimator`: the sampler of the probes, of which only the directions count, and the
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
    result; for chosen steps with `max_steps` in the place of `num_steps`.

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
