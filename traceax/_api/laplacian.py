from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, PyTree, Scalar

from .._core.checks import check_point, check_scalar_function
from .._core.code import FlatFunction
from .._core.flat import FlatOperator, freeze, from_flat, to_flat
from .._core.moments import Moments
from .._core.quantity import Trace
from .._core.sampler import draw, RademacherSampler, require_key
from .._core.solution import Estimate, Solution
from .._estimators.hutchinson import HutchinsonEstimator
from .._numerics.taylor import second_derivative
from .._operators.curvature import hessian
from .._operators.door import enter, Facts, flatten
from .._operators.tags import dtypes
from .._run.adaptive import Adaptive
from .._run.budget import Budget
from .._run.execution import AbstractExecution, Local
from .._run.solve import AbstractTask, solve


_Point = TypeVar("_Point", bound=PyTree[Inexact[Array, "..."]])
# So many directions go through the function at a time.
_BLOCK = 128


def laplacian(
    fn: Callable[[_Point], Scalar],
    x: _Point,
    *,
    k: int | Adaptive | None = None,
    key: PRNGKeyArray | None = None,
    state: PyTree[Array] | None = None,
    throw: bool = True,
) -> tuple[Scalar, _Point, Solution]:
    """A function, its gradient and its Laplacian, the trace of its Hessian.

    In collapsed Taylor mode (Dangel et al., 2025): k directions cost about as much as
    `k + 2` evaluations of `fn` on a batch, half of what `k` products with the Hessian
    cost, and their backward pass in parameters likewise. All that `fn` closes over can be
    differentiated. For several points, use `jax.vmap`.

    Memory: at most 128 directions are carried at a time. With s of them, each array that
    `fn` makes on the way is held `s + 2` times: it, its derivatives in the directions,
    and the sum of its second ones. A backward pass keeps those of one such block.

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

    - `fn`: a function to a real scalar, twice differentiable in forward mode and once in
        reverse mode. Loops are differentiated as a whole, by nested derivatives; reverse
        mode needs a `jax.lax.scan`, or a `jax.lax.fori_loop` of known length. For a
        `jax.custom_vjp`, which has no forward mode, take [`traceax.trace`][] of
        [`traceax.hessian`][].
    - `x`: the point, a PyTree of n real floating-point numbers in all.
    - `k`: how many random directions, vectors of signs. With `k >= n`, and by default,
        the n unit vectors, and the exact Laplacian. Or [`traceax.Adaptive`][], with
        products of the Hessian.
    - `key`, `state`, `throw`: as for [`traceax.trace`][].

    **Returns:**

    `fn(x)`; its gradient, of the structure of `x`; and a [`traceax.Solution`][] whose
    `value` is the Laplacian. `stats["num_matvecs"]` is the number of directions.
    Estimates are unbiased, and so are their derivatives. Inside `jax.jit` what is not
    used is not computed: with `std_err`, or `stats["samples"]`, each direction is carried
    by itself too, which doubles the cost. For other estimators, and on several devices,
    take [`traceax.trace`][] of [`traceax.hessian`][].

    **Raises:**

    - `TypeError`: `x` is not of real floating-point arrays, or `fn(x)` no real scalar.
    - `NotImplementedError`: JAX has no derivative of `fn` in one of the modes.
    - Errors as [`traceax.trace`][].

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
    x = jax.tree.map(jnp.asarray, x)
    check_scalar_function("fn", fn, x)
    with _differentiating(_REVERSE):
        value, gradient = jax.value_and_grad(fn)(x)
    structure = jax.eval_shape(lambda: x)
    # It stands for the Hessian, which is not made, and has its size and dtype.
    operator = lx.IdentityLinearOperator(structure)
    dtype, _ = dtypes(operator)

    def flat_fn(vector):
        return fn(from_flat(vector, structure)).astype(dtype)

    size = operator.in_size()
    traced = FlatFunction.of(flat_fn, (size,), dtype)
    task = _Laplacian(fn=traced, point=to_flat(x, dtype))
    settings = {"key": key, "state": state, "execution": Local(), "throw": throw}
    return (
        value,
        gradient,
        solve(task, enter(operator), k=size if k is None else k, **settings),
    )


_REVERSE = (
    "once in reverse mode. Write a loop as `jax.lax.scan`, or as `jax.lax.fori_loop` of "
    "known length."
)
_FORWARD = (
    "twice in forward mode. A function with a `jax.custom_vjp` has none: take "
    "`traceax.trace` of `traceax.hessian(fn, x)`, which is exact with `k=n`."
)


@contextlib.contextmanager
def _differentiating(how: str) -> Iterator[None]:
    """For what differentiates a function that JAX could trace, with an error that says
    what is needed where it has no derivative."""
    try:
        yield
    except (NotImplementedError, TypeError, ValueError) as error:
        raise NotImplementedError(
            f"`fn` must be differentiable {how} JAX says: {type(error).__name__}: {error}"
        ) from error


class _Laplacian(AbstractTask):
    """The function of a flat vector, and the point."""

    fn: FlatFunction
    point: Inexact[Array, " n"]
    quantity: Trace = Trace()

    @property
    def name(self) -> str:
        return "laplacian"

    @property
    def min_matvecs(self) -> int:
        return 1

    @property
    def fallback(self) -> str:
        return HutchinsonEstimator().name

    def exact(
        self, operator: FlatOperator, facts: Facts, execution: AbstractExecution
    ) -> Estimate:
        size, dtype = self.point.size, self.point.dtype
        value = self._along(lambda i: jax.nn.one_hot(i, size, dtype=dtype), size)
        zero = jnp.zeros_like(value)
        return Estimate(value, zero, value[None], num_matvecs=size, rounding=0.0)

    def run(
        self,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        if isinstance(k, Budget):
            flat = flatten(hessian(self.fn, self.point))
            return HutchinsonEstimator().measure(Trace(), flat, k, key, execution)
        size, dtype = self.point.size, self.point.dtype
        # The sum over directions is made inside of the function, in its precision.
        scale = 2.0 ** -math.ceil(math.log2(k) / 2)

        def directions(indices):
            return draw(RademacherSampler(), require_key(key), indices, size, dtype).T

        # For the error bar alone: compiled programs that do not use it leave them out.
        frozen, first = freeze(self), directions(jnp.zeros(1, int))[0]
        samples = frozen._along_each(directions, k)
        image = flatten(hessian(frozen.fn, frozen.point)).mv(first)
        return Estimate(
            value=self._along(lambda i: scale * directions(i), k) / (k * scale**2),
            std_err=Moments.of(samples).std_err(),
            samples=samples,
            num_matvecs=k,
            rounding=operator.rounding,
            magnitude=Trace().size(first, image),
            num_samples=k,
        )

    def _along(
        self, directions: Callable[[Int[Array, " s"]], Array], count: int
    ) -> Inexact[Array, ""]:
        """The sum of the second derivatives along so many directions."""
        num_blocks = -(-count // _BLOCK)
        size = -(-count // num_blocks)

        def block(indices):
            used = (indices < count)[:, None]
            chosen = jnp.where(used, directions(indices), 0)
            return self._second_derivative(chosen)

        indices = jnp.arange(num_blocks * size).reshape(num_blocks, size)
        if num_blocks == 1:
            return block(indices[0])
        return jnp.sum(jax.lax.map(jax.checkpoint(block), indices))

    def _along_each(
        self, directions: Callable[[Int[Array, " s"]], Array], count: int
    ) -> Inexact[Array, " k"]:
        def one(index):
            return self._second_derivative(directions(index[None]))

        return jax.lax.map(one, jnp.arange(count), batch_size=min(count, _BLOCK))

    def _second_derivative(self, directions: Inexact[Array, "s n"]) -> Inexact[Array, ""]:
        with _differentiating(_FORWARD):
            return second_derivative(self.fn.jaxpr, self.point, directions)
