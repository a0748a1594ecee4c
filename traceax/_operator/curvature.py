from collections.abc import Callable
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, PyTree, Scalar


_Point = TypeVar("_Point", bound=PyTree)
_SEMIDEFINITE = (lx.positive_semidefinite_tag, lx.symmetric_tag)


def _jacobian(
    fn: Callable[[_Point], PyTree[Array]], x: _Point, tags: object = ()
) -> lx.JacobianLinearOperator:
    """Jacobian of `fn` in the floating-point arrays of `x`, the rest held constant."""
    params, static = eqx.partition(x, eqx.is_inexact_array)
    leaves = jax.tree.leaves(params)
    if not leaves or any(jnp.iscomplexobj(leaf) for leaf in leaves):
        found = sorted({str(jnp.result_type(leaf)) for leaf in jax.tree.leaves(x)})
        raise TypeError(
            "`x` must hold at least one real floating-point array, and no complex one. "
            f"Found leaves of dtype {found}. Pass complex parameters as their real and "
            "imaginary parts."
        )
    return lx.JacobianLinearOperator(
        lambda params, _: fn(eqx.combine(params, static)), params, tags=tags
    )


def _check_scalar(name: str, fn: Callable[[_Point], Scalar], x: _Point) -> None:
    out = eqx.filter_eval_shape(fn, x)
    if getattr(out, "shape", None) != () or not jnp.issubdtype(out.dtype, jnp.floating):
        fix = "Reduce it, for example with `jnp.sum` or `jnp.mean`."
        if getattr(out, "shape", None) == ():
            fix = "Pass floating-point numbers, for example `x.astype(float)`."
        raise TypeError(
            f"`{name}` must return a real floating-point scalar, of shape (). Found "
            f"{out}. {fix}"
        )


def hessian(f: Callable[[_Point], Scalar], x: _Point) -> lx.JacobianLinearOperator:
    """The Hessian of `f` at `x`, as an operator that is never formed.

    !!! Example

        ```python
        import jax.numpy as jnp
        import traceax as tx

        operator = tx.hessian(lambda w: jnp.sum(jnp.sin(w)), jnp.arange(3.0))
        print(f"{tx.trace(operator, k=3).value:.3f}")  # -1.751
        ```

    **Arguments:**

    - `f`: a twice differentiable function to a real scalar.
    - `x`: the point: any PyTree. Its floating-point arrays, of n entries in all, are the
        variables; its other leaves (an Equinox model has some) are constants.

    **Returns:**

    A symmetric-tagged `lineax.JacobianLinearOperator` on PyTrees of the structure of
    `equinox.filter(x, equinox.is_inexact_array)`. One product costs about two gradients.

    **Raises:**

    `TypeError` if `f(x)` is not a real scalar, or `x` has complex arrays or no floating
    ones.
    """
    _check_scalar("f", f, x)
    return _jacobian(eqx.filter_grad(f), x, lx.symmetric_tag)


def ggn(
    model: Callable[[_Point], PyTree[Array]],
    loss: Callable[[PyTree[Array]], Scalar],
    x: _Point,
) -> lx.TaggedLinearOperator:
    """The generalised Gauss-Newton matrix $J^T H J$ of `loss(model(x))`.

    $J$ is the Jacobian of `model` at `x`, $H$ the Hessian of `loss` at `model(x)`. With
    a loss convex in the outputs (squares, cross-entropy on logits) it is positive
    semidefinite, and it is tagged so; with any other loss the tag is wrong.

    !!! Example

        ```python
        import jax.numpy as jnp
        import traceax as tx

        x, y = jnp.arange(6.0).reshape(3, 2), jnp.ones(3)
        operator = tx.ggn(lambda w: x @ w, lambda z: jnp.sum((z - y) ** 2), jnp.zeros(2))
        print(f"{tx.trace(operator, k=2).value:.1f}")  # 110.0
        ```

    **Arguments:**

    - `model`: from `x` to outputs, any PyTree of floating-point arrays.
    - `loss`: from the outputs to a real scalar, convex.
    - `x`: the point, as in [`traceax.hessian`][].

    **Returns:**

    A positive-semidefinite-tagged operator. One product costs about one forward-mode
    and one reverse-mode derivative of `model`.

    **Raises:**

    `TypeError` if `loss` does not return a real scalar, or for `x` as in
    [`traceax.hessian`][].

    ??? cite

        ```bibtex
        @article{schraudolph2002fast,
            author  = {Schraudolph, Nicol N.},
            title   = {Fast Curvature Matrix-Vector Products for Second-Order
                       Gradient Descent},
            journal = {Neural Computation},
            volume  = {14},
            number  = {7},
            pages   = {1723--1738},
            year    = {2002},
        }
        ```
    """
    jacobian = lx.linearise(_jacobian(model, x))
    outputs = model(x)
    _check_scalar("loss", loss, outputs)
    curvature = lx.linearise(hessian(loss, outputs))
    return lx.TaggedLinearOperator(jacobian.T @ curvature @ jacobian, _SEMIDEFINITE)


def jacobian_gram(
    f: Callable[[_Point], PyTree[Array]], x: _Point
) -> lx.TaggedLinearOperator:
    """The Gram matrix $J^T J$ of the Jacobian of `f` at `x`; its trace is $\\|J\\|_F^2$.

    !!! Example

        ```python
        import jax.numpy as jnp
        import traceax as tx

        operator = tx.jacobian_gram(jnp.square, jnp.arange(4.0))
        print(f"{tx.trace(operator, k=4).value:.1f}")  # 56.0
        ```

    **Arguments:**

    - `f`: from `x` to any PyTree of floating-point arrays.
    - `x`: the point, as in [`traceax.hessian`][].

    **Returns:**

    A positive-semidefinite-tagged operator. One product costs about one forward-mode
    and one reverse-mode derivative of `f`.

    **Raises:**

    `TypeError` for `x` as in [`traceax.hessian`][].
    """
    jacobian = lx.linearise(_jacobian(f, x))
    return lx.TaggedLinearOperator(jacobian.T @ jacobian, _SEMIDEFINITE)
