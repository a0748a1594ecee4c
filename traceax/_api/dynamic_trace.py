"""The trace of an operator A_t that changes slowly, by DeltaShift.

From the trace T_(t-1) of the last operator, and m probes w_i,

    T_t = (1 - gamma) T_(t-1) + (1 / m) sum_i w_i* (A_t - (1 - gamma) A_(t-1)) w_i.

Its variance is (1 - gamma)^2 Var T_(t-1) plus (2 / m) ||A_t - (1 - gamma) A_(t-1)||_F^2
for real Gaussian probes. In a steady state, where Var T_t = Var T_(t-1), the smallest one
has 1 - gamma = (1 - sqrt(1 - rho^2)) / rho, with
rho = 2 Re <A_t, A_(t-1)> / (||A_t||_F^2 + ||A_(t-1)||_F^2).

In `_update` 1 - gamma is `keep`, rho is `ratio`, `before` and `after` are the matvecs of
A_(t-1) and A_t with the probes. Dharangutte and Musco, Dynamic Trace Estimation, 2021.
"""

import dataclasses
from collections.abc import Callable, Hashable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, PyTree, Real, UInt32

from .._core.arithmetic import full_precision
from .._core.checks import check_instance, check_key, check_positive
from .._core.flat import FlatOperator
from .._core.results import failure, RESULTS
from .._core.sampler import AbstractSampler, check_full_support, draw_for, require_key
from .._core.samplers import RademacherSampler
from .._core.solution import Solution
from .._estimators.hutchinson import HutchinsonEstimator
from .._numerics.dense import normalise
from .._operators.checks import checked_operator
from .._operators.convert import OperatorLike
from .._operators.door import flatten
from .._run.adaptive import Adaptive, DEFAULT_BUDGET
from .._run.call import call
from .._run.execution import AbstractExecution, Local
from .trace import trace


class DynamicState(eqx.Module):
    """The state of [`traceax.DynamicTrace`][] between updates.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        dynamic = tx.DynamicTrace(lx.DiagonalLinearOperator)
        state = dynamic.init(jnp.ones(100), key=jax.random.key(0), k=100).state
        print(state.value, state.count)  # 100.0 0
        state = dynamic.update(state, 2 * jnp.ones(100)).state
        print(state.value, state.count)  # 200.0 1
        ```

    **Attributes:**

    - `parameters`: the parameters of the operator.
    - `value`, `std_err`: the trace and its standard error, of shape `()`.
    - `remainder`: the rounding error of `value`, of shape `()`. Updates may be smaller
        than the last digit of `value`, and add up.
    - `scarcity`: one over the effective number of probes behind `std_err`, which has been
        widened accordingly, of shape `()`. 0 before the first update, when `std_err` is
        the error bar of the first estimate.
    - `count`: the number of updates, an integer of shape `()`.
    - `key`: the data of the key from which the probes of all updates are drawn. States
        can be saved, since it is an array of integers; `impl` names its generator.
    """

    parameters: PyTree
    value: Inexact[Array, ""]
    std_err: Real[Array, ""]
    remainder: Inexact[Array, ""]
    scarcity: Real[Array, ""]
    count: Int[Array, ""]
    key: UInt32[Array, " d"]
    impl: Hashable = eqx.field(static=True)


class DynamicTrace(eqx.Module):
    r"""Follow the trace of an operator that changes slowly, as during training, by
    DeltaShift.

    Each update estimates the trace of a difference, which is small if the operator has
    changed little, and so needs few matvecs:

    $$T_t = (1 - \gamma)\, T_{t-1} + \frac1m \sum_i
      \omega_i^* (A_t - (1 - \gamma) A_{t-1})\, \omega_i.$$

    The $\gamma$ with the smallest variance in the long run is estimated from the same
    matvecs: $1 - \gamma = (1 - \sqrt{1 - \rho^2}) / \rho$ with $\rho = 2 \mathrm{Re}\,
    \langle A_t, A_{t-1} \rangle / (\|A_t\|_F^2 + \|A_{t-1}\|_F^2)$. If the operator
    changes much at once, $\gamma$ is near 1, and the estimate starts afresh.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        dynamic = tx.DynamicTrace(lx.DiagonalLinearOperator, num_probes=4)
        first = dynamic.init(jnp.ones(100), key=jax.random.key(0), k=20)
        second = dynamic.update(first.state, 1.01 * jnp.ones(100))
        print(second.value, "+-", second.std_err)
        ```

    Values carry no derivatives. All methods work under `jit`, and `update` in
    `jax.lax.scan`.

    **Attributes:**

    - `operator`: a function from parameters, a PyTree of arrays, to a square `lineax`
        operator, such as `lambda p: traceax.hessian(loss, p)`.
    - `num_probes`: m, 2 or more. An update costs `2 * num_probes` matvecs, m with each
        operator, `O(n m)` operations, and holds `3 m` vectors of length n: the probes and
        their matvecs with both operators.
    - `sampler`: the distribution of the probes.
    - `execution`: where matvecs run, and how many at a time.

    ??? cite

        ```bibtex
        @inproceedings{dharangutte2021dynamic,
            author    = {Dharangutte, Prathamesh and Musco, Christopher},
            title     = {Dynamic Trace Estimation},
            booktitle = {Advances in Neural Information Processing Systems},
            volume    = {34},
            year      = {2021},
        }
        ```
    """

    operator: Callable[[PyTree], OperatorLike]
    num_probes: int = eqx.field(static=True, default=8)
    sampler: AbstractSampler = RademacherSampler()
    execution: AbstractExecution = Local()

    def __check_init__(self):
        if not callable(self.operator):
            raise TypeError(
                "`operator` must be a function of the parameters to an operator. "
                f"Found an object of type {type(self.operator).__name__}. Pass, for "
                "example, `lambda p: traceax.hessian(loss, p)`."
            )
        if check_positive("num_probes", self.num_probes) < 2:
            raise ValueError("`num_probes` must be at least 2. Found 1.")
        check_instance("sampler", self.sampler, AbstractSampler, "RademacherSampler()")
        check_full_support("sampler", self.sampler)
        check_instance("execution", self.execution, AbstractExecution, "Local()")

    def init(
        self,
        parameters: PyTree,
        *,
        key: PRNGKeyArray,
        k: int | Adaptive = DEFAULT_BUDGET,
        throw: bool = True,
    ) -> Solution[Array]:
        """Make a first estimate, by Hutchinson's estimator.

        **Arguments:**

        - `parameters`: the parameters of the operator.
        - `key`: a JAX PRNG key, for this and all updates.
        - `k`: the number of matvecs, as in [`traceax.trace`][]. An error bar needs 2 or
            more; without one the first update starts afresh.
        - `throw`: as in [`traceax.trace`][].

        **Returns:**

        A [`traceax.Solution`][], whose `state` the first update takes. One block of
        probes is held at a time.

        **Raises:**

        The errors of [`traceax.trace`][].
        """
        check_key(key)
        init_key, update_key = jr.split(require_key(key))
        solution = trace(
            self.operator(parameters),
            HutchinsonEstimator(self.sampler),
            k=k,
            key=init_key,
            execution=self.execution,
            throw=throw,
        )
        solution = jax.lax.stop_gradient(solution)
        state = DynamicState(
            parameters=parameters,
            value=solution.value,
            std_err=solution.std_err,
            remainder=jax.device_put(np.zeros((), solution.value.dtype)),
            scarcity=jax.device_put(np.zeros((), solution.std_err.dtype)),
            count=jax.device_put(np.zeros((), np.int32)),
            key=jr.key_data(update_key),
            impl=jr.key_impl(update_key),
        )
        return eqx.tree_at(
            lambda x: x.state, solution, state, is_leaf=lambda x: x is None
        )

    def update(
        self, state: DynamicState, parameters: PyTree, *, throw: bool = True
    ) -> Solution[Array]:
        """Estimate the trace for new parameters.

        **Arguments:**

        - `state`: the state of the last solution.
        - `parameters`: a PyTree like the last parameters.
        - `throw`: as in [`traceax.trace`][].

        **Returns:**

        A [`traceax.Solution`][] with the next `state`. `std_err` is carried along with
        the value, and is at least its rounding error. `stats` has the counts, and
        `"gamma"`: 0 if the last estimate is fully kept, and 1 if it is discarded.

        **Raises:**

        - `TypeError`: `state` is not the state of a solution; the function does not
            return an operator.
        - `ValueError`: the operator for the new parameters is not square, or its
            structure differs from that of the operator for the last parameters.
        - An `equinox` run-time error with `throw=True`: a matvec was not finite.
        """
        if not isinstance(state, DynamicState):
            raise TypeError(
                "`state` must be the `state` of a solution of this `DynamicTrace`. Found "
                f"an object of type {type(state).__name__}. Pass, for example, "
                "`dynamic.init(parameters, key=key).state`."
            )
        return call(
            _update,
            self,
            state,
            parameters,
            name=type(self).__name__,
            execution=self.execution,
            throw=throw,
        )


def _update(dynamic: DynamicTrace, state: DynamicState, parameters: PyTree) -> Solution:
    m, execution = dynamic.num_probes, dynamic.execution
    operators = dynamic.operator(state.parameters), dynamic.operator(parameters)
    checked = [checked_operator(operator) for operator in operators]
    before, after = (each.inputs for each in checked)
    if before != after:
        raise ValueError(
            "`parameters` must be of an operator with the structure of the last one. "
            f"Found in_structure()={after}, and before it {before}."
        )
    old, new = (flatten(each.operator).frozen for each in checked)
    # Fresh probes: with those of an earlier update the errors would be correlated.
    key = jr.fold_in(jr.wrap_key_data(state.key, impl=state.impl), state.count)
    probes = draw_for(new, dynamic.sampler, key, jnp.arange(m))
    products = [_apply(execution, each, probes) for each in (old, new)]
    # Scaled, so that squares neither overflow nor underflow.
    products, scale = normalise(jnp.concatenate(products, axis=1))
    before, after = jnp.split(products, 2, axis=1)
    # NOTE: the paper takes gamma from the same probes and from the variance carried
    # along. Both are correlated with the error, and over many updates the bias adds up.
    # We take the gamma of the steady state, for each half of the probes from the other
    # half, so that T is unbiased.
    # rho is `ratio`, and 1 - gamma is `keep`, one for each probe. In the form
    # rho / (1 + sqrt(1 - rho^2)) it has no cancellation, and is 0 for rho = 0.
    norms = _mean_of_others(jnp.sum(jnp.abs(before) ** 2 + jnp.abs(after) ** 2, axis=0))
    cross = 2 * _mean_of_others(jnp.sum((before.conj() * after).real, axis=0))
    ratio = jnp.clip(cross / jnp.where(norms > 0, norms, 1), 0, 1)
    # Without an error bar the last estimate is discarded.
    usable = jnp.isfinite(state.std_err) & jnp.isfinite(state.value)
    keep = jnp.where(usable, ratio / (1 + jnp.sqrt(1 - ratio**2)), 0)
    mean_keep = jnp.mean(keep)
    # `keep` is near 1 or near 0; the remainder is handled separately, so that rounding
    # errors are relative to it. Errors relative to `before` would be the same in each
    # update, and add up.
    nearest = jnp.round(mean_keep)
    offset = keep - nearest
    change = (after - nearest * before) - offset * before
    # A quadratic form in D has at most the variance 2 ||D||_F^2 = 2 E||D w||^2.
    sampled = scale * jnp.linalg.norm(change) * 2**0.5 / m
    scarcity = jnp.where(usable, state.scarcity, 0)
    carried = mean_keep * jnp.where(usable, state.std_err / _widening(scarcity), 0)
    std_err = jnp.hypot(carried, sampled)
    # Satterthwaite: for variances v_j, each estimated from m_j probes, the sum is worth m
    # probes with (sum v_j)^2 / m = sum v_j^2 / m_j.
    share = (carried / jnp.where(std_err > 0, std_err, 1)) ** 2
    scarcity = share**2 * scarcity + (1 - share) ** 2 / m
    std_err = std_err * _widening(scarcity)
    last = jnp.where(usable, state.value, 0)
    remainder = jnp.where(usable, state.remainder, 0)
    increment = scale * jnp.sum(probes.conj() * change) / m + jnp.mean(offset) * last
    value, remainder = _two_sum(nearest * last, increment + mean_keep * remainder)
    std_err = jnp.maximum(std_err, new.rounding * jnp.abs(value))
    value, remainder, std_err, scarcity = jax.lax.stop_gradient(
        (value, remainder, std_err, scarcity)
    )
    state = dataclasses.replace(
        state,
        parameters=parameters,
        value=value,
        std_err=std_err,
        remainder=remainder,
        scarcity=scarcity,
        count=state.count + 1,
    )
    counts = {"num_matvecs": 2 * m, "num_samples": m, "num_steps": 0}
    stats = counts | {"gamma": 1 - mean_keep, "std.err": std_err}
    result = failure(~jnp.isfinite(value), RESULTS.nonfinite_product)
    return Solution(
        value=value,
        std_err=std_err,
        result=result,
        stats=stats,
        state=state,
        quantity="Trace",
        method=type(dynamic).__name__,
    )


def _apply(execution: AbstractExecution, operator: FlatOperator, probes: Array) -> Array:
    # Products in reduced precision would differ by more than the operators do.
    with full_precision(lambda x: execution.matmat(operator, x)) as matmat:
        return matmat(probes)


def _two_sum(a: Inexact[Array, ""], b: Inexact[Array, ""]) -> tuple[Array, Array]:
    """The rounded sum, and its rounding error (Knuth's two-sum)."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


def _widening(scarcity: Real[Array, ""]) -> Real[Array, ""]:
    """The factor by which an error bar from few probes is widened. For a rank-one change
    the bar is small exactly when the estimate is far off. Fitted to such changes, for 2
    probes or more."""
    return 1 + scarcity + 4 * scarcity**2


def _mean_of_others(x: Real[Array, " m"]) -> Real[Array, " m"]:
    """For each probe, the mean over the other half of the probes."""
    half = len(x) // 2
    first, second = jnp.mean(x[:half]), jnp.mean(x[half:])
    return jnp.where(jnp.arange(len(x)) < half, second, first)


DynamicTrace.__init__.__doc__ = """**Arguments:**

- `operator`: a function of the parameters.
- `num_probes`: default is 8.
- `sampler`: default is [`traceax.RademacherSampler`][].
- `execution`: default is [`traceax.Local`][].

**Raises:**

`ValueError` for `num_probes` below 2. `TypeError` where it is not a Python integer, and
for a `sampler` or an `execution` that is not an instance of its kind.
"""
