"""The largest singular values of operators, by Golub-Kahan with thick restarts.

The kernel is `_krylov/extreme_triplets.py`. It is for an A with at least as many rows as
columns; for others A* takes its place, and left and right change places.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, PRNGKeyArray, PyTree, Real, Scalar

from .._core.arithmetic import full_precision
from .._core.flat import explain_missing_adjoint
from .._core.sampler import draw
from .._core.samplers import NormalSampler
from .._krylov.extreme_triplets import all_triplets, extreme_triplets
from .._operators.convert import OperatorLike
from .._operators.door import enter
from .._run.call import call
from .._run.execution import AbstractExecution, Local
from .extremes import (
    AbstractExtremes,
    check_call,
    judge,
    tolerance_of,
    unflatten_columns,
)


class SingularTriplets(AbstractExtremes):
    """The largest singular values of an operator, made by [`traceax.svds`][].

    !!! Example

        ```python
        import jax.numpy as jnp
        import traceax as tx

        triplets = tx.svds(jnp.diag(jnp.array([1.0, 2.0, 3.0])), 2)
        print(triplets.successful, triplets.matvecs)  # True 3
        print(triplets.left.shape)  # (2, 3)
        print(triplets)
        ```

    **Attributes:**

    - `values`: the singular values, descending, real, shape `(num,)`.
    - `left`, `right`: orthonormal singular vectors u and v, PyTrees of the structures of
        the images and of the vectors of the operator, each leaf with a leading axis of
        length `num`.
    - `residuals`: $(\\|A v - \\sigma u\\|^2 + \\|A^* u - \\sigma v\\|^2)^{1/2}$ for each
        triplet, computed from the vectors that are returned, shape `(num,)`.
    - `result`, `stats`, `successful`, `matvecs`, `quantity`, `raw`: as for
        [`traceax.Eigenpairs`][].

    Only `values` have a derivative. While one is computed, reading `left`, `right`,
    `residuals` or `interval()` raises `NotImplementedError`;
    `jax.lax.stop_gradient(triplets)` has all of them as constants.
    """

    values: Real[Array, " num"]
    raw: dict[str, PyTree[Array]]
    result: Any
    stats: dict[str, Any]
    quantity: str = eqx.field(static=True, default="Singular values")

    @property
    def left(self) -> PyTree[Array]:
        """The left singular vectors, along a leading axis."""
        return self.constant("left")

    @property
    def right(self) -> PyTree[Array]:
        """The right singular vectors, along a leading axis."""
        return self.constant("right")


def _triplets(
    opened, key, rtol, sizes, k, image, structure, execution
) -> SingularTriplets:
    flat, _ = opened
    frozen, rows, n = flat.frozen, flat.num_rows, flat.size
    exact = sizes.fills(min(rows, n))

    def drawing(stream, length):
        def block(number):
            columns = sizes.block * number + jnp.arange(sizes.block)
            stream_key = jr.fold_in(key, stream)
            return draw(NormalSampler(), stream_key, columns, length, flat.dtype)

        return block

    def both(x, adjoint):
        with explain_missing_adjoint():
            return execution.matmat(frozen, x, adjoint=adjoint)

    is_tall = rows >= n
    short = min(rows, n)
    with full_precision(both) as product:

        def matmat(x):
            return product(x, adjoint=not is_tall)

        if exact:
            triplets = all_triplets(matmat, jnp.zeros((short, 1), flat.dtype), sizes.num)
        else:
            triplets = extreme_triplets(
                matmat,
                lambda x: product(x, adjoint=is_tall),
                drawing(0, short),
                drawing(1, max(rows, n)),
                sizes,
                tolerance=tolerance_of(rtol, flat, sizes),
                max_matvecs=k,
                eps=flat.eps,
            )
    if not is_tall:
        triplets = dataclasses.replace(triplets, vectors=triplets.vectors[::-1])
    judged = judge(flat, triplets, rtol=rtol, sizes=sizes, execution=execution)
    left, right = triplets.vectors
    count = "" if sizes.num == 1 else f"{sizes.num} "
    return SingularTriplets(
        values=judged.values,
        raw={
            "left": unflatten_columns(left, image),
            "right": unflatten_columns(right, structure),
            "residuals": triplets.residuals,
            "errors": judged.errors,
        },
        result=judged.result,
        stats={"num_matvecs": triplets.num_matvecs, "exact": jnp.asarray(exact)},
        quantity=f"Singular values, the {count}largest",
    )


def svds(
    operator: OperatorLike,
    num: int,
    *,
    k: int = 1000,
    rtol: Scalar | float = 1e-4,
    key: PRNGKeyArray | None = None,
    execution: AbstractExecution = Local(),
    throw: bool = True,
) -> SingularTriplets:
    r"""Find the largest singular values of an operator, with singular vectors, by block
    Golub-Kahan bidiagonalisation with thick restarts.

    Neither $A^* A$ nor $A A^*$ is formed, so that the errors of all values are relative
    to the largest one, and not to its square. The smallest singular values are not
    offered: without linear solves they take very many matvecs.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jax.random.normal(jax.random.key(0), (300, 2)) @ jnp.diag(jnp.array([9, 4.0]))
        y = jax.random.normal(jax.random.key(1), (2, 200))
        operator = lx.MatrixLinearOperator(x @ y)
        triplets = tx.svds(operator, 2, key=jax.random.key(2))
        print(triplets)
        left, right = triplets.left.T, triplets.right.T  # as columns
        print(jnp.allclose(left * triplets.values @ right.T, x @ y, atol=0.1))  # True
        ```

    **Arguments:**

    - `operator`: any matrix, or an operator on arrays or PyTrees, real or complex; input
        and output may differ. See [`traceax.as_operator`][]. Let n be the smaller of its
        sizes.
    - `num`: the number of singular values, a Python integer.
    - `k`: the largest number of matrix-vector products with the operator and with its
        adjoint together, a Python integer. Default: 1000.
    - `rtol`: the largest norm of a residual, relative to the largest singular value, as
        for [`traceax.eigsh`][].
    - `key`, `execution`, `throw`: as for [`traceax.eigsh`][].

    **Returns:**

    [`traceax.SingularTriplets`][]. Small operators are factorised, and values may be
    missed, as for [`traceax.eigsh`][].

    Derivatives of `values` in the operator's arrays are of first order,
    $d\sigma = \mathrm{Re}(u^* dA\, v)$. Where two values cannot be told apart, or one
    from zero, the derivative is NaN. Second derivatives raise `NotImplementedError`.

    Cost: each step makes two matvecs, and two with the adjoint. Memory: `m` vectors of
    each of the two lengths, with `m = max(40, 2 num + 24)`, and twice that briefly at
    each restart. The last `2 num` matvecs compute the residuals.

    **Raises:**

    - `TypeError`: an argument is not of its kind; `num` or `k` is not a Python integer.
    - `ValueError`: `num` is below 1 or above n; `k` is too small for `num`; `rtol` is not
        between 0 and 1; `key` is missing.
    - `NotImplementedError`: JAX cannot transpose the operator's products.
    - An `equinox` run-time error with `throw=True`: as for [`traceax.eigsh`][].

    ??? cite

        ```bibtex
        @article{baglama2005augmented,
            author  = {Baglama, James and Reichel, Lothar},
            title   = {Augmented Implicitly Restarted {Lanczos} Bidiagonalization
                       Methods},
            journal = {SIAM Journal on Scientific Computing},
            volume  = {27},
            number  = {1},
            pages   = {19--42},
            year    = {2005},
        }
        ```
    """
    entered = enter(operator, square=False, second=num)
    num_rows = sum(leaf.size for leaf in jax.tree.leaves(entered.image))
    size = min(entered.size, num_rows)
    sizes, k, rtol = check_call(num, k, rtol, key, size=size, cost=2)
    return call(
        _triplets,
        entered,
        key,
        rtol,
        sizes,
        k,
        entered.image,
        entered.structure,
        execution,
        name="svds",
        execution=execution,
        throw=throw,
        hint=lambda triplets: triplets.details,
    )
