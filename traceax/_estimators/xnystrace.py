from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Inexact, Int

from .._core.sampler import AbstractSampler, check_resphering, SphereSampler
from .._numerics.dense import normalise, qr, svd
from .._numerics.growth import put
from .._numerics.leave_one_out import (
    leave_one_out,
    leave_one_out_frame,
    leave_one_out_of,
    standard_errors,
)
from .._numerics.nystrom import GrowingNystrom, nystrom, orthonormalise
from .._numerics.xnystrace import xnystrace_expansion, xnystrace_samples
from .._run.budget import Budget
from .growing import AbstractGrowingEstimator, by_round
from .sketch import Sketch


class XNysTraceEstimator(AbstractGrowingEstimator):
    r"""XNysTrace: Nystrom++ with every probe used for both of its parts.

    From all `k` probes, a Nystrom approximation $\hat A$. Sample $i$ is
    $\mathrm{tr}(\hat A_{(i)}) + \omega_i^* (A - \hat A_{(i)}) \omega_i$ with probe $i$
    left out of the approximation; no further product is needed. Positive or negative
    semidefinite operators only, for which it is the most accurate choice: its basis is
    twice the size of XTrace's for the same budget.

    Cost: `k` products, $O(n k^2)$ operations, about `3.2 k` vectors of length n.
    Needs `k >= 1`; for an error bar, `k >= 2`. The standard error counts
    the correlation of the samples; `stats` has the more conservative jackknife over
    probes as `"jackknife_std_err"`, and as `"independent_std_err"` the published one,
    which is too small.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jax.random.normal(jax.random.key(0), (300, 10))
        operator = lx.MatrixLinearOperator(x @ x.T, lx.positive_semidefinite_tag)
        key = jax.random.key(1)
        solution = tx.trace(operator, tx.XNysTraceEstimator(), k=20, key=key)
        # Exact up to rounding: the rank, 10, is below k.
        print(f"{solution.value / jnp.sum(x**2):.4f}")  # 1.0000
        ```

    ??? cite

        ```bibtex
        @article{epperly2024xtrace,
            author  = {Epperly, Ethan N. and Tropp, Joel A. and Webber, Robert J.},
            title   = {{XTrace}: Making the Most of Every Sample in Stochastic Trace
                       Estimation},
            journal = {SIAM Journal on Matrix Analysis and Applications},
            volume  = {45},
            number  = {1},
            pages   = {1--23},
            year    = {2024},
        }
        ```
    """

    sampler: AbstractSampler = SphereSampler()
    improved: bool = eqx.field(static=True, default=True)
    min_matvecs: ClassVar[int] = 1
    semidefinite: ClassVar[bool] = True

    def __check_init__(self):
        check_resphering(self.sampler, self.improved)

    def num_probes(self, k: int) -> int:
        return k

    def sketch(
        self,
        matmat: Callable[[Array], Array],
        probes: Inexact[Array, "n m"],
        k: int,
        eps: float,
    ) -> Sketch:
        n, m = probes.shape
        # NOTE: the paper multiplies A by the probes; we multiply it by an orthonormal
        # basis of them, which spans the same approximation and is better conditioned.
        basis, s, vh = orthonormalise(probes)
        loo = leave_one_out(s, vh, float(jnp.finfo(s.dtype).eps))
        products, scale = normalise(matmat(basis))
        approximation = nystrom(basis, products, eps)
        gram = approximation.factor.conj().T @ approximation.factor
        whitener, shift = approximation.whitener, approximation.shift
        p = whitener @ loo.directions
        small = loo, p, whitener
        samples, without = xnystrace_samples(*small, gram, shift, n, self.improved)

        def expansion():
            directions, factor = basis @ loo.directions, approximation.factor
            tall = probes, directions, products, factor
            return xnystrace_expansion(*tall, *small, shift, self.improved)

        # The frame is that of XTrace for the same probes.
        q, r = qr(products @ (s[:, None] * vh))
        rotation, _, left_out = leave_one_out_of(r, eps)
        frame = leave_one_out_frame(probes, q @ rotation, left_out, self.improved)
        std_err, raised, extra = standard_errors(samples, without)
        return Sketch(
            samples,
            std_err,
            frame,
            num_matvecs=k,
            scale=scale,
            semidefinite=approximation.semidefinite,
            extra=extra,
            expansion=expansion,
            raised=raised,
            noise=_inexact(m, shift),
        )

    def probes_in_round(self, k: int) -> int:
        return k

    def start(self, n: int, dtype: DTypeLike, k: Budget) -> "_State":
        m = k.num_rounds * k.round_size
        return _State(GrowingNystrom.empty(n, m, dtype), jnp.zeros((m, m), dtype))

    def grow(
        self,
        matmat: Callable[[Array], Array],
        probes: Inexact[Array, "n b"],
        state: "_State",
        rounds: Int[Array, ""],
        eps: float,
        k: Budget,
    ) -> "_State":
        nystrom, coordinates = state.nystrom.grow(matmat, probes, rounds, eps)
        return _State(nystrom, put(state.probes, coordinates, rounds))

    def assess(
        self, state: "_State", rounds: Int[Array, ""] | int, eps: float, k: Budget
    ) -> Sketch:
        nystrom = state.nystrom
        n, m = nystrom.basis.shape
        count = rounds * k.round_size
        whitener, shift, semidefinite, gram = nystrom.whiten(eps)

        u, s, vh = svd(state.probes)
        roundoff = float(jnp.finfo(s.dtype).eps)
        s = jnp.where(s > m * roundoff * s[0], s, 0)
        loo = leave_one_out(s, vh, roundoff)
        coordinates = u @ loo.directions
        p = whitener @ coordinates
        small = loo, p, whitener
        samples, without = xnystrace_samples(*small, gram, shift, n, self.improved)
        valid = jnp.arange(m) < count
        probes = nystrom.basis @ state.probes

        def expansion():
            products = nystrom.q @ nystrom.r
            factor = (products + shift * nystrom.basis) @ whitener.conj().T
            tall = probes, nystrom.basis @ coordinates, products, factor
            return xnystrace_expansion(*tall, *small, shift, self.improved)

        std_err, raised, extra = standard_errors(samples, without, valid)

        rotation, _, loo = leave_one_out_of(nystrom.r @ state.probes, eps)
        settings = self.improved, count
        left, right = leave_one_out_frame(probes, nystrom.q @ rotation, loo, *settings)
        return Sketch(
            samples,
            std_err,
            by_round(jnp.split(left, 2, 1), jnp.split(right, 2, 1), k.num_rounds),
            num_matvecs=count,
            scale=nystrom.scale,
            semidefinite=semidefinite,
            valid=valid,
            extra=extra,
            expansion=expansion,
            raised=raised,
            noise=_inexact(count, shift),
        )


class _State(eqx.Module):
    """Omega = `nystrom.basis @ probes`."""

    nystrom: GrowingNystrom
    probes: Inexact[Array, "m m"]


def _inexact(count: Array | int, shift: Array) -> Array:
    """The error of the trace that inexact products cause; its size was measured with
    products in TF32: see `nystrom`."""
    return 2 * jnp.sqrt(jnp.asarray(count, shift.dtype)) * shift


XNysTraceEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: distribution of the probes. Default is [`traceax.SphereSampler`][].
- `improved`: whether to rescale the part of each probe outside the span of the others
    to the length that it has in the mean ("resphering"). Lowers the variance; needs a
    rotation-invariant sampler. Default is `True`.

**Raises:**

`TypeError` for a `sampler` that is no [`traceax.AbstractSampler`][], and `ValueError`
for `improved=True` with one that is not rotation invariant.
"""
