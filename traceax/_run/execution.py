"""Executions: on which devices matvecs are made, and how many at a time."""

import abc
import contextlib
from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree, Shaped

from .._core.checks import plain_integer
from .._core.flat import FlatOperator
from .._numerics.dense import factorising


# Limits of a block, where the user sets none. Larger blocks pass over the operator less
# often, and hold more vectors at once. The numbers are compromises and not measured
# optima; `docs/how_to/large_matrices.md` says when to pass a `block_size`.
_MAX_BLOCK_SIZE = 128
# Numbers in the probes of a block: 4 MiB in float32.
_MAX_BLOCK_ENTRIES = 2**20
# Or this share of the numbers in the operator's arrays, if that is more. A matrix larger
# than the cache is read once for each block, and beside it such a block is small.
_BLOCK_SHARE = 1 / 8
# Numbers in all Krylov bases of a block: 256 MiB in float32.
_MAX_BASIS_ENTRIES = 2**26


class AbstractExecution(eqx.Module):
    """On which devices, and how many at a time, the operator is applied to probe vectors.

    !!! Example

        ```python
        import contextlib
        from typing import ClassVar

        import jax
        import jax.numpy as jnp
        import traceax as tx

        class OneByOne(tx.AbstractExecution):
            # One probe after another.
            can_raise: ClassVar[bool] = True

            def map_reduce(self, fn, reduce, operator, xs, width=1):
                outs = jax.lax.map(lambda x: fn(operator, x), xs)
                count = jax.tree.leaves(xs)[0].shape[0]
                part = reduce(jax.lax.stop_gradient(outs), jnp.ones(count, bool))
                return outs, jax.tree.map(lambda x: x[None], part)

            def factorising(self):
                return contextlib.nullcontext()

        operator = tx.hessian(lambda v: jnp.sum(v**2), jnp.zeros(100))
        estimator, key = tx.HutchinsonEstimator(), jax.random.key(0)
        solution = tx.trace(operator, estimator, k=10, key=key, execution=OneByOne())
        print(f"{solution.value:.2f}")  # 200.00
        ```

    **Attributes:**

    - `can_raise`: whether a compiled program may raise an error. If not, `throw=True`
        inside `jit` makes the value NaN instead.
    """

    can_raise: eqx.AbstractClassVar[bool]

    @abc.abstractmethod
    def map_reduce(
        self,
        fn: Callable[[FlatOperator, PyTree], PyTree],
        reduce: Callable[[PyTree, Bool[Array, " p"]], PyTree],
        operator: FlatOperator,
        xs: PyTree[Shaped[Array, "m ..."]],
        width: int = 1,
    ) -> tuple[PyTree[Shaped[Array, "m ..."]], PyTree[Shaped[Array, "d ..."]]]:
        """Apply a function to each of several inputs, and summarise the results of each
        device.

        **Arguments:**

        - `fn`: a function of the operator and one input `x`, which returns a PyTree of
            arrays.
        - `reduce`: a function of the p results of one device, stacked to shape
            `(p, ...)`, and of a boolean mask of shape `(p,)`, which returns a PyTree of
            arrays. The mask is False where a result is padding, a copy of the last one.
        - `operator`: a square operator as a map of flat vectors.
        - `xs`: the m inputs, stacked along a leading axis.
        - `width`: about how many vectors of length n one call of `fn` holds.

        **Returns:**

        A pair: the results of `fn`, stacked to shape `(m, ...)`, and the results of
        `reduce`, one for each of d devices, stacked to shape `(d, ...)`. The latter carry
        no derivatives.
        """

    def map(
        self,
        fn: Callable[[FlatOperator, PyTree], PyTree],
        operator: FlatOperator,
        xs: PyTree[Shaped[Array, "m ..."]],
        width: int = 1,
    ) -> PyTree[Shaped[Array, "m ..."]]:
        """Apply a function to each of several inputs.

        **Arguments:**

        - `fn`, `operator`, `xs`, `width`: as for `map_reduce`.

        **Returns:**

        The results of `fn`, stacked: the first of the two results of `map_reduce`.
        """
        return self.map_reduce(fn, lambda *_: (), operator, xs, width)[0]

    def matmat(self, operator: FlatOperator, x: Array, *, adjoint: bool = False) -> Array:
        """Apply the operator to several vectors.

        **Arguments:**

        - `operator`: A, as a map of flat vectors of length n.
        - `x`: m vectors, the columns of an array of shape `(n, m)`.
        - `adjoint`: whether to apply the adjoint of A instead.

        **Returns:**

        The m matrix-vector products, as the columns of an array: of shape `(n, m)` for a
        square A.
        """
        if not adjoint:
            return self.map(FlatOperator.mv, operator, x.T).T
        # The adjoint of a dense matrix is fastest from rows to rows. Without the barriers
        # XLA on CPU folds both transposes into a product that takes 1.2 times as long.
        rows = jax.lax.optimization_barrier(x.T)
        products = self.map(FlatOperator.adjoint_mv, operator, rows)
        return jax.lax.optimization_barrier(products).T

    def block(self, operator: FlatOperator, width: int = 1) -> int:
        """The number of inputs that `map_reduce` processes at a time, on all devices
        together. A caller that must not hold all results at once passes it so many
        inputs in each call.

        **Arguments:**

        - `operator`, `width`: as for `map_reduce`.

        **Returns:**

        A Python integer, 1 or more.
        """
        return default_block_size(operator, width)

    @property
    def num_shares(self) -> int:
        """The number of shares into which `map_reduce` splits its inputs, each of which
        is processed by itself: the number of devices of a mesh axis."""
        return 1

    @abc.abstractmethod
    def factorising(self) -> contextlib.AbstractContextManager[None]:
        """Choose how dense factorisations are computed.

        **Returns:**

        A context manager. Code that is traced inside factorises tall matrices by rows, or
        not by rows.
        """


class Local(AbstractExecution):
    """Run on the devices where the operator's arrays are, a block of probes at a time.

    The matrix-vector product is vectorised (`jax.vmap`) over a block, and a compiled loop
    runs over the blocks. Answers for different block sizes differ by rounding alone.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jax.random.normal(jax.random.key(0), (500, 50))
        operator = lx.MatrixLinearOperator(x @ x.T)
        estimator, key = tx.HutchinsonEstimator(), jax.random.key(1)
        execution = tx.Local(block_size=16)
        solution = tx.trace(operator, estimator, k=64, key=key, execution=execution)
        print(solution.value, "+-", solution.std_err)
        ```

    **Attributes:**

    - `block_size`: the largest number of probe vectors per block. Blocks are smaller, by
        up to a half, where that makes all of them equal. `None` takes 128, or fewer where
        n is large: the probes of a block have at most $2^{20}$ entries, or an eighth of
        the entries of the operator's arrays if that is more, and for estimators that keep
        a Krylov basis for each probe all bases have at most $2^{26}$.
    """

    block_size: int | None = eqx.field(static=True, default=None, converter=plain_integer)
    can_raise: ClassVar[bool] = True

    def __check_init__(self):
        size = self.block_size
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(
                f"`block_size` must be a positive Python integer or None. Found {size!r}."
            )

    def map_reduce(
        self,
        fn: Callable[[FlatOperator, PyTree], PyTree],
        reduce: Callable[[PyTree, Bool[Array, " p"]], PyTree],
        operator: FlatOperator,
        xs: PyTree[Shaped[Array, "m ..."]],
        width: int = 1,
    ) -> tuple[PyTree[Shaped[Array, "m ..."]], PyTree[Shaped[Array, "d ..."]]]:
        count = jax.tree.leaves(xs)[0].shape[0]
        block = equal_block_size(count, self.block(operator, width))
        if count == 1:
            # No batch axis: under an outer `vmap` a batch of one takes twice the time.
            only = fn(operator, jax.tree.map(lambda x: x[0], xs))
            outs = jax.tree.map(lambda x: x[None], only)
        elif block >= count:
            outs = jax.vmap(lambda x: fn(operator, x))(xs)
        else:
            # For the same reason blocks of one are no batches.
            batch_size = None if block == 1 else block
            outs = jax.lax.map(lambda x: fn(operator, x), xs, batch_size=batch_size)
        summary = reduce(jax.lax.stop_gradient(outs), jnp.ones(count, bool))
        return outs, jax.tree.map(lambda x: x[None], summary)

    def block(self, operator: FlatOperator, width: int = 1) -> int:
        return self.block_size or default_block_size(operator, width)

    def factorising(self) -> contextlib.AbstractContextManager[None]:
        return factorising(by_rows=False)


def default_block_size(operator: FlatOperator, width: int, rows: int = 1) -> int:
    """The number of vectors in a block on one of `rows` devices, each of which holds its
    own rows of the vectors and of the operator."""
    n = -(-operator.size // rows)
    held = sum(getattr(leaf, "size", 1) for leaf in jax.tree.leaves(operator)) // rows
    entries = max(_MAX_BLOCK_ENTRIES, int(_BLOCK_SHARE * held))
    return max(1, min(_MAX_BLOCK_SIZE, entries // n, _MAX_BASIS_ENTRIES // (n * width)))


def equal_block_size(count: int, max_size: int) -> int:
    """The size of the blocks into which `count` inputs are split, at most `max_size`.

    It is the largest divisor of `count` if that is at least half of `max_size`: then no
    remainder has to be compiled as a second program. With smaller blocks the additional
    passes would cost more than that."""
    for size in range(min(count, max_size), (max_size - 1) // 2, -1):
        if count % size == 0:
            return size
    return min(count, max_size)


Local.__init__.__doc__ = """**Arguments:**

- `block_size`: the largest number of probe vectors per block; see above.

**Raises:**

`ValueError` if `block_size` is neither a positive Python integer nor None.
"""
