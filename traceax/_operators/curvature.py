"""Curvature matrices of functions at a point x, as operators that are never formed.

    Hessian              v -> d/dt grad f(x + t v) at t = 0    (`hessian`)
    Gauss-Newton matrix  J^T H J of loss(model(x))             (`ggn`)
    Gram matrix          J^T J                                 (`jacobian_gram`)
    empirical Fisher     (1/N) sum_i g_i g_i^T = J^T J / N     (`empirical_fisher`)

J is the Jacobian at x, H the Hessian of the loss at the outputs of the model, and g_i,
the rows of J, are the gradients of N losses. `J v` is a forward-mode derivative and
`J^T u` a reverse-mode one. J is linearised once when an operator is constructed
(`lineax.linearise`): its matvecs do not evaluate the function again.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, PyTree, Scalar

from .._core.checks import check_scalar_function, describe
from .batches import mean_operator
from .differences import hessian_by_differences
from .point import split_point


_Point = TypeVar("_Point", bound=PyTree)
# Both tags: lineax does not conclude that a semidefinite operator is symmetric.
SEMIDEFINITE = (lx.positive_semidefinite_tag, lx.symmetric_tag)


def jacobian_at(
    fn: Callable[[_Point], PyTree[Array]], x: _Point, tags: object = ()
) -> lx.JacobianLinearOperator:
    """The Jacobian of `fn` with respect to the floating-point arrays of `x`; its other
    leaves are constants."""
    params, static = split_point(x)
    return lx.JacobianLinearOperator(
        lambda params, _: fn(eqx.combine(params, static)), params, tags=tags
    )


def check_outputs(name: str, outputs: PyTree, kind: type) -> None:
    """Raise unless the outputs of the function `name` are arrays of dtypes of this kind,
    `jnp.floating` or `jnp.inexact`."""
    dtypes = [jnp.result_type(leaf) for leaf in jax.tree.leaves(outputs)]
    if not dtypes or not all(jnp.issubdtype(dtype, kind) for dtype in dtypes):
        raise TypeError(
            f"`{name}` must return an array, or a PyTree of arrays, of "
            f"{'real ' if kind is jnp.floating else ''}floating-point numbers. Found "
            f"leaves of {[str(dtype) for dtype in dtypes]}. Convert them, or leave out "
            "outputs that have no derivative."
        )


def hessian(
    fn: Callable[..., Scalar],
    x: PyTree,
    batches: PyTree | Iterable[PyTree] | None = None,
    *,
    chunk_size: int = 1,
    product: str = "exact",
) -> lx.AbstractLinearOperator:
    """The Hessian of `fn` at `x`, as an operator that is never formed; or, with batches
    of data, the mean of the Hessians of `x -> fn(x, batch)`.

    !!! Example

        ```python
        import jax.numpy as jnp
        import traceax as tx

        operator = tx.hessian(lambda w: jnp.sum(jnp.sin(w)), jnp.arange(3.0))
        print(f"{tx.trace(operator, k=3).value:.3f}")  # -1.751
        ```

    **Arguments:**

    - `fn`: a twice differentiable function to a real scalar: `fn(x)`, or `fn(x, batch)`
        if there are batches.
    - `x`: the point: any PyTree. Its floating-point arrays, of n entries in all, are the
        variables; its other leaves (an Equinox model has some) are constants.
    - `batches`: the data, in one of two forms:
        - a list or another iterable of batches, such as a data loader, each of which is a
            PyTree of arrays. It is read once, and all of it is kept on the device. The
            last batch, or any other, may have fewer examples;
        - batches that are stacked: a PyTree of arrays, but not a list, whose leading axis
            counts the batches, such as the tuple `(images, labels)` with arrays of shapes
            `(batches, examples, ...)`.

        The mean over batches has weights $n_b / N$ for batches of $n_b$ of $N$ examples.
        For a `fn` that is a mean over the examples of its batch, that is the mean over
        all examples; for a sum over them, multiply it by $N$. The number $n_b$ is the
        length that differs between batches of a list, in the leading axis of their
        arrays. Where none does, and for stacked batches, weights are equal.

        Each matvec is one pass over all batches, with the memory of one chunk of them,
        also in derivatives of any order. Batches of each size have a loop of their own in
        the compiled program. The default, `None`, is for a `fn` of `x` alone.
    - `chunk_size`: how many batches are in a chunk, which is processed at the same time.
        Batches of one size that do not fill the last chunk are a smaller one, which is
        compiled, too. If the leading axis is split over devices, pass the number of
        devices: each device then works on its own batches, and a matvec takes one
        all-reduce.
    - `product`: how matvecs are made. `"exact"` differentiates the gradient in forward
        mode. `"difference"` takes a central difference of two gradients, one after the
        other, in the memory of one; rules of derivatives in `fn`, such as kernels, then
        need no derivatives of their own. Relative errors are below $20
        \\epsilon^{2/3}$ for gradients of the precision $\\epsilon$, 5e-4 in float32 and
        7e-10 in float64, and error bars and intervals count them as rounding, also of
        answers that would be exact. That is measured, and holds where the Hessian varies
        little if every entry of `x` changes by a thousandth of their usual size (in
        float64 by a millionth): scale parameters alike. [`traceax.check_operator`][]
        shows errors that are larger.

    **Returns:**

    A symmetric-tagged operator on PyTrees of the structure of `equinox.filter(x,
    equinox.is_inexact_array)`. One matvec costs about two gradients, with batches of the
    whole data. Memory without batches: the residuals of a gradient of `fn`, and about as
    much again for each vector of a block of probes. By differences a matvec costs two
    gradients, and memory is that of a gradient for each vector of a block. Derivatives
    are those of the differences, and need the memory of exact products.

    **Raises:**

    - `TypeError` if `fn` does not return a real scalar, or `x` has complex arrays or no
        floating ones; for differences if the gradient is coarser than float32.
    - `ValueError` if `batches` has no arrays, or something else in it; if stacked batches
        have leading axes of several lengths; if batches in a list differ in more than the
        number of examples; if `chunk_size` is below 1, or is given without batches; if
        `product` is something else; or for differences if an entry of `x` is a thousand
        times as large as most others (in float64 $10^8$ times). Where `x` is traced, and
        with batches, products are NaN then.
    """
    if product not in ("exact", "difference"):
        raise ValueError(
            '`product` must be "exact" or "difference". Found '
            f'{describe(product)}. Leave it out, or pass `product="difference"` for '
            "the memory of a gradient."
        )
    make = hessian if product == "exact" else hessian_by_differences
    if batches is not None or chunk_size != 1:
        return mean_operator(
            make,
            fn,
            x=x,
            batches=batches,
            chunk_size=chunk_size,
            tags=lx.symmetric_tag,
        )
    if product == "difference":
        return hessian_by_differences(fn, x)
    check_scalar_function("fn", fn, x)
    # The Jacobian of the gradient, in forward mode over reverse mode: each matvec costs
    # about two gradients, whatever n.
    return jacobian_at(eqx.filter_grad(fn), x, lx.symmetric_tag)


def ggn(
    model: Callable[..., PyTree[Array]],
    loss: Callable[..., Scalar],
    x: PyTree,
    batches: PyTree | Iterable[PyTree] | None = None,
    *,
    chunk_size: int = 1,
) -> lx.AbstractLinearOperator:
    """The generalised Gauss-Newton matrix $J^T H J$ of `loss(model(x))`; or, with batches
    of data, the mean of these matrices for `x -> loss(model(x, batch), batch)`.

    $J$ is the Jacobian of `model` at `x`, $H$ the Hessian of `loss` at `model(x)`. With
    a loss that is convex in the outputs (squares, cross-entropy on logits) the matrix is
    positive semidefinite, and it is tagged so; with any other loss the tag is wrong.

    !!! Example

        ```python
        import jax.numpy as jnp
        import traceax as tx

        x, y = jnp.arange(6.0).reshape(3, 2), jnp.ones(3)
        operator = tx.ggn(lambda w: x @ w, lambda z: jnp.sum((z - y) ** 2), jnp.zeros(2))
        print(f"{tx.trace(operator, k=2).value:.1f}")  # 110.0
        ```

    **Arguments:**

    - `model`: from `x` to outputs, any PyTree of floating-point arrays: `model(x)`, or
        `model(x, batch)` if there are batches.
    - `loss`: from the outputs to a real scalar, convex: `loss(outputs)`, or
        `loss(outputs, batch)`.
    - `x`, `batches`, `chunk_size`: as in [`traceax.hessian`][], with a `loss` that is a
        mean over the examples of its batch.

    **Returns:**

    A positive-semidefinite-tagged operator. One matvec costs about one forward-mode
    and one reverse-mode derivative of `model`, and with batches an evaluation. Memory
    without batches: the residuals of a gradient through `model` and `loss`, as long as
    the operator lives, and for each vector of a block of probes the memory of one forward
    and one backward pass through `model`.

    **Raises:**

    `TypeError` if `model` does not return floating-point arrays, or `loss` a real scalar;
    for `x`, `batches` and `chunk_size` as [`traceax.hessian`][].

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
    if batches is not None or chunk_size != 1:
        return mean_operator(
            ggn,
            model,
            loss,
            x=x,
            batches=batches,
            chunk_size=chunk_size,
            tags=SEMIDEFINITE,
        )
    # The loss is differentiated in the outputs, and not in `x`: H has their size.
    jacobian, outputs = jacobian_at(model, x), model(x)
    check_outputs("model", outputs, jnp.floating)
    check_scalar_function("loss", loss, outputs)
    jacobian = lx.linearise(jacobian)
    curvature = lx.linearise(hessian(loss, outputs))
    return lx.TaggedLinearOperator(jacobian.T @ curvature @ jacobian, SEMIDEFINITE)


def jacobian_gram(
    fn: Callable[[_Point], PyTree[Array]], x: _Point
) -> lx.TaggedLinearOperator:
    """The Gram matrix $J^T J$ of the Jacobian of `fn` at `x`; its trace is $\\|J\\|_F^2$.
    Complex outputs count as their real and imaginary parts.

    !!! Example

        ```python
        import jax.numpy as jnp
        import traceax as tx

        operator = tx.jacobian_gram(jnp.square, jnp.arange(4.0))
        print(f"{tx.trace(operator, k=4).value:.1f}")  # 56.0
        ```

    **Arguments:**

    - `fn`: from `x` to any PyTree of floating-point or complex arrays.
    - `x`: the point, as in [`traceax.hessian`][].

    **Returns:**

    A positive-semidefinite-tagged operator. One matvec costs about one forward-mode
    and one reverse-mode derivative of `fn`. Memory: the residuals of a derivative of
    `fn`, as long as the operator lives, and for each vector of a block of probes the
    memory of one forward and one backward pass through `fn`.

    **Raises:**

    `TypeError` if `fn` returns other arrays; for `x` as in [`traceax.hessian`][].
    """
    # Of complex outputs with the Jacobian J, the real part of J* J is meant. It is the
    # Gram matrix of the real and the imaginary parts as separate outputs.
    jacobian = lx.linearise(jacobian_at(lambda x: jax.tree.map(_real_parts, fn(x)), x))
    return lx.TaggedLinearOperator(jacobian.T @ jacobian, SEMIDEFINITE)


def _real_parts(y: Array) -> tuple[Array, ...]:
    """The real and the imaginary part of a complex array, or a real array alone."""
    check_outputs("fn", y, jnp.inexact)
    return (y.real, y.imag) if jnp.iscomplexobj(y) else (y,)


def empirical_fisher(
    losses: Callable[..., Inexact[Array, " examples"]],
    x: PyTree,
    batches: PyTree | Iterable[PyTree] | None = None,
    *,
    chunk_size: int = 1,
) -> lx.AbstractLinearOperator:
    """The empirical Fisher matrix: the mean over examples of $g_i g_i^T$, where $g_i$ is
    the gradient at `x` of the loss of example i.

    That is $J^T J / N$ for the Jacobian $J$ of the $N$ losses. It is neither the Fisher
    matrix, which averages over outputs that the model draws, nor the
    [Gauss-Newton matrix][traceax.ggn], and can differ much from both.

    !!! Example

        ```python
        import jax.numpy as jnp
        import traceax as tx

        x, y = jnp.arange(6.0).reshape(3, 2), jnp.ones(3)
        losses = lambda w: 0.5 * (x @ w - y) ** 2
        operator = tx.empirical_fisher(losses, jnp.zeros(2))
        print(f"{tx.trace(operator, k=2).value:.2f}")  # 18.33
        ```

    **Arguments:**

    - `losses`: returns the losses of all examples, an array of shape `(examples,)` and
        not their mean: `losses(x)`, or `losses(x, batch)` if there are batches.
    - `x`, `batches`, `chunk_size`: as in [`traceax.hessian`][], so that examples of all
        batches have the same weight.

    **Returns:**

    A positive-semidefinite-tagged operator. One matvec costs about one forward-mode
    and one reverse-mode derivative of `losses`, and with batches an evaluation. Without
    batches it takes as much memory as [`traceax.jacobian_gram`][].

    **Raises:**

    `TypeError` if `losses` does not return such an array; for `x`, `batches` and
    `chunk_size` as [`traceax.hessian`][].

    ??? cite

        ```bibtex
        @inproceedings{kunstner2019limitations,
            author    = {Kunstner, Frederik and Balles, Lukas and Hennig, Philipp},
            title     = {Limitations of the Empirical {F}isher Approximation for Natural
                         Gradient Descent},
            booktitle = {Advances in Neural Information Processing Systems},
            volume    = {32},
            year      = {2019},
        }
        ```
    """
    if batches is not None or chunk_size != 1:
        return mean_operator(
            empirical_fisher,
            losses,
            x=x,
            batches=batches,
            chunk_size=chunk_size,
            tags=SEMIDEFINITE,
        )
    out = eqx.filter_eval_shape(losses, x)
    if getattr(out, "ndim", None) != 1 or not jnp.issubdtype(out.dtype, jnp.floating):
        raise TypeError(
            "`losses` must return real floating-point numbers, of shape (examples,): the "
            f"loss of each example. Found {out}. Leave out the mean over examples."
        )
    # J^T J / N = (J / sqrt(N))^T (J / sqrt(N)).
    return jacobian_gram(lambda x: losses(x) / out.size**0.5, x)
