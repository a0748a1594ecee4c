r"""Hessians by central differences of gradients, in the memory of a gradient:

    H v = (g(x + h v) - g(x - h v)) / (2 h),    h max |v_i| = c eps^(1/3) s,

where g is the gradient, eps the precision that it is computed in, c = 0.4, and the scale
s of x is the square of the mean of the roots of |x_i|, which few large entries do not
dominate; or 1 for x = 0. The right-hand side is rounded down to a power of two, `step`,
so that signs and unit vectors are added to x without rounding, up to |x_i| = step / eps.
A product scales with v, and up to a factor of two in h does not depend on the units of x.

Two errors are balanced by h. Truncation, (h^2 / 6) D^4 f [v, v, v], is a multiple of
eps^(2/3) where the Hessian varies on the scale of x. Rounding errors of the gradients are
divided by h. The largest entry of v, and not its norm, bounds the step: the leading
eigenvectors of a network have few large entries, along which it is far stiffer than along
random vectors. The power 1/3 is that of Nocedal and Wright, Numerical Optimization, 2006,
section 8.1.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Bool, PyTree, Real, Scalar

from .._core.approximation import equations, inner_jaxprs, mark_approximation
from .._core.arithmetic import standard_promotion
from .._core.checks import check_scalar_function
from .._core.jax_interfaces import Jaxpr, Literal, Tracer
from .point import split_point


# c, and the relative error of products in units of eps^(2/3): 5e-4 in float32. For a
# transformer of 110,000 parameters in float32, at its start and trained, quadratic forms
# of random signs were off by 3e-4 at most, and products with the leading eigenvector by
# 4e-4. With steps five times as long these would be off by 1e-2.
_STEP, _MARGIN = 0.4, 20
# Entries of x are too large if rounding them moves them by more than this share of a
# step.
_LOST = 1 / 8


class _Differences(eqx.Module):
    """`v -> (g(x + h v) - g(x - h v)) / (2 h)`. Arrays are leaves, and `fn` remains the
    user's object, so that compiled programs are used again."""

    fn: Callable[[PyTree], Scalar]
    params: PyTree[Array]
    static: PyTree
    eps: float = eqx.field(static=True)

    @eqx.filter_jit
    def __call__(self, vector: PyTree[Array]) -> PyTree[Array]:
        with standard_promotion():
            unit, (step, lost) = _largest(vector), _step(self.params, self.eps)
            unit = jnp.where(unit > 0, unit, 1)

        # Without the checkpoint reverse mode would keep the residuals of both gradients.
        @jax.checkpoint
        def gradient(params, vector, sign):
            def move(x, v):
                return (_widen(x) + sign * step * (_widen(v) / unit)).astype(x.dtype)

            with standard_promotion():
                moved = jax.tree.map(move, params, vector)
            with jax.default_matmul_precision("highest"):
                return _gradient(self.fn, moved, self.static)

        # In a loop, so that both gradients take the memory of one.
        def add(total, sign):
            slope = gradient(self.params, vector, sign)
            with standard_promotion():
                add_leaf = lambda t, g: t + sign * _widen(g)  # noqa: E731
                return jax.tree.map(add_leaf, total, slope), None

        zeros = jax.tree.map(lambda v: jnp.zeros_like(_widen(v)), vector)
        signs = jnp.array([1, -1], jnp.float32)
        total, _ = jax.lax.scan(add, zeros, signs)
        with standard_promotion():
            factor = jnp.where(lost, jnp.nan, unit / (2 * step))
            image = jax.tree.map(lambda t, v: (factor * t).astype(v.dtype), total, vector)
        return mark_approximation(image, _MARGIN * self.eps ** (2 / 3))


def hessian_by_differences(fn: Callable[[PyTree], Scalar], x: PyTree) -> Any:
    """The Hessian of `fn` at `x`, by differences of gradients."""
    check_scalar_function("fn", fn, x)
    params, static = split_point(x)
    params = jax.tree.map(jnp.asarray, params)
    traced = jax.make_jaxpr(lambda params: _gradient(fn, params, static))(params)
    coarsest = max(_dtypes(traced.jaxpr), key=lambda x: float(jnp.finfo(x).eps))
    eps = float(jnp.finfo(coarsest).eps)
    if eps > float(jnp.finfo(jnp.float32).eps):
        raise TypeError(
            "`x` and the gradient of `fn` must be in float32 or float64 for "
            f'`product="difference"`. Found {coarsest}, in which differences of '
            'gradients have no digit. Convert them, or take `product="exact"`.'
        )
    _, lost = _step(params, eps)
    if not isinstance(lost, Tracer) and bool(lost):
        raise ValueError(
            "`x` must have entries of about one size. Found the largest one, "
            f"{float(_largest(params)):.1e}, so much above the usual size, "
            f"{float(_scale(params)):.1e}, that a difference of gradients would be lost "
            'in rounding. Scale the parameters, or take `product="exact"`.'
        )
    product = _Differences(fn=fn, params=params, static=static, eps=eps)
    structure = jax.eval_shape(lambda: params)
    return lx.FunctionLinearOperator(
        product, structure, lx.symmetric_tag, closure_convert=False
    )


def _gradient(fn: Callable[[PyTree], Scalar], params: PyTree, static: PyTree) -> PyTree:
    return jax.grad(lambda params: fn(eqx.combine(params, static)))(params)


def _dtypes(jaxpr: Jaxpr) -> Iterator[jnp.dtype]:
    """The floating dtypes of the variables, and of all that is computed from them. Data
    in a coarser dtype do not make the gradient coarse."""
    dependent = set(jaxpr.invars)
    yield from _floating(jaxpr.invars)
    for eqn in jaxpr.eqns:
        if any(x in dependent for x in eqn.invars if not isinstance(x, Literal)):
            dependent.update(eqn.outvars)
            inner = (each for code in inner_jaxprs(eqn) for each in equations(code))
            for each in (eqn, *inner):
                yield from _floating(each.outvars)


def _floating(variables: Sequence[Any]) -> Iterator[jnp.dtype]:
    dtypes = [getattr(x.aval, "dtype", None) for x in variables]
    return (x for x in dtypes if x and jnp.issubdtype(x, jnp.floating))


def _widen(x: Array) -> Array:
    """At least float32: a step would be lost in a coarser dtype."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _largest(tree: PyTree[Array]) -> Real[Array, ""]:
    """The largest modulus of all entries. It is a step's unit, constant to derivatives:
    those of a product are differences of Hessians."""
    leaves = [x for x in jax.tree.leaves(jax.lax.stop_gradient(tree)) if x.size]
    return jnp.max(jnp.stack([jnp.max(jnp.abs(_widen(x))) for x in leaves]))


def _scale(tree: PyTree[Array]) -> Real[Array, ""]:
    """The square of the mean root of the moduli of all entries; 1 if all are zero."""
    leaves = jax.tree.leaves(jax.lax.stop_gradient(tree))
    roots = sum(jnp.sum(jnp.sqrt(jnp.abs(_widen(x)))) for x in leaves)
    scale = (roots / sum(x.size for x in leaves)) ** 2
    return jnp.where(scale > 0, scale, 1)


def _step(params: PyTree[Array], eps: float) -> tuple[Array, Bool[Array, ""]]:
    """The largest change of an entry, and whether an entry is too large for it."""
    with standard_promotion():
        _, exponent = jnp.frexp(_STEP * eps ** (1 / 3) * _scale(params))
        step = jnp.ldexp(jnp.ones((), _scale(params).dtype), exponent - 1)
        return step, eps * _largest(params) > _LOST * step
