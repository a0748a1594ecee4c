import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Inexact, Int, PyTree, Real

from .jax_interfaces import Tracer
from .moments import sampling_quantiles
from .results import RESULTS


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
    - `proven_bounds`: the same without an estimate of the quadrature error; None if they
        are as far apart as `bounds`.
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
    proven_bounds: Real[Array, "2 2 *q"] | None = None

    def map_bounds(
        self, fn: Callable[[Real[Array, "2 2 *q"]], Real[Array, "2 2 *q"]]
    ) -> "Estimate":
        """The same with `fn` of either kind of bounds, where there are any."""
        kinds = {"bounds": self.bounds, "proven_bounds": self.proven_bounds}
        return dataclasses.replace(
            self, **{name: fn(x) for name, x in kinds.items() if x is not None}
        )


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
        print(solution.successful)  # True
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
    - `successful`: whether that is `RESULTS.successful`, a boolean array of shape `()`.
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
        self, confidence: Any = 0.95, *, proven: bool | None = None
    ) -> tuple[PyTree[Inexact[Array, "..."]], PyTree[Inexact[Array, "..."]]]:
        """A confidence interval, which counts the errors of sampling, of quadrature and
        of rounding.

        The sampling error is the standard error times a quantile of Student's t for the
        number of samples, above 95% widened for the skewness of the samples. For
        functions of operators, log-determinants and Schatten norms it is added at both
        ends of `stats["bounds"]`, each with its own standard error. The quadrature error
        in these is an estimate, which measurements support for intervals of up to 95%.
        For more confidence, or with `proven=True`, `stats["proven_bounds"]` take their
        place, in which no error is estimated where bounds are known. They may be far
        apart, and one of them is infinite where the function is infinite at zero and the
        operator cannot be told from a singular one. Look at `result` first: where a call
        failed, the interval means nothing.

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
        - `proven`: whether to take the bounds that are proven. Default: where
            `confidence` is above 0.95.

        **Returns:**

        Lower and upper end, each of the structure of `value`. Entries of a diagonal have
        an interval each, and so have the real and the imaginary part of a complex value.

        **Raises:**

        `TypeError` for a `confidence` that is no number, `ValueError` for one that is not
        between 0 and 1, or an `equinox` run-time error where it is traced. `ValueError`
        for a batch of solutions.
        """
        names = "bounds", "proven_bounds", "samples", "num_samples", "skewness"
        known = {name: self.stats[name] for name in names if name in self.stats}
        dimensions = {"num_matvecs": 0, "num_samples": 0, "samples": 1}
        shapes = {name: jnp.shape(self.stats.get(name, 0)) for name in dimensions}
        if any(len(shapes[name]) > least for name, least in dimensions.items()):
            raise ValueError(
                "This is a batch of solutions. Take one at a time: `jax.vmap(lambda "
                "solution: solution.interval())(solutions)`."
            )
        answer = jax.lax.stop_gradient((self.value, self.std_err, known))
        return _interval(*answer, _checked(confidence), proven)

    @property
    def successful(self) -> Bool[Array, "..."]:
        """Whether the call succeeded; of a batch of solutions, an array."""
        return self.result == RESULTS.successful

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
    value: PyTree[Array],
    std_err: PyTree[Array],
    known: dict[str, Any],
    confidence: Array,
    proven: bool | None,
) -> tuple[PyTree[Array], PyTree[Array]]:
    quantiles = sampling_quantiles(confidence, value, known)
    by_proof = confidence > 0.95 if proven is None else jnp.asarray(proven)

    def end(side, value, std_err, quantile, bounds=None):
        beyond = 0
        if bounds is not None:
            bound, std_err = bounds[0] if side < 0 else bounds[1]
            beyond = jnp.maximum(side * (bound - value.real), 0)
            beyond = jnp.where(bound == value.real, 0, beyond)  # if both are infinite
        half = side * (beyond + quantile.astype(std_err.dtype) * std_err)
        return value + (jax.lax.complex(half, half) if jnp.iscomplexobj(value) else half)

    leaves = [value, std_err, quantiles]
    if "bounds" in known:
        both = known["proven_bounds"], known["bounds"]
        leaves.append(jax.tree.map(ft.partial(jnp.where, by_proof), *both))
    low, high = (jax.tree.map(ft.partial(end, side), *leaves) for side in (-1, 1))
    return low, high
