"""Functions of several estimates, with one error bar.

For estimates T_1 .. T_p with error bars e_j and correlation R, a smooth function f has to
second order the variance and the bias

    var f(T) = u* R u + tr((K R)^2) / 2,    bias = tr(K R) / 2,
    u_j = e_j df/dT_j,    K_jl = e_j e_l d2f/dT_j dT_l,

for normal errors (the delta method; Kendall and Stuart, The Advanced Theory of
Statistics, volume 1, section 10.6). With few samples the second-order terms count; the
bias is not taken off the value but added to its error bar.

Skewed samples have a small spread just when their mean is far off, on the side of the
long tail. There f changes by more than its slope says if it curves to the same side, as
squares of traces do. An interval that reaches q error bars far then has to be longer by

    q kappa / 2,    kappa = v* K v / u* R u,    v = R u,

the second-order term at the end of the interval of `u t`.

Where f divides by an estimate whose interval contains zero, or takes its logarithm or a
root, the expansion means nothing. The arguments of such operations are its *critical*
numbers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Real

from .covariance import Correlation
from .jax_interfaces import ClosedJaxpr, jaxpr_as_fun, JaxprEqn


class Propagated(eqx.Module):
    """The first and the second order of a function of estimates, for its o results.

    - `slopes`: the derivatives u, in units of error bars, shape `(o, p)`.
    - `std_err`: the standard error, shape `(o,)`; infinite where a critical number may be
        zero.
    - `correlation`: the correlation of the results to first order, shape `(o, o)`.
    - `near_zero`: whether a critical number may be zero.
    """

    slopes: Real[Array, "o p"]
    std_err: Real[Array, " o"]
    correlation: Real[Array, "o o"]
    near_zero: Bool[Array, ""]


def propagate(
    fn: Callable[[Real[Array, " p"]], Real[Array, " o"]],
    at: Real[Array, " p"],
    std_err: Real[Array, " p"],
    rounding: Real[Array, " p"],
    correlation: Correlation,
    quantile: Real[Array, ""],
    reach: Real[Array, " p"],
) -> Propagated:
    """The error bars of `fn(at)` from those of its arguments, of which `rounding` is the
    part that is independent in each. `quantile` times `reach` is half the width of their
    intervals, in which critical numbers must not be zero."""
    known = jnp.isfinite(std_err)
    finite = jnp.where(known, std_err, 0)

    # In units of error bars, so that squares neither overflow nor underflow.
    def scaled(x):
        return fn(at + finite * x)

    origin = jnp.zeros_like(at)
    slopes, curvatures = _derivatives(scaled, origin)
    # What is known without an error has no derivatives but rounding errors.
    uncertain = finite > 0
    slopes = jnp.where(uncertain, slopes, 0)
    curvatures = jnp.where(uncertain & uncertain[:, None], curvatures, 0)
    unit = jnp.maximum(jnp.max(jnp.abs(slopes), 1), jnp.max(jnp.abs(curvatures), (1, 2)))
    unit = jnp.where((unit > 0) & jnp.isfinite(unit), unit, 1)
    u, k = slopes / unit[:, None], curvatures / unit[:, None, None]
    matrix = correlation.matrix
    mixed = jnp.einsum("oij,jl->oil", k, matrix, precision="highest")
    share = jnp.where(finite > 0, rounding / jnp.where(finite > 0, finite, 1), 0)
    first = _covariance(u, jnp.minimum(share, 1), correlation)
    variance = jnp.diagonal(first)
    second = jnp.maximum(jnp.einsum("oij,oji->o", mixed, mixed, precision="highest"), 0)
    bias = jnp.trace(mixed, axis1=1, axis2=2) / 2
    v = u @ matrix
    bend = jnp.einsum("oi,oij,oj->o", v, k, v) / jnp.where(variance > 0, variance, 1)
    bend = jnp.clip(bend, -jnp.sqrt(second), jnp.sqrt(second))
    outward = bend * correlation.third_moments(u) > 0
    longer = jnp.where(outward, quantile.astype(u.dtype) / 2 * jnp.abs(bend), 0)
    total = unit * jnp.sqrt((jnp.sqrt(variance) + longer) ** 2 + second / 2 + bias**2)
    # An argument whose error is not known leaves that of each result unknown.
    unknown = ~known & (jax.jacfwd(fn)(at) != 0)
    # Not by way of `scaled`: an interval may be wider than the error bar says.
    reach = jnp.where(jnp.isfinite(reach), reach, 0)
    near_zero = _may_be_zero(
        lambda x: fn(at + reach * x), origin, share, correlation, quantile
    )
    unbounded = jnp.any(unknown, axis=1) | near_zero | ~jnp.isfinite(total)
    size = jnp.sqrt(variance)
    size = jnp.where(size > 0, size, 1)
    related = jnp.where(jnp.eye(len(size), dtype=bool), 1, first / size / size[:, None])
    return Propagated(slopes, jnp.where(unbounded, jnp.inf, total), related, near_zero)


def _derivatives(
    fn: Callable[[Real[Array, " p"]], Real[Array, " o"]], at: Real[Array, " p"]
) -> tuple[Real[Array, "o p"], Real[Array, "o p p"]]:
    """First and second derivatives. Rules of derivatives may overflow or underflow where
    the function does not: that of 1 / x contains 1 / x^2. There differences over a step
    of 1, one error bar, take their place."""
    slopes, curvatures = jax.jacfwd(fn)(at), jax.jacfwd(jax.jacfwd(fn))(at)
    steps = jnp.eye(at.size, dtype=at.dtype)
    ahead, behind = jax.vmap(fn)(at + steps).T, jax.vmap(fn)(at - steps).T
    difference, bend = (ahead - behind) / 2, ahead + behind - 2 * fn(at)[:, None]
    lost = ~(jnp.abs(slopes) >= jnp.abs(difference) / _MISMATCH)
    slopes = jnp.where(lost & jnp.isfinite(difference), difference, slopes)
    bend = jnp.where(steps > 0, jnp.where(jnp.isfinite(bend), bend, 0)[:, None], 0)
    return slopes, jnp.where(jnp.isfinite(curvatures), curvatures, bend)


def _covariance(
    u: Real[Array, "o p"], share: Real[Array, " p"], correlation: Correlation
) -> Real[Array, "o o"]:
    """The covariance of sums of numbers with error bars of 1, if that share of each bar
    is independent of the others."""
    alone = u * share
    common = correlation.covariance(u * jnp.sqrt((1 - share) * (1 + share)))
    return common + jnp.matmul(alone, alone.T, precision="highest")


def _may_be_zero(
    fn: Callable[[Array], Array],
    at: Real[Array, " p"],
    share: Real[Array, " p"],
    correlation: Correlation,
    quantile: Real[Array, ""],
) -> Bool[Array, ""]:
    """Whether the interval of a critical number contains zero."""
    code = jax.make_jaxpr(fn)(at)

    def critical(x):
        numbers = [jnp.ravel(y) for y in _critical_numbers(code, [x])]
        parts = [jnp.abs(y) if jnp.iscomplexobj(y) else y for y in numbers]
        return jnp.concatenate([jnp.zeros(0, at.dtype), *parts])

    numbers, slopes = critical(at), jax.jacfwd(critical)(at)
    size = jnp.max(jnp.abs(slopes), axis=1, initial=0)
    unit = slopes / jnp.where(size > 0, size, 1)[:, None]
    error = size * jnp.sqrt(jnp.diagonal(_covariance(unit, share, correlation)))
    # A constant is what it is, zero or not; but an exact zero may be a pole.
    pole = jnp.any(numbers == 0) & ~jnp.all(jnp.isfinite(fn(at)))
    return pole | jnp.any((size > 0) & (jnp.abs(numbers) <= quantile * error))


# Slopes that are so many times smaller than differences over an error bar have lost their
# digits. Those of smooth functions are about equal, unless the slope is zero nearby.
_MISMATCH = 16

# The operand of each primitive that has a pole or a branch point at zero, or for `log1p`
# at -1.
_CRITICAL = {"div": 1, "log": 0, "log1p": 0, "rsqrt": 0, "sqrt": 0, "cbrt": 0, "pow": 0}
# The parameters with the code of a function that is called.
_CALLED = ("jaxpr", "call_jaxpr")
_LOOPS = ("scan", "while", "cond")


def _critical_operand(eqn: JaxprEqn) -> int | None:
    name = eqn.primitive.name
    if name == "integer_pow":
        return 0 if eqn.params["y"] < 0 else None
    return _CRITICAL.get(name)


def _critical_numbers(code: ClosedJaxpr, args: Sequence[Array]) -> list[Array]:
    """The critical numbers of traced code, and of the functions that it calls. Those
    inside of loops and branches are not found."""
    numbers = []
    for eqn in code.jaxpr.eqns:
        name = eqn.primitive.name
        inner = next((eqn.params[x] for x in _CALLED if x in eqn.params), None)
        operand = _critical_operand(eqn)
        if operand is not None:
            (number,) = _values(code, [eqn.invars[operand]], args)
            numbers.append(1 + number if name == "log1p" else number)
        elif isinstance(inner, ClosedJaxpr) and name not in _LOOPS:
            numbers += _critical_numbers(inner, _values(code, eqn.invars, args))
    return numbers


def _values(code: ClosedJaxpr, of: Sequence[Any], args: Sequence[Array]) -> list[Array]:
    """The values of variables of traced code."""
    jaxpr = code.jaxpr.replace(outvars=list(of))
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, code.consts))(*args)
