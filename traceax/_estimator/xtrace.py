from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Inexact, Int, Real

from .._adaptive import Adaptive
from .._kernel.dense import normalise, qr, svd
from .._kernel.growth import border, extend, put, put_rows, rescale
from .._kernel.leave_one_out import (
    leave_one_out,
    leave_one_out_frame,
    Pairs,
    resphere,
    standard_errors,
)
from .._sampler import AbstractSampler, check_resphering, SphereSampler
from .sketch import AbstractGrowingEstimator, by_round, Sketch


class XTraceEstimator(AbstractGrowingEstimator):
    r"""XTrace: Hutch++ with every probe used for the basis and for the remainder.

    From $m = \lfloor k/2 \rfloor$ probes, $Q = \mathrm{orth}(A \Omega)$. Sample $i$ is
    the Hutch++ estimate with the basis $Q_{(i)}$ of the other products and the single
    remaining probe $\omega_i$; all are had from $A\Omega$ and $AQ$. Any square operator.
    The error falls with the tail of the singular values: fast where they decay, as
    Hutchinson's where they do not.

    Cost: $2m$ products, $O(n m^2)$ operations, about seven arrays of m vectors of
    length n.
    Needs `k >= 2`; for an error bar, `k >= 4`. The standard error counts
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
    improved: bool = True
    min_matvecs: ClassVar[int] = 2
    semidefinite: ClassVar[bool] = False

    def __check_init__(self):
        check_resphering(self.sampler, self.improved)

    def num_probes(self, k: int) -> int:
        return k // 2

    def sketch(
        self,
        matmat: Callable[[Array], Array],
        probes: Inexact[Array, "n m"],
        k: int,
        eps: float,
    ) -> Sketch:
        products, scale = normalise(matmat(probes))
        q, r = qr(products)
        z = matmat(q) / scale
        small = _Small(
            r=r,
            h=q.conj().T @ z,
            w=q.conj().T @ probes,
            across=probes.conj().T @ z,
            own=jnp.sum(probes.conj() * products, axis=0),
            norms=jnp.sum(jnp.abs(probes) ** 2, axis=0),
        )
        loo, rotation, samples, without = self._leave_one_out(small, len(probes), eps)
        std_err, extra = standard_errors(samples, without)
        return Sketch(
            samples,
            std_err,
            leave_one_out_frame(probes, q @ rotation, loo, self.improved),
            num_matvecs=2 * probes.shape[1],
            scale=scale,
            magnitude=jnp.linalg.norm(r) / probes.shape[1] ** 0.5,
            extra=extra,
        )

    def probes_in_round(self, k: int) -> int:
        return k // 2

    def start(self, n: int, dtype: DTypeLike, k: Adaptive) -> "_State":
        m = k.num_rounds * self.probes_in_round(k.round_size)
        real = jnp.finfo(dtype).dtype
        tall, square = jnp.zeros((n, m), dtype), jnp.zeros((m, m), dtype)
        lines = jnp.zeros(m, dtype), jnp.zeros(m, real)
        small = _Small(square, square, square, square, *lines)
        return _State(tall, tall, tall, small, jnp.ones((), real))

    def grow(
        self,
        matmat: Callable[[Array], Array],
        probes: Inexact[Array, "n b"],
        state: "_State",
        rounds: Int[Array, ""],
        eps: float,
        k: Adaptive,
    ) -> "_State":
        small, b = state.small, probes.shape[1]
        products, scale = rescale(matmat(probes), state.scale, rounds)
        new = extend(state.q, products, rounds, eps, jnp.linalg.norm(small.r))
        q = put(state.q, new.block, rounds)
        z = put(state.z, matmat(new.block) / scale, rounds)
        all_probes = put(state.probes, probes, rounds)
        own = jnp.sum(probes.conj() * products, axis=0)
        norms = jnp.sum(jnp.abs(probes) ** 2, axis=0)
        column = put_rows(new.coefficients, new.coupling, rounds)
        small = _Small(
            r=put(small.r, column, rounds),
            h=border(small.h, q, z, rounds, b),
            w=border(small.w, q, all_probes, rounds, b),
            across=border(small.across, all_probes, z, rounds, b),
            own=put_rows(small.own[:, None], own[:, None], rounds)[:, 0],
            norms=put_rows(small.norms[:, None], norms[:, None], rounds)[:, 0],
        )
        return _State(all_probes, q, z, small, scale)

    def assess(
        self, state: "_State", rounds: Int[Array, ""] | int, eps: float, k: Adaptive
    ) -> Sketch:
        b = self.probes_in_round(k.round_size)
        n, m = state.probes.shape
        loo, rotation, samples, without = self._leave_one_out(state.small, n, eps)
        valid = jnp.arange(m) < rounds * b
        std_err, extra = standard_errors(samples, without, valid)
        left, right = leave_one_out_frame(
            state.probes, state.q @ rotation, loo, self.improved, rounds * b
        )
        return Sketch(
            samples,
            std_err,
            by_round(jnp.split(left, 2, 1), jnp.split(right, 2, 1), k.num_rounds),
            num_matvecs=rounds * 2 * b,
            scale=state.scale,
            magnitude=jnp.linalg.norm(state.small.r)
            / jnp.maximum(jnp.sum(valid), 1) ** 0.5,
            valid=valid,
            extra=extra,
        )

    def _leave_one_out(self, small: "_Small", n: int, eps: float):
        """The samples and, entry `[i, j]`, sample j without probe i."""
        u, s, vh = svd(small.r)
        s = jnp.where(s > eps * s[0], s, 0)
        u = u * (s > 0)
        loo = leave_one_out(s, vh, eps)
        essential = loo.essential.astype(int)

        # Below, e_j = omega_j - Q w_j is the part of probe j outside Q, and leaving out
        # the probes of a projector P changes it to e_j + Q P w_j:
        #   t = tr(H) - tr(P H) + c (e_j + Q P w_j)* A (e_j + Q P w_j).
        r = s[:, None] * vh
        h, w = u.conj().T @ small.h @ u, u.conj().T @ small.w
        across = small.across @ u - w.conj().T @ h  # [j, :] = e_j* A Q
        back = r - h @ w  # [:, j] = Q* A e_j
        outside = small.own - jnp.sum(w.conj() * r + across.T * w, axis=0)  # e_j* A e_j

        directions = loo.directions
        inner = directions.conj().T @ w
        form = directions.conj().T @ h @ directions
        across, back = (across @ directions).T, directions.conj().T @ back
        a_ss, a_es, a_se = (jnp.diagonal(x) for x in (form, across, back))

        def own_form(beta):
            return outside + beta * a_es + beta.conj() * a_se + jnp.abs(beta) ** 2 * a_ss

        def factor(removed, inside):
            if not self.improved:
                return jnp.ones_like(inside)
            return resphere(n, loo.rank - removed, small.norms, inside)

        all_inside = jnp.sum(jnp.abs(w) ** 2, axis=0)
        trace = jnp.trace(h)

        beta = jnp.diagonal(inner)
        c = factor(essential, all_inside - jnp.abs(beta) ** 2)
        samples = trace - a_ss + c * own_form(beta)

        pairs = Pairs.of(directions.conj().T @ directions)
        alpha, beta_pair = pairs.coefficients(inner)
        cross_form = (
            alpha * across
            + alpha.conj() * back
            + jnp.abs(alpha) ** 2 * a_ss[:, None]
            + alpha.conj() * beta_pair * form
            + beta_pair.conj() * alpha * form.T
        )
        restored = (inner.conj() * alpha + beta.conj() * beta_pair).real
        c_pair = factor(essential[:, None] + essential, all_inside - restored)
        without = trace - pairs.trace(form) + c_pair * (own_form(beta_pair) + cross_form)
        return loo, u, samples, without


class _State(eqx.Module):
    """Probes, `Q` and `A Q` in buffers, in units of `scale`."""

    probes: Inexact[Array, "n m"]
    q: Inexact[Array, "n m"]
    z: Inexact[Array, "n m"]
    small: "_Small"
    scale: Real[Array, ""]


class _Small(eqx.Module):
    """All that XTrace needs to know of the tall arrays, where `A Omega = Q R`."""

    r: Inexact[Array, "m m"]
    h: Inexact[Array, "m m"]  # Q* A Q
    w: Inexact[Array, "m m"]  # Q* Omega
    across: Inexact[Array, "m m"]  # Omega* A Q
    own: Inexact[Array, " m"]  # omega_j* A omega_j
    norms: Real[Array, " m"]  # |omega_j|^2


XTraceEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: distribution of the probes. Default is [`traceax.SphereSampler`][].
- `improved`: whether to rescale the part of each probe outside the basis to the length
    that it has in the mean ("resphering"). Lowers the variance; needs a
    rotation-invariant sampler. Default is `True`.

**Raises:**

`ValueError` for `improved=True` with a sampler that is not rotation invariant.
"""
