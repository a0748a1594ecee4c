"""XNysTrace: every probe serves a Nystrom approximation and, left out of it, a sample.

With `A_(i)` the Nystrom approximation of A from all m probes but `omega_i`,

    tr A ~ (1/m) sum_i t_i,    t_i = tr A_(i) + omega_i* (A - A_(i)) omega_i.

All `t_i` follow from one product of A with the probes: see `_numerics/xnystrace.py`,
which has the formulas of the samples and their names in the code. Here `loo` holds the
directions of the probes, `without` has sample j without probe i, and nu, the shift that
makes the approximation stable, is `shift`.

Reference: Epperly, Tropp and Webber, XTrace: making the most of every sample in
stochastic trace estimation, SIMAX 45 (2024).
"""

from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Inexact, Int

from .._core.sampler import AbstractSampler, check_resphering
from .._core.samplers import SphereSampler
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

    All `k` probes make a Nystrom approximation $\hat A$. Sample $i$ is
    $\mathrm{tr}(\hat A_{(i)}) + \omega_i^* (A - \hat A_{(i)}) \omega_i$ with probe $i$
    left out of the approximation; no further matvec is needed. It is for positive or
    negative semidefinite operators only, for which it is the most accurate choice: its
    basis is twice the size of XTrace's for the same budget.

    Cost: `k` matvecs, $O(n k^2)$ operations, about `3.2 k` vectors of length n.
    It needs `k >= 1`; for an error bar, `k >= 2`. The standard error accounts for the
    correlation of the samples. `stats` has the more conservative jackknife over probes as
    `"jackknife_std_err"`, and the published error bar, which is too small, as
    `"independent_std_err"`.

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
    further_std_errs: ClassVar[tuple[str, ...]] = (
        "jackknife_std_err",
        "independent_std_err",
    )

    def __check_init__(self):
        check_resphering(self.sampler, self.improved)

    def sketch(
        self,
        matmat: Callable[[Array], Array],
        probes: Inexact[Array, "n m"],
        k: int,
        eps: float,
    ) -> Sketch:
        return xnystrace_sketch(matmat, probes, eps, improved=self.improved)

    def probes_in_round(self, k: int) -> int:
        return k

    def start(self, n: int, dtype: DTypeLike, k: Budget) -> "XNysTraceBuffers":
        return XNysTraceBuffers.empty(n, k.num_rounds * k.round_size, dtype)

    def grow(
        self,
        matmat: Callable[[Array], Array],
        probes: Inexact[Array, "n b"],
        state: "XNysTraceBuffers",
        rounds: Int[Array, ""],
        eps: float,
        k: Budget,
    ) -> "XNysTraceBuffers":
        return state.grow(matmat, probes, rounds, eps)

    def assess(
        self,
        state: "XNysTraceBuffers",
        rounds: Int[Array, ""] | int,
        eps: float,
        k: Budget,
    ) -> Sketch:
        return state.assess(rounds, eps, k, improved=self.improved)


def xnystrace_sketch(
    matmat: Callable[[Array], Array],
    probes: Inexact[Array, "n m"],
    eps: float,
    *,
    improved: bool,
) -> Sketch:
    """The sketch of XNysTrace and of XNysDiag from all probes at once."""
    n, m = probes.shape
    # NOTE: the paper multiplies A by the probes; we multiply it by an orthonormal
    # basis of them, which spans the same approximation and is better conditioned.
    basis, s, vh = orthonormalise(probes)
    loo = leave_one_out(s, vh, float(jnp.finfo(s.dtype).eps))
    products, scale = normalise(matmat(basis))
    approximation = nystrom(basis, products, eps)
    factor, shift = approximation.factor, approximation.shift
    gram = factor.conj().T @ factor
    whitener = approximation.whitener
    whitened = whitener @ loo.directions
    samples, without = xnystrace_samples(
        loo=loo,
        whitened=whitened,
        whitener=whitener,
        gram=gram,
        shift=shift,
        n=n,
        improved=improved,
    )

    def expansion():
        return xnystrace_expansion(
            probes=probes,
            directions=basis @ loo.directions,
            products=products,
            factor=factor,
            loo=loo,
            whitened=whitened,
            whitener=whitener,
            shift=shift,
            improved=improved,
        )

    # The samples are not linear in A. So the derivative is taken from the frame of XTrace
    # for the same probes, which is unbiased for the trace of any derivative of A.
    q, r = qr(products @ (s[:, None] * vh))
    rotation, _, left_out = leave_one_out_of(r, eps)
    frame = leave_one_out_frame(probes, q @ rotation, left_out, improved)
    std_err, raised, extra = standard_errors(samples, without)
    return Sketch(
        samples=samples,
        std_err=std_err,
        frame=frame,
        num_matvecs=m,
        scale=scale,
        semidefinite=approximation.semidefinite,
        extra=extra,
        expansion=expansion,
        raised=raised,
        noise=_product_noise(m, shift),
    )


class XNysTraceBuffers(eqx.Module):
    """The probes `Omega = Q probes` and the products with their basis Q, in buffers that
    grow. XNysTrace and XNysDiag share them."""

    nystrom: GrowingNystrom
    probes: Inexact[Array, "m m"]

    @staticmethod
    def empty(n: int, m: int, dtype: DTypeLike) -> "XNysTraceBuffers":
        nystrom = GrowingNystrom.empty(n, m, dtype)
        return XNysTraceBuffers(nystrom=nystrom, probes=jnp.zeros((m, m), dtype))

    def grow(
        self,
        matmat: Callable[[Array], Array],
        probes: Inexact[Array, "n b"],
        rounds: Int[Array, ""],
        eps: float,
    ) -> "XNysTraceBuffers":
        nystrom, coordinates = self.nystrom.grow(matmat, probes, rounds, eps)
        probes = put(self.probes, coordinates, rounds)
        return XNysTraceBuffers(nystrom=nystrom, probes=probes)

    def assess(
        self, rounds: Int[Array, ""] | int, eps: float, k: Budget, *, improved: bool
    ) -> Sketch:
        nystrom = self.nystrom
        n, m = nystrom.basis.shape
        count = rounds * k.round_size
        whitener, shift, semidefinite, gram = nystrom.whiten(eps)

        # With `probes = u diag(s) vh`, the basis of the probes is Q u.
        u, s, vh = svd(self.probes)
        roundoff = float(jnp.finfo(s.dtype).eps)
        s = jnp.where(s > m * roundoff * s[0], s, 0)
        loo = leave_one_out(s, vh, roundoff)
        coordinates = u @ loo.directions
        whitened = whitener @ coordinates
        samples, without = xnystrace_samples(
            loo=loo,
            whitened=whitened,
            whitener=whitener,
            gram=gram,
            shift=shift,
            n=n,
            improved=improved,
        )
        valid = jnp.arange(m) < count
        probes = nystrom.basis @ self.probes

        def expansion():
            products = nystrom.q @ nystrom.r
            factor = (products + shift * nystrom.basis) @ whitener.conj().T
            return xnystrace_expansion(
                probes=probes,
                directions=nystrom.basis @ coordinates,
                products=products,
                factor=factor,
                loo=loo,
                whitened=whitened,
                whitener=whitener,
                shift=shift,
                improved=improved,
            )

        std_err, raised, extra = standard_errors(samples, without, valid)

        # The frame of XTrace, as in `xnystrace_sketch`.
        rotation, _, left_out = leave_one_out_of(nystrom.r @ self.probes, eps)
        left, right = leave_one_out_frame(
            probes, nystrom.q @ rotation, left_out, improved, count
        )
        return Sketch(
            samples=samples,
            std_err=std_err,
            frame=by_round(jnp.split(left, 2, 1), jnp.split(right, 2, 1), k.num_rounds),
            num_matvecs=count,
            scale=nystrom.scale,
            semidefinite=semidefinite,
            valid=valid,
            extra=extra,
            expansion=expansion,
            raised=raised,
            noise=_product_noise(count, shift),
        )


# The error of the trace that inexact products cause, in units of `sqrt(m) shift`, as
# measured with products in TF32.
_NOISE_OF_SHIFT = 2


def _product_noise(count: Array | int, shift: Array) -> Array:
    """The error of the trace that inexact products cause. The samples do not show it."""
    return _NOISE_OF_SHIFT * jnp.sqrt(jnp.asarray(count, shift.dtype)) * shift


XNysTraceEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: distribution of the probes. Default is [`traceax.SphereSampler`][].
- `improved`: whether to rescale the part of each probe outside the span of the others
    to the length that it has in the mean ("resphering"). This lowers the variance and
    needs a rotation-invariant sampler. Default is `True`.

**Raises:**

`TypeError` for a `sampler` that is not a [`traceax.AbstractSampler`][], and `ValueError`
for `improved=True` with one that is not rotation invariant.
"""
