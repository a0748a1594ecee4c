import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, PRNGKeyArray, Real

from .._core.flat import FlatOperator
from .._core.moments import Moments
from .._core.quantity import AbstractQuantity
from .._core.solution import Estimate
from .._numerics.expansion import OneSided, Pair
from .._run.budget import Budget, first_budget, one_round
from .._run.execution import AbstractExecution
from .base import AbstractEstimator
from .growing import by_round
from .hutchinson import HutchinsonEstimator
from .sketch import Sketch
from .xdiag import XDiagEstimator
from .xnysdiag import XNysDiagEstimator


class AutoDiagonalEstimator(AbstractEstimator):
    r"""Picks an estimator of the diagonal from the operator's tags, the budget and, while
    running, from the first products.

    1. [`traceax.ExactTraceEstimator`][] where at most `k` products give the diagonal;
    2. for an operator that is tagged positive or negative semidefinite,
       [`traceax.XNysDiagEstimator`][] or, from the same products,
       [`traceax.HutchinsonEstimator`][], whichever varies less;
    3. for any other operator [`traceax.XDiagEstimator`][] or
       [`traceax.HutchinsonEstimator`][]: the first half of the products serves both, and
       their variances decide. With `traceax.Adaptive`, always the former, which on a
       flat spectrum seldom reaches a tolerance: pass `HutchinsonEstimator()` there;
    4. [`traceax.HutchinsonEstimator`][] for those if `k` is below 4, where XDiag has no
       error bar; with `traceax.Adaptive` if it is 1.

    With [`traceax.Adaptive`][] the `k` of these rules is `round_size`, not `max_k`.

    Where the eigenvalues are of similar size (as of a diagonally dominant matrix), a
    basis of `k` vectors captures too little of the operator, and plain signs are better.

    The choice is made with the same probes as the estimate. Where both methods are
    about equally good, this makes a bias: a tenth of the error where n is 20, less
    where n is larger. For an unbiased estimate, name the estimator.

    Cost: `k` products, $O(n k^2)$ operations. Memory: the estimates of both methods are
    held, about `6.6 k` vectors of length n, and `6.2 k` with a semidefinite tag.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        matrix = jnp.diag(jnp.linspace(1.0, 3.0, 300)) + 0.01
        operator = lx.FunctionLinearOperator(
            lambda v: matrix @ v, jax.ShapeDtypeStruct((300,), matrix.dtype)
        )
        solution = tx.diagonal(operator, k=60, key=jax.random.key(1))
        print(f"{jnp.max(jnp.abs(solution.value - jnp.diag(matrix))):.2f}")
        ```
    """

    min_matvecs: ClassVar[int] = 1
    takes_known_diagonal: ClassVar[bool] = True

    def measure(
        self,
        quantity: AbstractQuantity,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        chosen = _estimator_for(operator.sign, k)
        return chosen.measure(quantity, operator, k, key, execution)


AutoDiagonalEstimator.__init__.__doc__ = "**Arguments:** none."


def _estimator_for(sign: int, k: int | Budget) -> AbstractEstimator:
    if sign != 0:
        return _XNysDiagOrSigns()
    # One pair of products has no variance to compare; a loop goes on to more of them.
    least = XDiagEstimator.min_matvecs if isinstance(k, Budget) else 4
    return _XDiagOrSigns() if first_budget(k) >= least else HutchinsonEstimator()


# The basis is taken if its variances are below this fraction of those of signs, for as
# many products. Estimates that share a basis are correlated, which their variances do not
# show.
_GAIN = 0.85


class _XNysDiagOrSigns(XNysDiagEstimator):
    """XNysDiag or signs, from the same products: those of the probes."""

    def sketch(
        self,
        matmat: Callable[..., Array],
        probes: Inexact[Array, "n m"],
        k: int,
        eps: float,
    ) -> Sketch:
        return self._choose(super().sketch(matmat, probes, k, eps), probes, 1)

    def assess(
        self, state: Any, rounds: Int[Array, ""] | int, eps: float, k: Budget
    ) -> Sketch:
        probes = state.nystrom.basis @ state.probes
        return self._choose(super().assess(state, rounds, eps, k), probes, k.num_rounds)

    def _choose(
        self, sketch: Sketch, probes: Inexact[Array, "n m"], num_rounds: int
    ) -> Sketch:
        expansion = _one_sided(sketch)
        _, factor = expansion.shared
        # The approximation is exact on the probes.
        products = (factor.conj() @ probes).T @ factor + expansion.shift * probes.T
        signs, valid = probes.T, sketch.valid
        variance = _variance(expansion.own(), valid)
        flat = variance > _GAIN * _variance([(signs, products)], valid)
        count = jnp.sum(valid) if valid is not None else len(signs)
        left, zeros = probes / jnp.maximum(count, 1), jnp.zeros_like(probes)
        frame = by_round((left, zeros), (probes, zeros), num_rounds)
        return _or_signs(flat, sketch, signs, products, frame, valid)


class _XDiagOrSigns(XDiagEstimator):
    """XDiag or signs: the first half of the products, those of the probes, serves
    both."""

    def num_probes(self, k: int) -> int:
        return k // 2 * 2

    def sketch(
        self,
        matmat: Callable[..., Array],
        probes: Inexact[Array, "n m"],
        k: int,
        eps: float,
    ) -> Sketch:
        m = k // 2
        budget, rounds = one_round(k), jnp.zeros((), jnp.int32)
        first, second = probes[:, :m], probes[:, m:]
        state = self.start(len(probes), probes.dtype, budget)
        # One half of a round; the other is made below, of one kind or another.
        half = super().grow(_half(matmat), first, state, rounds, eps, budget)
        products = (half.q @ half.r).T
        known = _one_sided(super().assess(half, 1, eps, budget))
        variance = 2 * _variance(known.own(), None)
        flat = variance > _GAIN * _variance([(first.T, products)], None)
        other = jax.lax.cond(
            flat, lambda: matmat(second), lambda: matmat(half.q, adjoint=True)
        )
        other = other / half.scale
        sketch = super().assess(
            dataclasses.replace(half, z=other), rounds + 1, eps, budget
        )
        products = jnp.concatenate([products, other.T])
        valid = flat | (jnp.arange(2 * m) < m)
        frame = probes / (2 * m), probes
        return _or_signs(flat, sketch, probes.T, products, frame, valid)


def _half(matmat: Callable[..., Array]) -> Callable[..., Array]:
    """`matmat`, with zeros in the place of products with the adjoint."""

    def forward(x, adjoint=False):
        return jnp.zeros_like(x) if adjoint else matmat(x)

    return forward


def _one_sided(sketch: Sketch) -> OneSided:
    assert sketch.expansion is not None
    expansion = sketch.expansion()
    assert isinstance(expansion, OneSided)
    return expansion


def _variance(pairs: Sequence[Pair], valid: Bool[Array, " m"] | None) -> Real[Array, ""]:
    """The norm of the variances of the entries of samples that are the sums over the
    pairs of `conj(left) * image`."""
    samples = ft.reduce(jnp.add, [left.conj() * image for left, image in pairs])
    std_err = Moments.of(samples, valid).independent_std_err
    return jnp.linalg.norm(std_err**2)


def _or_signs(
    flat: Bool[Array, ""],
    sketch: Sketch,
    signs: Inexact[Array, "p n"],
    products: Inexact[Array, "p n"],
    frame: tuple[Inexact[Array, "n q"], Inexact[Array, "n q"]],
    valid: Bool[Array, " p"] | None,
) -> Sketch:
    """The sketch or, where the spectrum is `flat`, one made from `signs` and the products
    with them, with their frame."""
    expansion, p = _one_sided(sketch), len(signs)
    left, image = expansion.shared

    def pick(ours, theirs):
        grown = [(0, a - b) for a, b in zip(ours.shape, theirs.shape, strict=True)]
        return jnp.where(flat, ours, jnp.pad(theirs, grown))

    dropped = None
    if expansion.dropped is not None:
        # Its probes are the first of the signs.
        dropped = signs, pick(jnp.zeros_like(signs), expansion.dropped[1])
    chosen = OneSided(
        shared=(jnp.where(flat, 0, left), jnp.where(flat, 0, image)),
        images=pick(products, expansion.images),
        lefts=pick(jnp.zeros_like(signs), expansion.lefts),
        residuals=pick(signs, expansion.residuals),
        gram=pick(jnp.eye(p, dtype=signs.dtype), expansion.gram),
        products=expansion.products,
        shift=jnp.where(flat, 0, expansion.shift),
        probes=expansion.probes,
        dropped=dropped,
    )
    return dataclasses.replace(
        sketch,
        samples=None,
        std_err=None,
        extra={},
        frame=tuple(map(pick, frame, sketch.frame)),
        valid=valid,
        expansion=lambda: chosen,
    )
