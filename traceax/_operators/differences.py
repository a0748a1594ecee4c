"""Hessians by central differences of gradients, in the memory of a gradient:

    H v = (g(x + h v) - g(x - h v)) / (2 h),    h = c eps^(1/3) rms(x) / max |v_i|,

where g is the gradient, eps the precision that it is computed in, rms(x) the root mean
square of all entries of x, and c = 0.2. A product scales with v, and does not depend on
the units of x.

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
from jaxtyping import Array, PyTree, Real, Scalar

from .._core.approximation import equations, inner_jaxprs, mark_approximation
from .._core.arithmetic import standard_promotion
from .._core.checks import check_scalar_function
from .._core.jax_interfaces import Jaxpr, Literal
from .point import split_point


# c, and the relative error of products in units of eps^(2/3). For a transformer in
# float32, at its start and trained, products with random vectors and with the leading
# eigenvector had errors of 1e-4 to 7e-4, which is 4 to 29 of these units. With c = 1 the
# latter would have 1e-2.
_STEP, _MARGIN = 0.2, 20


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
            size, unit = _size(self.params), _largest(vector)
            unit = jnp.where(unit > 0, unit, 1)
            step = _STEP * self.eps ** (1 / 3) * jnp.where(size > 0, size, 1)

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
            divide = lambda t, v: (t * (unit / (2 * step))).astype(v.dtype)  # noqa: E731
            image = jax.tree.map(divide, total, vector)
        return mark_approximation(image, _MARGIN * self.eps ** (2 / 3))


def hessian_by_differences(fn: Callable[[PyTree], Scalar], x: PyTree) -> Any:
    """The Hessian of `fn` at `x`, by differences of gradients."""
    check_scalar_function("fn", fn, x)
    params, static = split_point(x)
    params = jax.tree.map(jnp.asarray, params)
    traced = jax.make_jaxpr(lambda params: _gradient(fn, params, static))(params)
    eps = max(float(jnp.finfo(dtype).eps) for dtype in _dtypes(traced.jaxpr))
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


def _size(tree: PyTree[Array]) -> Real[Array, ""]:
    """The root mean square of all entries, constant to derivatives."""
    largest, leaves = _largest(tree), jax.tree.leaves(jax.lax.stop_gradient(tree))
    unit = jnp.where(largest > 0, largest, 1)
    squares = sum(jnp.sum((_widen(x) / unit) ** 2) for x in leaves)
    return unit * jnp.sqrt(squares / sum(x.size for x in leaves))
