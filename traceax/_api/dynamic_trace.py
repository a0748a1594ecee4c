import dataclasses
from collections.abc import Callable, Hashable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, PyTree, Real, UInt32

from .._core.arithmetic import full_precision
from .._core.checks import check_instance, check_key, check_positive
from .._core.flat import FlatOperator
from .._core.results import failure, RESULTS
from .._core.sampler import AbstractSampler, draw_for, RademacherSampler, require_key
from .._core.solution import Solution
from .._estimators.hutchinson import HutchinsonEstimator
from .._numerics.dense import normalise
from .._operators.checks import check_is_operator
from .._operators.door import flatten
from .._run.call import call
from .._run.execution import AbstractExecution, Local
from .trace import trace


class DynamicState(eqx.Module):
    """What [`traceax.DynamicTrace`][] knows between updates.

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

    - `parameters`: of the operator.
    - `value`, `std_err`: its trace, and the standard error of that, of shape `()`.
    - `remainder`: what the rounding of `value` has left out, of shape `()`: updates may
        be smaller than its last digit, and add up.
    - `scarcity`: what `std_err` has been widened for, of shape `()`: one over the number
        of probes of the updates that it is known from. 0 before the first update, when
        it is that of another estimate.
    - `count`: how many updates there were, an integer of shape `()`.
    - `key`: the data of the one from which the probes of all further ones are drawn, so
        that states can be saved; `impl` names its generator.
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
    r"""The trace of an operator that changes slowly, as during training: DeltaShift.

    Each update estimates the trace of a difference, which is small where the operator has
    changed little, and so needs few products:

    $$T_t = (1 - \gamma)\, T_{t-1} + \frac1m \sum_i
      \omega_i^* (A_t - (1 - \gamma) A_{t-1})\, \omega_i.$$

    The $\gamma$ with the least variance in the long run is estimated from the same
    products: $1 - \gamma = (1 - \sqrt{1 - \rho^2}) / \rho$ with $\rho = 2 \mathrm{Re}\,
    \langle A_t, A_{t-1} \rangle / (\|A_t\|_F^2 + \|A_{t-1}\|_F^2)$. Where the operator
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
    - `num_probes`: m, 2 or more. An update costs `2 * num_probes` products, m with each
        operator, `O(n m)` operations, and holds `3 m` vectors of length n: the probes and
        their products with both operators.
    - `sampler`: distribution of the probes.
    - `execution`: where and how many at a time products are made.

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

    operator: Callable[[PyTree], lx.AbstractLinearOperator]
    num_probes: int = eqx.field(static=True, default=8)
    sampler: AbstractSampler = RademacherSampler()
    execution: AbstractExecution = Local()

    def __check_init__(self):
        if not callable(self.operator):
            raise TypeError(
                "`operator` must be a function of the parameters to a `lineax` operator. "
                f"Found an object of type {type(self.operator).__name__}. Pass, for "
                "example, `lambda p: traceax.hessian(loss, p)`."
            )
        if check_positive("num_probes", self.num_probes) < 2:
            raise ValueError("`num_probes` must be at least 2. Found 1.")
        check_instance("sampler", self.sampler, AbstractSampler, "RademacherSampler()")
        check_instance("execution", self.execution, AbstractExecution, "Local()")

    def init(
        self, parameters: PyTree, *, key: PRNGKeyArray, k: int, throw: bool = True
    ) -> Solution:
        """A first estimate, by Hutchinson's estimator.

        **Arguments:**

        - `parameters`: of the operator.
        - `key`: a JAX PRNG key, for this and all updates.
        - `k`: the number of products: 2 or more for an error bar, without which the first
            update starts afresh; with `k >= n` exact.
        - `throw`: as in [`traceax.trace`][].

        **Returns:**

        A [`traceax.Solution`][], whose `state` the first update takes. One block of
        probes is held at a time.

        **Raises:**

        As [`traceax.trace`][].
        """
        check_key(key)
        first, rest = jr.split(require_key(key))
        solution = trace(
            self.operator(parameters),
            HutchinsonEstimator(self.sampler),
            k=k,
            key=first,
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
            key=jr.key_data(rest),
            impl=jr.key_impl(rest),
        )
        return eqx.tree_at(
            lambda x: x.state, solution, state, is_leaf=lambda x: x is None
        )

    def update(
        self, state: DynamicState, parameters: PyTree, *, throw: bool = True
    ) -> Solution:
        """The trace for new parameters.

        **Arguments:**

        - `state`: of the last solution.
        - `parameters`: a PyTree like the one before.
        - `throw`: as in [`traceax.trace`][].

        **Returns:**

        A [`traceax.Solution`][] with the next `state`. `std_err` is carried along with
        the value, and no less than its rounding error. `stats` has `"num_matvecs"`, and
        `"gamma"`: 0 where the last estimate is kept whole, and 1 where it is discarded.

        **Raises:**

        - `TypeError`: `state` is not that of a solution; the operator is not of lineax.
        - `ValueError`: the operator for the new parameters has another structure than the
            one for the old ones, or is not square.
        - An `equinox` run-time error with `throw=True`: a product was not finite.
        """
        if not isinstance(state, DynamicState):
            raise TypeError(
                "`state` must be the `state` of a solution of this `DynamicTrace`. Found "
                f"an object of type {type(state).__name__}. Pass, for example, "
                "`dynamic.init(parameters, key=key, k=k).state`."
            )
        arguments = (self, state, parameters)
        name, execution = type(self).__name__, self.execution
        return call(_update, *arguments, name=name, execution=execution, throw=throw)


def _update(dynamic: DynamicTrace, state: DynamicState, parameters: PyTree) -> Solution:
    m, execution = dynamic.num_probes, dynamic.execution
    operators = dynamic.operator(state.parameters), dynamic.operator(parameters)
    for operator in operators:
        check_is_operator(operator)
    before, after = (operator.in_structure() for operator in operators)
    if before != after:
        raise ValueError(
            "`parameters` must be of an operator with the structure of the last one. "
            f"Found in_structure()={after}, and before it {before}."
        )
    old, new = (flatten(operator).frozen for operator in operators)
    key = jr.fold_in(jr.wrap_key_data(state.key, impl=state.impl), state.count)
    probes = draw_for(new, dynamic.sampler, key, jnp.arange(m))
    products = [_apply(execution, each, probes) for each in (old, new)]
    products, scale = normalise(jnp.concatenate(products, axis=1))
    before, after = jnp.split(products, 2, axis=1)
    # NOTE: the paper takes gamma from the same probes and from the variance carried
    # along. Both are correlated with the error, and over many updates the bias adds up.
    # We take the gamma of the steady state, for each half of the probes from the other
    # half, so that T is unbiased.
    norms = _mean_of_others(jnp.sum(jnp.abs(before) ** 2 + jnp.abs(after) ** 2, axis=0))
    cross = 2 * _mean_of_others(jnp.sum((before.conj() * after).real, axis=0))
    ratio = jnp.clip(cross / jnp.where(norms > 0, norms, 1), 0, 1)
    known = jnp.isfinite(state.std_err) & jnp.isfinite(state.value)
    keep = jnp.where(known, ratio / (1 + jnp.sqrt(1 - ratio**2)), 0)
    kept = jnp.mean(keep)
    # All is kept but for a little, or little is. Rounding is relative to that little: if
    # relative to the whole, it would be the same in each update, and add up.
    most = jnp.round(kept)
    little = keep - most
    change = (after - most * before) - little * before
    # A quadratic form in D has at most the variance 2 ||D||_F^2 = 2 E||D w||^2.
    sampled = scale * jnp.linalg.norm(change) * 2**0.5 / m
    scarcity = jnp.where(known, state.scarcity, 0)
    carried = kept * jnp.where(known, state.std_err / _widening(scarcity), 0)
    std_err = jnp.hypot(carried, sampled)
    # Satterthwaite's number of probes, of which those behind older parts are more.
    share = (carried / jnp.where(std_err > 0, std_err, 1)) ** 2
    scarcity = share**2 * scarcity + (1 - share) ** 2 / m
    std_err = std_err * _widening(scarcity)
    last = jnp.where(known, state.value, 0)
    remainder = jnp.where(known, state.remainder, 0)
    moved = scale * jnp.sum(probes.conj() * change) / m + jnp.mean(little) * last
    value, remainder = _two_sum(most * last, moved + kept * remainder)
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
    stats = {"num_matvecs": 2 * m, "gamma": 1 - kept, "std.err": std_err}
    result = failure(~jnp.isfinite(value), RESULTS.nonfinite_product)
    return Solution(value, std_err, result, stats, state)


def _apply(execution: AbstractExecution, operator: FlatOperator, probes: Array) -> Array:
    with full_precision(lambda x: execution.matmat(operator, x)) as matmat:
        return matmat(probes)


def _two_sum(a: Inexact[Array, ""], b: Inexact[Array, ""]) -> tuple[Array, Array]:
    """The sum as it is rounded, and what was lost by that (Knuth)."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


def _widening(scarcity: Real[Array, ""]) -> Real[Array, ""]:
    """How much larger an error bar from few probes has to be: that of a rank-one change
    is small just when the estimate is far off. Fitted to such changes, for 2 probes or
    more."""
    return 1 + scarcity + 4 * scarcity**2


def _mean_of_others(x: Real[Array, " m"]) -> Real[Array, " m"]:
    """For each probe the mean over the half of the probes that it is not in."""
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
