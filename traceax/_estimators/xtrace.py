"""XTrace: every probe serves a basis of the range and, left out of it, a sample.

With Q_(i) an orthonormal basis of the products `A omega_j` of all m probes but `omega_i`,

    tr A ~ (1/m) sum_i t_i,    t_i = tr(Q_(i)* A Q_(i)) + c_i v_i* A v_i,
    v_i = (I - Q_(i) Q_(i)*) omega_i,

with `c_i = 1`, or with resphering the factor that gives `v_i` the length that it has in
the mean. All `t_i` follow from `A Omega = Q R` and `Z = A Q`: see
`_numerics/two_sided.py`, which has the formulas of the samples.

In the code: Q is `q` and Z is `z`. As `Q_(i) Q_(i)* = Q (I - s_i s_i*) Q*`, only the
directions `s_i` are held, in `loo`, as coordinates in the basis `Q U` with U the
`rotation`.

Reference: Epperly, Tropp and Webber, XTrace: making the most of every sample in
stochastic trace estimation, SIMAX 45 (2024), sections 2.2 and 2.3.
"""

from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Inexact, Int, Real

from .._core.sampler import AbstractSampler, check_resphering
from .._core.samplers import SphereSampler
from .._numerics.dense import diagonal
from .._numerics.growth import border, extend, put, put_rows, rescale
from .._numerics.leave_one_out import (
    leave_one_out_frame,
    leave_one_out_of,
    standard_errors,
)
from .._numerics.two_sided import SmallMatrices, two_sided_samples, TwoSided
from .._run.budget import Budget
from .growing import AbstractGrowingEstimator, by_round
from .sketch import Sketch


class XTraceEstimator(AbstractGrowingEstimator):
    r"""XTrace: Hutch++ with every probe used for the basis and for the remainder.

    From $m = \lfloor k/2 \rfloor$ probes, $Q = \mathrm{orth}(A \Omega)$. Sample $i$ is
    the Hutch++ estimate with the basis $Q_{(i)}$ of the other products and the single
    remaining probe $\omega_i$; all samples follow from $A\Omega$ and $AQ$. It works for
    any square operator. The error falls with the tail of the singular values: fast where
    they decay, as slowly as Hutchinson's where they do not.

    Cost: $2m$ matvecs, $O(n m^2)$ operations, about six arrays of m vectors of
    length n.
    It needs `k >= 2`; for an error bar, `k >= 4`. The standard error accounts for the
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
        operator = lx.MatrixLinearOperator(x @ x.T)
        key = jax.random.key(1)
        solution = tx.trace(operator, tx.XTraceEstimator(), k=40, key=key)
        # Exact up to rounding: the rank, 10, is below k / 2.
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
    min_matvecs: ClassVar[int] = 2
    semidefinite: ClassVar[bool] = False
    further_std_errs: ClassVar[tuple[str, ...]] = (
        "jackknife_std_err",
        "independent_std_err",
    )

    def __check_init__(self):
        check_resphering(self.sampler, self.improved)

    def probes_in_round(self, k: int) -> int:
        return k // 2

    def start(self, n: int, dtype: DTypeLike, k: Budget) -> "XTraceBuffers":
        m = k.num_rounds * self.probes_in_round(k.round_size)
        real = jnp.finfo(dtype).dtype
        tall, square = jnp.zeros((n, m), dtype), jnp.zeros((m, m), dtype)
        norms = jnp.zeros(m, real)
        return XTraceBuffers(
            probes=tall,
            q=tall,
            z=tall,
            small=SmallMatrices(r=square, h=square, w=square, across=square, norms=norms),
            scale=jnp.ones((), real),
        )

    def grow(
        self,
        matmat: Callable[[Array], Array],
        probes: Inexact[Array, "n b"],
        state: "XTraceBuffers",
        rounds: Int[Array, ""],
        eps: float,
        k: Budget,
    ) -> "XTraceBuffers":
        small, b = state.small, probes.shape[1]
        products, scale = rescale(matmat(probes), state.scale, rounds)
        new = extend(state.q, products, rounds)
        q = put(state.q, new.block, rounds)
        z = put(state.z, matmat(new.block) / scale, rounds)
        all_probes = put(state.probes, probes, rounds)
        column = put_rows(new.coefficients, new.coupling, rounds)
        norms = jnp.sum(jnp.abs(probes) ** 2, axis=0)
        pairs = (q, z), (q, all_probes), (all_probes, z)
        # Only the rows and columns of the new block are computed, so that all rounds
        # together cost no more than one.
        h, w, across = border((small.h, small.w, small.across), pairs, rounds, b)
        small = SmallMatrices(
            r=put(small.r, column, rounds),
            h=h,
            w=w,
            across=across,
            norms=put_rows(small.norms[:, None], norms[:, None], rounds)[:, 0],
        )
        return XTraceBuffers(probes=all_probes, q=q, z=z, small=small, scale=scale)

    def assess(
        self,
        state: "XTraceBuffers",
        rounds: Int[Array, ""] | int,
        eps: float,
        k: Budget,
    ) -> Sketch:
        b = self.probes_in_round(k.round_size)
        n, m = state.probes.shape
        rotation, r, loo = leave_one_out_of(state.small.r, eps)
        samples, without = two_sided_samples(
            small=state.small,
            rotation=rotation,
            r=r,
            loo=loo,
            n=n,
            improved=self.improved,
        )
        valid = jnp.arange(m) < rounds * b
        std_err, raised, extra = standard_errors(samples, without, valid)

        # Tall products, which the trace alone does not need: its samples are computed
        # from the small matrices.
        def expansion():
            small, lefts = state.small, rotation @ loo.directions
            w = rotation.conj().T @ small.w
            inner = loo.directions.conj().T @ w
            # `Q coordinates` is what the other products capture of each probe.
            coordinates = rotation @ (w - loo.directions * diagonal(inner))
            products = state.q @ small.r
            count = jnp.maximum(rounds * b, 1)
            return TwoSided(
                shared=((state.q @ rotation).T, (state.z @ rotation).T),
                products=products.T / count**0.5,
                bases=(state.q @ lefts).T,
                images=(state.z @ lefts).T,
                remainders=(state.probes - state.q @ coordinates).T,
                remainder_images=(products - state.z @ coordinates).T,
                inner=inner,
                norms=small.norms,
                captured=jnp.sum(jnp.abs(w) ** 2, axis=0),
                loo=loo,
                improved=self.improved,
            )

        left, right = leave_one_out_frame(
            state.probes, state.q @ rotation, loo, self.improved, rounds * b
        )
        return Sketch(
            samples=samples,
            std_err=std_err,
            frame=by_round(jnp.split(left, 2, 1), jnp.split(right, 2, 1), k.num_rounds),
            num_matvecs=rounds * 2 * b,
            scale=state.scale,
            magnitude=jnp.linalg.norm(state.small.r) / jnp.maximum(rounds * b, 1) ** 0.5,
            valid=valid,
            extra=extra,
            expansion=expansion,
            raised=raised,
        )


class XTraceBuffers(eqx.Module):
    """The probes, Q and `Z = A Q`, and their inner products. Products with A are in units
    of `scale`."""

    probes: Inexact[Array, "n m"]
    q: Inexact[Array, "n m"]
    z: Inexact[Array, "n m"]
    small: SmallMatrices
    scale: Real[Array, ""]


XTraceEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: distribution of the probes. Default is [`traceax.SphereSampler`][].
- `improved`: whether to rescale the part of each probe outside the basis to the length
    that it has in the mean ("resphering"). This lowers the variance and needs a
    rotation-invariant sampler. Default is `True`.

**Raises:**

`TypeError` for a `sampler` that is not a [`traceax.AbstractSampler`][], and `ValueError`
for `improved=True` with one that is not rotation invariant.
"""
