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


class AbstractExecution(eqx.Module):
    """Where, and how many at a time, probe vectors meet the operator.

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

    - `can_raise`: whether an error may be raised from inside a compiled program. If not,
        `throw=True` inside `jit` makes the value NaN instead.
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
        """Apply a function to each of several inputs, and summarise what each device has
        made.

        **Arguments:**

        - `fn`: a function of the operator and of one input `x`, to a PyTree of arrays.
        - `reduce`: a function of the results of one device, stacked, shape `(p, ...)`,
            and of a mask of shape `(p,)`: False where a result is one more copy of the
            last one. To a PyTree of arrays.
        - `operator`: a square operator as a map of flat vectors.
        - `xs`: the inputs, stacked along a leading axis of length m.
        - `width`: how many vectors of length n one call of `fn` holds, about.

        **Returns:**

        The results of `fn`, stacked, shape `(m, ...)`; and those of `reduce`, one for
        each of d devices, stacked, shape `(d, ...)`, which carry no derivatives.
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
        """Products with several vectors.

        **Arguments:**

        - `operator`: A, as a map of flat vectors of length n.
        - `x`: m vectors, the columns of an array of shape `(n, m)`.
        - `adjoint`: whether products are with the adjoint of A.

        **Returns:**

        The m products, the columns of an array; of shape `(n, m)` for a square A.
        """
        if not adjoint:
            return self.map(FlatOperator.mv, operator, x.T).T
        # The adjoint of a dense matrix is fastest from rows to rows. XLA on CPU folds
        # these transposes into a product that takes 1.2 times as long.
        rows = jax.lax.optimization_barrier(x.T)
        products = self.map(FlatOperator.adjoint_mv, operator, rows)
        return jax.lax.optimization_barrier(products).T

    def chunk(self, n: int, width: int = 1) -> int:
        """How many inputs `map_reduce` takes at a time, on all devices together: what
        is to be held for one chunk only is handed to it in such portions.

        **Arguments:**

        - `n`: the size of the operator.
        - `width`: as for `map_reduce`.

        **Returns:**

        A Python integer, 1 or more.
        """
        return max(1, min(128, 2**20 // n, 2**26 // (n * width)))

    @abc.abstractmethod
    def factorising(self) -> contextlib.AbstractContextManager[None]:
        """How dense factorisations are to be made.

        **Returns:**

        A context manager; what is traced inside makes those of tall matrices by rows, or
        not.
        """


class Local(AbstractExecution):
    """Run on the devices where the operator's arrays are, a block of probes at a time.

    The product is vectorised (`jax.vmap`) over a block, and blocks follow one another
    in a compiled loop. Answers for different block sizes differ by rounding alone.

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

    - `block_size`: probe vectors per block, at most; where all blocks can be made equal
        by fewer, down to half of it, they are. `None` takes 128, or fewer where n is
        large: so many that a block of probes holds at most a million numbers and, for
        estimators that keep a Krylov basis for each probe, all bases at most 64 million.
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
        block = even(count, self.chunk(operator.size, width))
        if count == 1:
            # A batch of one takes twice the time under an outer `vmap`.
            only = fn(operator, jax.tree.map(lambda x: x[0], xs))
            outs = jax.tree.map(lambda x: x[None], only)
        elif block >= count:
            outs = jax.vmap(lambda x: fn(operator, x))(xs)
        else:
            batch_size = None if block == 1 else block
            outs = jax.lax.map(lambda x: fn(operator, x), xs, batch_size=batch_size)
        part = reduce(jax.lax.stop_gradient(outs), jnp.ones(count, bool))
        return outs, jax.tree.map(lambda x: x[None], part)

    def chunk(self, n: int, width: int = 1) -> int:
        return self.block_size or super().chunk(n, width)

    def factorising(self) -> contextlib.AbstractContextManager[None]:
        return factorising(by_rows=False)


def even(count: int, most: int) -> int:
    """How many of `count` to take at a time, at most `most`: a divisor, if that is not
    less than half of it. A remainder would be a second program to compile."""
    for size in range(min(count, most), (most - 1) // 2, -1):
        if count % size == 0:
            return size
    return min(count, most)


Local.__init__.__doc__ = """**Arguments:**

- `block_size`: probe vectors per block, at most; see above.

**Raises:**

`ValueError` for a `block_size` that is neither a positive Python integer nor None.
"""
