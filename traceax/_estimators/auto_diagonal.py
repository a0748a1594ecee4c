"""Chooses an estimator of the diagonal, and plain signs where a basis does not help.

Hutchinson's estimates from signs are `conj(omega_j) * (A omega_j)`. XNysDiag and XDiag
make theirs from the same products with the probes, so both are available. With the
estimated variances of all entries of the diagonal as vectors, the basis is chosen if

    |Var(basis)|_2 <= gain |Var(signs)|_2.

The choice selects arrays and not programs. Signs are a one-sided expansion without a
basis (`OneSided` with nothing shared), so code that reads the sketch does not depend on
the choice.

In the code: "gain" is `_GAIN`, and `flat` is true where signs are chosen, as they are on
flat spectra.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Inexact, Int, PRNGKeyArray, Real

from .._core.flat import FlatOperator
from .._core.moments import Moments
from .._core.quantity import AbstractQuantity
from .._core.sampler import AbstractSampler
from .._core.samplers import RademacherSampler
from .._core.solution import Estimate
from .._numerics.expansion import OneSided, Pair
from .._run.budget import Budget, first_budget, one_round
from .._run.execution import AbstractExecution
from .base import AbstractEstimator
from .growing import AbstractGrowingEstimator, by_round
from .hutchinson import HutchinsonEstimator
from .sketch import AbstractSketchEstimator, Sketch
from .xdiag import XDiagEstimator
from .xnysdiag import XNysDiagEstimator
from .xnystrace import XNysTraceBuffers


class AutoDiagonalEstimator(AbstractEstimator):
    r"""Picks an estimator of the diagonal from the operator's tags, the budget and, while
    running, from the first products.

    1. [`traceax.ExactTraceEstimator`][] where at most `k` matvecs give the diagonal;
    2. for an operator that is tagged positive or negative semidefinite,
       [`traceax.XNysDiagEstimator`][] or, from the same products,
       [`traceax.HutchinsonEstimator`][], whichever varies less;
    3. for any other operator [`traceax.XDiagEstimator`][] or
       [`traceax.HutchinsonEstimator`][]: the first half of the products serves both, and
       their variances decide. With `traceax.Adaptive` it is always XDiag, which seldom
       reaches a tolerance on a flat spectrum: pass `HutchinsonEstimator()` there;
    4. for such an operator [`traceax.HutchinsonEstimator`][] if `k` is below 4, where
       XDiag has no error bar; with `traceax.Adaptive` if it is 1.

    With [`traceax.Adaptive`][] the `k` of these rules is `round_size`, not `max_k`.

    Where the eigenvalues are of similar size (as for a diagonally dominant matrix), a
    basis of `k` vectors captures too little of the operator, and plain signs are better.

    The choice is made with the same probes as the estimate. Where both methods are
    about equally good, this causes a bias: a tenth of the error where n is 20, less
    where n is larger. For an unbiased estimate, name the estimator.

    Cost: `k` matvecs, $O(n k^2)$ operations. Memory: the estimates of both methods are
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

    def default_max_k(self, operator: FlatOperator, k: Budget) -> int:
        return _estimator_for(operator.sign, k).default_max_k(operator, k)

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
    # Signs need products with new probes in place of `A* Q`, and later rounds of a loop
    # need `A* Q` of the earlier ones.
    if isinstance(k, Budget):
        fits = first_budget(k) >= XDiagEstimator.min_matvecs
        return XDiagEstimator() if fits else HutchinsonEstimator()
    # Variances to compare need two probes, and each takes two products.
    return _XDiagOrSigns() if k >= 4 else HutchinsonEstimator()


# The basis is taken if its variances are below this fraction of those of signs, for as
# many products. It is less than 1 since estimates that share a basis are correlated,
# which their variances do not show.
_GAIN = 0.85


class _XNysDiagOrSigns(AbstractGrowingEstimator):
    """XNysDiag or signs, from the same products with the probes."""

    sampler: AbstractSampler = RademacherSampler()
    min_matvecs: ClassVar[int] = XNysDiagEstimator.min_matvecs
    semidefinite: ClassVar[bool] = XNysDiagEstimator.semidefinite

    @property
    def basis_estimator(self) -> XNysDiagEstimator:
        return XNysDiagEstimator(self.sampler)

    def sketch(
        self,
        matmat: Callable[..., Array],
        probes: Inexact[Array, "n m"],
        k: int,
        eps: float,
    ) -> Sketch:
        sketch = self.basis_estimator.sketch(matmat, probes, k, eps)
        return self._choose(sketch, probes, num_rounds=1)

    def probes_in_round(self, k: int) -> int:
        return self.basis_estimator.probes_in_round(k)

    def start(self, n: int, dtype: DTypeLike, k: Budget) -> XNysTraceBuffers:
        return self.basis_estimator.start(n, dtype, k)

    def grow(
        self,
        matmat: Callable[[Array], Array],
        probes: Inexact[Array, "n b"],
        state: XNysTraceBuffers,
        rounds: Int[Array, ""],
        eps: float,
        k: Budget,
    ) -> XNysTraceBuffers:
        return self.basis_estimator.grow(matmat, probes, state, rounds, eps, k)

    def assess(
        self,
        state: XNysTraceBuffers,
        rounds: Int[Array, ""] | int,
        eps: float,
        k: Budget,
    ) -> Sketch:
        probes = state.nystrom.basis @ state.probes
        sketch = self.basis_estimator.assess(state, rounds, eps, k)
        return self._choose(sketch, probes, k.num_rounds)

    def _choose(
        self, sketch: Sketch, probes: Inexact[Array, "n m"], num_rounds: int
    ) -> Sketch:
        expansion = _one_sided(sketch)
        _, factor = expansion.shared
        # XNysDiag multiplies A by a basis of the probes. Its approximation is exact on
        # the probes, so their own products follow from it.
        products = (factor.conj() @ probes).T @ factor + expansion.shift * probes.T
        signs, valid = probes.T, sketch.valid
        variance = _variance(expansion.own(), valid)
        flat = variance > _GAIN * _variance([(signs, products)], valid)
        count = jnp.sum(valid) if valid is not None else len(signs)
        left, zeros = probes / jnp.maximum(count, 1), jnp.zeros_like(probes)
        frame = by_round((left, zeros), (probes, zeros), num_rounds)
        return _select(
            flat, sketch, signs=signs, products=products, frame=frame, valid=valid
        )


class _XDiagOrSigns(AbstractSketchEstimator):
    """XDiag or signs: the first half of the products, with the probes, serves both."""

    sampler: AbstractSampler = RademacherSampler()
    min_matvecs: ClassVar[int] = XDiagEstimator.min_matvecs
    semidefinite: ClassVar[bool] = XDiagEstimator.semidefinite

    @property
    def basis_estimator(self) -> XDiagEstimator:
        return XDiagEstimator(self.sampler)

    def num_probes(self, k: int) -> int:
        return k // 2 * 2

    def sketch(
        self,
        matmat: Callable[..., Array],
        probes: Inexact[Array, "n m"],
        k: int,
        eps: float,
    ) -> Sketch:
        m, basis = k // 2, self.basis_estimator
        budget, rounds = one_round(k), jnp.zeros((), jnp.int32)
        first, second = probes[:, :m], probes[:, m:]
        state = basis.start(len(probes), probes.dtype, budget)
        # Only the first half of the products: the second half depends on the choice.
        half = basis.grow(_forward_only(matmat), first, state, rounds, eps, budget)
        products = (half.q @ half.r).T
        # Without `A* Q` the estimates of XDiag are `(I - Q_(i) Q_(i)*) A omega_i
        # omega_i*`, the part that most of their variance comes from. For as many products
        # there are twice as many signs, hence the factor 2.
        remainder = _one_sided(basis.assess(half, 1, eps, budget))
        variance = 2 * _variance(remainder.own(), None)
        flat = variance > _GAIN * _variance([(first.T, products)], None)
        second_products = jax.lax.cond(
            flat, lambda: matmat(second), lambda: matmat(half.q, adjoint=True)
        )
        second_products = second_products / half.scale
        whole = dataclasses.replace(half, z=second_products)
        sketch = basis.assess(whole, rounds + 1, eps, budget)
        return _select(
            flat,
            sketch,
            signs=probes.T,
            products=jnp.concatenate([products, second_products.T]),
            frame=(probes / (2 * m), probes),
            valid=flat | (jnp.arange(2 * m) < m),
        )


def _forward_only(matmat: Callable[..., Array]) -> Callable[..., Array]:
    """`matmat`, with zeros in place of products with the adjoint."""

    def forward(x, adjoint=False):
        return jnp.zeros_like(x) if adjoint else matmat(x)

    return forward


def _one_sided(sketch: Sketch) -> OneSided:
    assert sketch.expansion is not None
    expansion = sketch.expansion()
    assert isinstance(expansion, OneSided)
    return expansion


def _variance(pairs: Sequence[Pair], valid: Bool[Array, " m"] | None) -> Real[Array, ""]:
    """The norm, over the entries of the diagonal, of the variances of the mean of samples
    that are the sums over the pairs of `conj(left) * image`."""
    samples = ft.reduce(jnp.add, [left.conj() * image for left, image in pairs])
    std_err = Moments.of(samples, valid).independent_std_err
    return jnp.linalg.norm(std_err**2)


def _select(
    flat: Bool[Array, ""],
    sketch: Sketch,
    *,
    signs: Inexact[Array, "p n"],
    products: Inexact[Array, "p n"],
    frame: tuple[Inexact[Array, "n q"], Inexact[Array, "n q"]],
    valid: Bool[Array, " p"] | None,
) -> Sketch:
    """The sketch from a basis or, if the spectrum is `flat`, a sketch from `signs` and
    their `products`, with their `frame` and the samples that are `valid`."""
    expansion, p = _one_sided(sketch), len(signs)
    left, image = expansion.shared

    def pick(from_signs, from_basis):
        # Signs have as many samples, or more: the others get zeros.
        shapes = zip(from_signs.shape, from_basis.shape, strict=True)
        padded = jnp.pad(from_basis, [(0, large - small) for large, small in shapes])
        return jnp.where(flat, from_signs, padded)

    dropped = None
    if expansion.dropped is not None:
        # The probes of the basis are the first of the signs.
        dropped = signs, pick(jnp.zeros_like(signs), expansion.dropped[1])
    left_frame, right_frame = sketch.frame
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
    # The samples of the trace and their error are those of the basis, and so are omitted:
    # the trace is read from the expansion, too.
    return dataclasses.replace(
        sketch,
        samples=None,
        std_err=None,
        extra={},
        frame=(pick(frame[0], left_frame), pick(frame[1], right_frame)),
        valid=valid,
        expansion=lambda: chosen,
    )
