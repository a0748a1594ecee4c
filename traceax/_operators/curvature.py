import functools as ft
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Inexact, PyTree, Scalar, Shaped

from .._core.arithmetic import standard_promotion
from .._core.checks import check_positive, check_scalar_function


_Point = TypeVar("_Point", bound=PyTree)
_SEMIDEFINITE = (lx.positive_semidefinite_tag, lx.symmetric_tag)


def _on_device(x: PyTree) -> PyTree:
    """NumPy's arrays in bfloat16, which it does not know to be inexact, as those of
    JAX."""

    def convert(leaf):
        array = isinstance(leaf, np.ndarray) and not eqx.is_inexact_array(leaf)
        inexact = array and jnp.issubdtype(leaf.dtype, jnp.inexact)
        return jnp.asarray(leaf) if inexact else leaf

    return jax.tree.map(convert, x)


def _jacobian(
    fn: Callable[[_Point], PyTree[Array]], x: _Point, tags: object = ()
) -> lx.JacobianLinearOperator:
    """Jacobian of `fn` in the floating-point arrays of `x`, the rest held constant."""
    params, static = eqx.partition(_on_device(x), eqx.is_inexact_array)
    leaves = jax.tree.leaves(params)
    if not leaves or any(jnp.iscomplexobj(leaf) for leaf in leaves):
        arrays = filter(eqx.is_array_like, jax.tree.leaves(x))
        found = sorted({str(jnp.result_type(leaf)) for leaf in arrays})
        raise TypeError(
            "`x` must hold at least one real floating-point array, and no complex one. "
            f"Found leaves of dtype {found}. Pass complex parameters as their real and "
            "imaginary parts."
        )
    return lx.JacobianLinearOperator(
        lambda params, _: fn(eqx.combine(params, static)), params, tags=tags
    )


def _check_outputs(name: str, outputs: PyTree, kind: type) -> None:
    dtypes = [jnp.result_type(leaf) for leaf in jax.tree.leaves(outputs)]
    if not dtypes or not all(jnp.issubdtype(dtype, kind) for dtype in dtypes):
        raise TypeError(
            f"`{name}` must return an array, or a PyTree of arrays, of "
            f"{'real ' if kind is jnp.floating else ''}floating-point numbers. Found "
            f"leaves of {[str(dtype) for dtype in dtypes]}. Convert them, or leave out "
            "what is not to be differentiated."
        )


class _MeanProduct(eqx.Module):
    """`v -> mean over b of operator(b) v`, where `operator(b)` is what `make` gives of
    the functions `p -> fn(p, b)` and of `x`. Functions that stay the same objects, and
    arrays that are leaves, are what lets compiled programs be used again."""

    make: Callable[..., lx.AbstractLinearOperator]
    fns: tuple[Callable[..., Any], ...]
    x: PyTree
    batches: PyTree[Array]
    at_once: int = eqx.field(static=True)

    @eqx.filter_jit
    def __call__(self, vector: PyTree[Array]) -> PyTree[Array]:
        # Neither the forward nor the backward pass keeps residuals of more than one
        # batch.
        @ft.partial(jax.checkpoint, prevent_cse=False)
        def product(batch):
            fns = [lambda point, fn=fn: fn(point, batch) for fn in self.fns]
            return self.make(*fns, self.x).mv(vector)

        def add(total, batch):
            image = product(batch)
            return jax.tree.map(lambda t, y: t + y.astype(t.dtype), total, image), None

        def total(batches):
            return jax.lax.scan(add, zeros, batches)[0]

        with standard_promotion():
            zeros = jax.tree.map(
                lambda v: jnp.zeros_like(v, jnp.promote_types(v.dtype, jnp.float32)),
                vector,
            )
        count = len(jax.tree.leaves(self.batches)[0])
        if self.at_once == 1:
            sums = total(self.batches)
        else:
            size = (self.at_once, count // self.at_once)
            lanes = jax.tree.map(lambda b: b.reshape(*size, *b.shape[1:]), self.batches)
            sums = jax.tree.map(lambda t: jnp.sum(t, axis=0), jax.vmap(total)(lanes))
        return jax.tree.map(lambda t, v: (t / count).astype(v.dtype), sums, vector)


def _check_batches(batches: Any, at_once: int) -> PyTree[Shaped[Array, "b ..."]]:
    if batches is None:
        raise ValueError(
            "`at_once` is how many of the `batches` are processed at the same time. "
            f"Found at_once={at_once!r} without `batches`."
        )
    leaves = jax.tree.leaves(batches)
    shapes = [jnp.shape(leaf) if eqx.is_array_like(leaf) else None for leaf in leaves]
    counts = {shape[0] if shape else 0 for shape in shapes}
    parts = batches if isinstance(batches, list) else []
    kinds = {(jax.tree.structure(b), *map(np.shape, jax.tree.leaves(b))) for b in parts}
    listed = len(parts) > len(kinds) == 1
    if listed or len(counts) != 1 or 0 in counts:
        found = [
            type(leaf).__name__ if shape is None else shape
            for leaf, shape in zip(leaves, shapes, strict=True)
        ]
        raise ValueError(
            "`batches` must be an array, or a PyTree of arrays, with one leading axis of "
            f"the same length: the number of batches. Found leaves of shapes {found}"
            f"{', in a list of batches (or make it a tuple)' if listed else ''}. "
            "Stack batches of one size, as by `jax.tree.map(lambda *xs: jnp.stack(xs), "
            "*list_of_batches)`; fill up the last one, with weights of zero that are a "
            "part of the batch, or leave it out."
        )
    (count,) = counts
    if count % check_positive("at_once", at_once):
        raise ValueError(
            f"`at_once` must divide the number of batches. Found {at_once}, and {count} "
            "batches, the length of the leading axis of `batches`."
        )
    return jax.tree.map(jnp.asarray, batches)


def _mean(
    make: Callable[..., lx.AbstractLinearOperator],
    fns: tuple[Callable[..., Any], ...],
    x: PyTree,
    batches: PyTree,
    at_once: int,
    tags: object,
) -> lx.FunctionLinearOperator:
    """The mean over batches of `make(*fns, x)`, one product a pass over the data."""
    batches = _check_batches(batches, at_once)
    structure = jax.eval_shape(lambda: eqx.filter(_on_device(x), eqx.is_inexact_array))
    product = _MeanProduct(make, fns, x, batches, at_once)
    operator = lx.FunctionLinearOperator(product, structure, tags, closure_convert=False)
    # This checks `x` and what the functions return.
    operator.out_structure()
    return operator


def hessian(
    f: Callable[..., Scalar],
    x: PyTree,
    batches: PyTree | None = None,
    *,
    at_once: int = 1,
) -> lx.AbstractLinearOperator:
    """The Hessian of `f` at `x`, as an operator that is never formed; or, with batches
    of data, the mean of the Hessians of `x -> f(x, batch)`.

    !!! Example

        ```python
        import jax.numpy as jnp
        import traceax as tx

        operator = tx.hessian(lambda w: jnp.sum(jnp.sin(w)), jnp.arange(3.0))
        print(f"{tx.trace(operator, k=3).value:.3f}")  # -1.751
        ```

    **Arguments:**

    - `f`: a twice differentiable function to a real scalar: `f(x)`, or `f(x, batch)` if
        there are batches.
    - `x`: the point: any PyTree. Its floating-point arrays, of n entries in all, are the
        variables; its other leaves (an Equinox model has some) are constants.
    - `batches`: any PyTree of arrays whose leading axis counts the batches, as
        `(images, labels)` of shapes `(batches, examples, ...)`. Each product runs
        through all of them, with the memory of `at_once` batches, in derivatives of any
        order too. The default, `None`, is for an `f` of `x` alone.
    - `at_once`: how many batches are processed at the same time; a divisor of their
        number. Where the leading axis is split over devices, pass the number of
        devices: each then works on its own batches, and a product is one all-reduce.

    **Returns:**

    A symmetric-tagged operator on PyTrees of the structure of `equinox.filter(x,
    equinox.is_inexact_array)`. One product costs about two gradients, of the whole data
    where there are batches. Memory without batches: what a gradient of `f` keeps, and
    about as much again for each vector of a block of probes.

    **Raises:**

    - `TypeError` if `f` does not return a real scalar, or `x` has complex arrays or no
        floating ones.
    - `ValueError` if `batches` is a list of alike elements, or has no arrays or axes of
        several lengths; or `at_once` does not divide that length, or is without batches.
    """
    if batches is not None or at_once != 1:
        return _mean(hessian, (f,), x, batches, at_once, lx.symmetric_tag)
    check_scalar_function("f", f, x)
    return _jacobian(eqx.filter_grad(f), x, lx.symmetric_tag)


def ggn(
    model: Callable[..., PyTree[Array]],
    loss: Callable[..., Scalar],
    x: PyTree,
    batches: PyTree | None = None,
    *,
    at_once: int = 1,
) -> lx.AbstractLinearOperator:
    """The generalised Gauss-Newton matrix $J^T H J$ of `loss(model(x))`; or, with batches
    of data, the mean of those of `x -> loss(model(x, batch), batch)`.

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

    - `model`: from `x` to outputs, any PyTree of floating-point arrays: `model(x)`, or
        `model(x, batch)` if there are batches.
    - `loss`: from the outputs to a real scalar, convex: `loss(outputs)`, or
        `loss(outputs, batch)`.
    - `x`, `batches`, `at_once`: as in [`traceax.hessian`][].

    **Returns:**

    A positive-semidefinite-tagged operator. One product costs about one forward-mode
    and one reverse-mode derivative of `model`, and with batches an evaluation. Memory
    without batches: what a gradient through `model` and `loss` keeps, as long as the
    operator lives, and for each vector of a block of probes what goes through `model`
    once forward and once backward.

    **Raises:**

    `TypeError` if `model` does not return floating-point arrays, or `loss` a real scalar;
    for `x`, `batches` and `at_once` as [`traceax.hessian`][].

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
    if batches is not None or at_once != 1:
        return _mean(ggn, (model, loss), x, batches, at_once, _SEMIDEFINITE)
    jacobian, outputs = _jacobian(model, x), model(x)
    _check_outputs("model", outputs, jnp.floating)
    check_scalar_function("loss", loss, outputs)
    jacobian = lx.linearise(jacobian)
    curvature = lx.linearise(hessian(loss, outputs))
    return lx.TaggedLinearOperator(jacobian.T @ curvature @ jacobian, _SEMIDEFINITE)


def jacobian_gram(
    f: Callable[[_Point], PyTree[Array]], x: _Point
) -> lx.TaggedLinearOperator:
    """The Gram matrix $J^T J$ of the Jacobian of `f` at `x`; its trace is $\\|J\\|_F^2$.
    Complex outputs count as their real and imaginary parts.

    !!! Example

        ```python
        import jax.numpy as jnp
        import traceax as tx

        operator = tx.jacobian_gram(jnp.square, jnp.arange(4.0))
        print(f"{tx.trace(operator, k=4).value:.1f}")  # 56.0
        ```

    **Arguments:**

    - `f`: from `x` to any PyTree of floating-point or complex arrays.
    - `x`: the point, as in [`traceax.hessian`][].

    **Returns:**

    A positive-semidefinite-tagged operator. One product costs about one forward-mode
    and one reverse-mode derivative of `f`. Memory: what a derivative of `f` keeps, as
    long as the operator lives, and for each vector of a block of probes what goes through
    `f` once forward and once backward.

    **Raises:**

    `TypeError` if `f` returns other arrays; for `x` as in [`traceax.hessian`][].
    """
    jacobian = lx.linearise(_jacobian(lambda x: jax.tree.map(_parts, f(x)), x))
    return lx.TaggedLinearOperator(jacobian.T @ jacobian, _SEMIDEFINITE)


def _parts(y: Array) -> tuple[Array, ...]:
    _check_outputs("f", y, jnp.inexact)
    return (y.real, y.imag) if jnp.iscomplexobj(y) else (y,)


def empirical_fisher(
    losses: Callable[..., Inexact[Array, " examples"]],
    x: PyTree,
    batches: PyTree | None = None,
    *,
    at_once: int = 1,
) -> lx.AbstractLinearOperator:
    """The empirical Fisher matrix: the mean over examples of $g_i g_i^T$, where $g_i$ is
    the gradient at `x` of the loss of example i.

    That is $J^T J / N$ for the Jacobian of the N losses. It is neither the Fisher matrix,
    which averages over outputs that the model draws, nor the
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

    - `losses`: gives the losses of all examples, an array of shape `(examples,)` and not
        their mean: `losses(x)`, or `losses(x, batch)` if there are batches.
    - `x`, `batches`, `at_once`: as in [`traceax.hessian`][]. All batches weigh the same.

    **Returns:**

    A positive-semidefinite-tagged operator. One product costs about one forward-mode
    and one reverse-mode derivative of `losses`, and with batches an evaluation. Memory
    without batches is that of [`traceax.jacobian_gram`][].

    **Raises:**

    `TypeError` if `losses` does not return such an array; for `x`, `batches` and
    `at_once` as [`traceax.hessian`][].

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
    if batches is not None or at_once != 1:
        fns = (losses,)
        return _mean(empirical_fisher, fns, x, batches, at_once, _SEMIDEFINITE)
    out = eqx.filter_eval_shape(losses, x)
    if getattr(out, "ndim", None) != 1 or not jnp.issubdtype(out.dtype, jnp.floating):
        raise TypeError(
            "`losses` must return real floating-point numbers, of shape (examples,): the "
            f"loss of each example. Found {out}. Leave out the mean over examples."
        )
    return jacobian_gram(lambda x: losses(x) / out.size**0.5, x)
