"""The Laplacian of f at x, the trace of its Hessian H, in collapsed Taylor mode.

With the n unit vectors, or k vectors of random signs,

    tr H = sum_i e_i* H e_i = E v* H v ~ (1 / k) sum_i v_i* H v_i,

where `v* H v` is the second derivative of `f(x + t v)` in t, at 0. The sum over the
directions v_i is carried through f as one vector (`_numerics/taylor.py`; Dangel, Siebert,
Zeinhofer and Walther 2025).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, PyTree, Scalar

from .._core.arithmetic import complex_dtype
from .._core.checks import check_point, check_scalar_function
from .._core.code import FlatFunction
from .._core.flat import FlatOperator, from_flat, to_flat
from .._core.moments import Moments
from .._core.quantity import Trace
from .._core.sampler import draw, require_key
from .._core.samplers import RademacherSampler
from .._core.solution import Estimate, Solution
from .._estimators.hutchinson import HutchinsonEstimator
from .._numerics.taylor import second_derivative
from .._operators.door import enter, Facts
from .._operators.tags import dtypes
from .._run.adaptive import Adaptive
from .._run.budget import Budget
from .._run.execution import AbstractExecution, Local
from .._run.sharded import Sharded
from .._run.solve import AbstractTask, solve


_Point = TypeVar("_Point", bound=PyTree[Inexact[Array, "..."]])


def laplacian(
    fn: Callable[[_Point], Scalar],
    x: _Point,
    *,
    k: int | Adaptive | None = None,
    key: PRNGKeyArray | None = None,
    state: PyTree[Array] | None = None,
    execution: AbstractExecution = Local(),
    throw: bool = True,
) -> tuple[Scalar, _Point, Solution[Array]]:
    """Evaluate a function, its gradient and its Laplacian, the trace of its Hessian.

    Collapsed Taylor mode (Dangel et al., 2025) is used: k directions cost about as much
    as `k + 2` evaluations of `fn` on a batch, half the cost of `k` matvecs with the
    Hessian. The backward pass in parameters costs half as much, too. Everything that `fn`
    closes over can be differentiated. For several points, use `jax.vmap`.

    Memory: a block of at most 128 directions is carried at a time, or as many as
    `execution` says. With s directions, each intermediate array of `fn` is held `s + 2`
    times: itself, its derivatives in the directions, and the sum of its second
    derivatives. A backward pass keeps the arrays of one such block.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import traceax as tx

        def fn(x):
            return jnp.sum(jnp.sin(x)) * jnp.mean(x)

        x = jnp.arange(20.0)
        value, gradient, exact = tx.laplacian(fn, x)
        _, _, estimate = tx.laplacian(fn, x, k=10, key=jax.random.key(0))
        print(exact.value, estimate.value, "+-", estimate.std_err)
        ```

    **Arguments:**

    - `fn`: a function to a real or complex scalar, twice differentiable in forward mode
        and once in reverse mode. Loops are differentiated as a whole, by nested
        derivatives; reverse mode needs a `jax.lax.scan`, or a `jax.lax.fori_loop` of
        known length. For a `jax.custom_vjp`, which has no forward mode, take
        [`traceax.trace`][] of [`traceax.hessian`][].
    - `x`: the point, a PyTree of n real floating-point numbers in all.
    - `k`: the number of random directions, which are vectors of signs. With `k >= n`,
        and by default, the n unit vectors are taken, and the Laplacian is exact. Or
        [`traceax.Adaptive`][], with matvecs of the Hessian.
    - `key`, `state`, `execution`, `throw`: as for [`traceax.trace`][]. On a mesh each
        device carries its own share of the directions; vectors cannot be split by `rows`.

    **Returns:**

    `fn(x)`; its gradient, of the structure of `x`, complex where `fn(x)` is; and a
    [`traceax.Solution`][] whose `value` is the Laplacian. `stats["num_matvecs"]` is the
    number of directions. Estimates are unbiased, and so are their derivatives. If
    `std_err` or `stats["samples"]` is used, each direction is also carried by itself,
    which doubles the cost; `jax.jit` removes this work if both are unused. For other
    estimators take [`traceax.trace`][] of [`traceax.hessian`][].

    **Raises:**

    - `TypeError`: `x` is not of real floating-point arrays, or `fn(x)` is not a real or
        complex scalar.
    - `ValueError`: `execution` splits vectors by `rows`.
    - `NotImplementedError`: JAX has no derivative of `fn` in one of the modes.
    - The errors of [`traceax.trace`][].

    ??? cite

        ```bibtex
        @article{dangel2025collapsing,
            author  = {Dangel, Felix and Siebert, Tim and Zeinhofer, Marius and
                       Walther, Andrea},
            title   = {Collapsing Taylor Mode Automatic Differentiation},
            journal = {arXiv preprint arXiv:2505.13644},
            year    = {2025},
        }
        ```
    """
    check_point(x)
    if isinstance(execution, Sharded) and execution.rows is not None:
        raise ValueError(
            "`execution` must not split vectors by `rows`, as `fn` is evaluated as a "
            f"whole. Found rows={execution.rows!r}. Leave `rows` out, or take "
            "`traceax.trace` of `traceax.hessian(fn, x)`."
        )
    x = jax.tree.map(jnp.asarray, x)
    check_scalar_function("fn", fn, x, real=False)
    with _differentiating(_REVERSE):
        value, gradient = _value_and_gradient(fn, x)
    structure = jax.eval_shape(lambda: x)
    # A stand-in with the size and dtype of the Hessian, which is never built.
    operator = lx.IdentityLinearOperator(structure)
    dtype, _ = dtypes(operator)

    def flat_fn(vector):
        # The precision of the point; complex where `fn` is.
        result = fn(from_flat(vector, structure))
        is_complex = jnp.iscomplexobj(result)
        return result.astype(complex_dtype(dtype) if is_complex else dtype)

    size = operator.in_size()
    traced = FlatFunction.of(flat_fn, (size,), dtype)
    task = _Laplacian(hessian=_HessianOf(fn=traced, point=to_flat(x, dtype)))
    solution = solve(
        task,
        enter(operator),
        k=size if k is None else k,
        key=key,
        state=state,
        execution=execution,
        throw=throw,
    )
    return value, gradient, solution


_REVERSE = (
    "once in reverse mode. Write a loop as `jax.lax.scan`, or as `jax.lax.fori_loop` of "
    "known length."
)
_FORWARD = (
    "twice in forward mode. A function with a `jax.custom_vjp` has none: take "
    "`traceax.trace` of `traceax.hessian(fn, x)`, which is exact with `k=n`."
)


def _value_and_gradient(fn: Callable[[Any], Scalar], x: Any) -> tuple[Scalar, Any]:
    """`fn(x)` and its gradient, which is complex where `fn` is."""
    value, pullback = jax.vjp(fn, x)
    (gradient,) = pullback(jnp.ones_like(value))
    if not jnp.iscomplexobj(value):
        return value, gradient
    # For fn = u + i v, the pullback of c is Re(c (du + i dv)).
    (imaginary,) = pullback(jnp.full_like(value, -1j))
    return value, jax.tree.map(lambda u, v: u + 1j * v, gradient, imaginary)


@contextlib.contextmanager
def _differentiating(how: str) -> Iterator[None]:
    """Explain errors of JAX that arise when `fn`, which JAX could trace, has no
    derivative of this kind."""
    try:
        yield
    except (NotImplementedError, TypeError, ValueError) as error:
        raise NotImplementedError(
            f"`fn` must be differentiable {how} JAX says: {type(error).__name__}: {error}"
        ) from error


class _HessianOf(eqx.Module):
    """The Hessian of a function of a flat vector at a point: v -> H v, and traces of
    `V* H V` for several directions V."""

    fn: FlatFunction
    point: Inexact[Array, " n"]

    def __call__(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
        def gradient(x):
            return _value_and_gradient(self.fn, x)[1]

        return jax.jvp(gradient, (self.point,), (vector,))[1]

    def along(self, directions: Inexact[Array, "s n"]) -> Inexact[Array, ""]:
        """The sum of the second derivatives along the directions."""
        with _differentiating(_FORWARD):
            return second_derivative(self.fn.jaxpr, self.point, directions)


class _Laplacian(AbstractTask):
    """The Laplacian of a function of a flat vector, as the trace of its Hessian."""

    hessian: _HessianOf
    quantity: Trace = Trace()

    @property
    def name(self) -> str:
        return "laplacian"

    @property
    def title(self) -> str:
        return "Laplacian"

    @property
    def min_matvecs(self) -> int:
        return 1

    @property
    def fallback(self) -> str:
        return HutchinsonEstimator().name

    def exact(
        self, operator: FlatOperator, facts: Facts, execution: AbstractExecution
    ) -> Estimate:
        size, dtype = operator.size, operator.dtype

        def unit_vectors(indices):
            return jax.nn.one_hot(indices, size, dtype=dtype)

        value = self._sum_along(unit_vectors, size, operator, execution)
        zero = jnp.zeros_like(value.real)
        return Estimate(value, zero, value[None], num_matvecs=size, rounding=0.0)

    def run(
        self,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        operator = self._operator(operator)
        if isinstance(k, Budget):
            # Samples go into rounds one by one: their collapsed sum would have no error.
            return HutchinsonEstimator().measure(Trace(), operator, k, key, execution)
        size, dtype = operator.size, operator.dtype
        # The sum over directions is accumulated inside the function, in its precision.
        # The scale, about 1 / sqrt(k), keeps it as large as a mean, so that it does not
        # overflow. It is a power of two, so that it adds no rounding error.
        scale = 2.0 ** -math.ceil(math.log2(k) / 2)

        def directions(indices):
            signs = draw(
                RademacherSampler(),
                key=require_key(key),
                indices=indices,
                n=size,
                dtype=dtype,
            )
            return signs.T

        def sample(flat, index):
            return flat.fn.along(directions(index[None]))

        # Needed for the error bar alone. A compiled program that does not use it leaves
        # this out.
        frozen, first = operator.frozen, directions(jnp.zeros(1, int))[0]
        # The width: a direction, and the two derivatives along it.
        samples = execution.map(sample, frozen, jnp.arange(k), width=3)

        def scaled(indices):
            return scale * directions(indices)

        total = self._sum_along(scaled, k, operator, execution)
        return Estimate(
            value=total / (k * scale**2),
            std_err=Moments.of(samples).std_err(),
            samples=samples,
            num_matvecs=k,
            rounding=operator.rounding,
            magnitude=Trace().size(first, frozen.mv(first)),
            method="Taylor modes along random signs",
        )

    def _sum_along(
        self,
        directions: Callable[[Int[Array, " s"]], Array],
        count: int,
        operator: FlatOperator,
        execution: AbstractExecution,
    ) -> Inexact[Array, ""]:
        """The sum of the second derivatives along the first `count` directions."""
        # Blocks of equal size, of which each share has as many as the others. The last
        # ones are padded with zero directions.
        shares = execution.num_shares
        per_share = -(-count // shares)
        num_blocks = -(-per_share // max(1, execution.block(operator) // shares))
        size = -(-per_share // num_blocks)
        indices = jnp.arange(shares * num_blocks * size)

        def sum_of_share(flat, blocks):
            def block(indices):
                valid = (indices < count)[:, None]
                return flat.fn.along(jnp.where(valid, directions(indices), 0))

            if num_blocks == 1:
                return block(blocks[0])
            # With `checkpoint` a backward pass holds the arrays of one block, and not of
            # all.
            return jnp.sum(jax.lax.map(jax.checkpoint(block), blocks))

        blocks, flat = indices.reshape(shares, num_blocks, size), self._operator(operator)
        return jnp.sum(execution.map(sum_of_share, flat, blocks, width=size))

    def _operator(self, stand_in: FlatOperator) -> FlatOperator:
        """The Hessian as an operator of the size and dtype of the stand-in."""
        return dataclasses.replace(stand_in, fn=self.hessian, hermitian=True, sign=0)
