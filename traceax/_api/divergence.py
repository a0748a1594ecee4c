"""The divergence of a vector field f: the trace of its Jacobian J, from `w* J* w`.

The matvecs `J* w` are those of `jax.vjp` (FFJORD, Grathwohl et al. 2019).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, DTypeLike, Inexact, PRNGKeyArray, PyTree

from .._core.checks import check_point
from .._core.flat import as_complex
from .._core.solution import Solution
from .._estimators.base import AbstractEstimator
from .._estimators.hutchinson import HutchinsonEstimator
from .._run.adaptive import Adaptive
from .._run.execution import AbstractExecution, Local
from .trace import trace


_Point = TypeVar("_Point", bound=PyTree[Inexact[Array, "..."]])


def divergence(
    fn: Callable[[_Point], _Point],
    x: _Point,
    estimator: AbstractEstimator = HutchinsonEstimator(),
    *,
    k: int | Adaptive | None = None,
    key: PRNGKeyArray | None = None,
    state: PyTree[Array] | None = None,
    execution: AbstractExecution = Local(),
    throw: bool = True,
) -> tuple[_Point, Solution[Array]]:
    """Evaluate a vector field and its divergence, the trace of its Jacobian.

    Continuous normalizing flows need both at each step (Grathwohl et al., 2019), and so
    does score matching. The matvecs are vector-Jacobian products, in reverse mode: the
    transpose of the Jacobian has the same trace, and this mode is cheaper where the
    result is differentiated again. For a batch of points, use `jax.vmap`.

    Cost: one evaluation of `fn`, and `k` vector-Jacobian products, twice as many for a
    complex `fn`. Memory: the residuals
    of that evaluation for reverse mode, the cotangents of `fn` for each probe of a block,
    and the vectors of the estimator's basis if it has one.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import traceax as tx

        def field(x):
            return jnp.sin(x) * jnp.sum(x)

        x = jnp.arange(4.0)
        velocity, exact = tx.divergence(field, x)
        _, estimate = tx.divergence(field, x, k=3, key=jax.random.key(0))
        print(exact.value, estimate.value, "+-", estimate.std_err)
        ```

    **Arguments:**

    - `fn`: a differentiable function to vectors like `x`, real or complex.
    - `x`: the point, a PyTree of n real floating-point numbers in all.
    - `estimator`: which estimator to use. Default: [`traceax.HutchinsonEstimator`][].
    - `k`: the number of matvecs, as for [`traceax.trace`][], but the default is the exact
        divergence, from n matvecs.
    - `key`, `state`, `execution`, `throw`: as for [`traceax.trace`][]. To keep the probes
        fixed along a path, as an integrator of high order needs, pass the same key.

    **Returns:**

    `fn(x)`, and a [`traceax.Solution`][] whose `value` is the divergence. Derivatives of
    both are correct, to all orders; derivatives of an estimate are unbiased.

    **Raises:**

    - `TypeError`: `x` is not of real floating-point arrays.
    - `ValueError`: `fn(x)` does not have the structure and shapes of `x`, and its dtypes
        or complex ones.
    - The errors of [`traceax.trace`][].

    ??? cite

        ```bibtex
        @inproceedings{grathwohl2019ffjord,
            author    = {Grathwohl, Will and Chen, Ricky T. Q. and Bettencourt, Jesse and
                         Sutskever, Ilya and Duvenaud, David},
            title     = {{FFJORD}: Free-Form Continuous Dynamics for Scalable Reversible
                         Generative Models},
            booktitle = {International Conference on Learning Representations},
            year      = {2019},
        }
        ```
    """
    check_point(x)
    x = jax.tree.map(jnp.asarray, x)
    value, pullback = jax.vjp(lambda x: jax.tree.map(jnp.asarray, fn(x)), x)
    structure, image = _structure(x), _structure(value)
    if not _fits(image, structure):
        raise ValueError(
            "`fn(x)` must have the structure, shapes and dtypes of `x`, or complex "
            f"dtypes of the same precision. Found {image} for {structure}."
        )
    vectors, is_complex = structure, image != structure
    if is_complex:
        vectors = as_complex(structure)

    # The evaluation above is shared by all matvecs: a Jacobian operator of `fn` would
    # repeat it.
    def transposed_mv(vector):
        def pull(factor):
            # For fn = u + i v, the pullback of w is Re(w^T (du + i dv)).
            return pullback(
                jax.tree.map(lambda w, y: _cast(factor * w, y.dtype), vector, image)
            )[0]

        if not is_complex:
            return pullback(vector)[0]
        return jax.tree.map(lambda u, v: u + 1j * v, pull(1), pull(-1j))

    transposed = lx.FunctionLinearOperator(transposed_mv, vectors)
    solution = trace(
        transposed,
        estimator,
        k=transposed.in_size() if k is None else k,
        key=key,
        state=state,
        execution=execution,
        throw=throw,
    )
    return value, dataclasses.replace(solution, quantity="Divergence")


def _structure(tree: PyTree[Array]) -> PyTree[jax.ShapeDtypeStruct]:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _fits(image: PyTree, structure: PyTree) -> bool:
    """Whether the image has the shapes of a structure, and its dtypes or complex ones."""
    if jax.tree.structure(image) != jax.tree.structure(structure):
        return False
    pairs = zip(jax.tree.leaves(image), jax.tree.leaves(structure), strict=True)
    return all(y in (x, as_complex(x)) for y, x in pairs)


def _cast(vector: Array, dtype: DTypeLike) -> Array:
    """The vector in another dtype, or its real part if that is real."""
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    return (vector if is_complex else vector.real).astype(dtype)
