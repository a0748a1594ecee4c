from typing import ClassVar

import jax.numpy as jnp

from .._kernel.dense import normalise, thin_svd
from .._kernel.leave_one_out import (
    leave_one_out,
    leave_one_out_frame,
    Pairs,
    resphere,
    standard_errors,
)
from .._sampler import AbstractSampler, check_resphering, SphereSampler
from .base import AbstractSketchEstimator, Sketch


class XTraceEstimator(AbstractSketchEstimator):
    r"""XTrace: Hutch++ with every probe used for the basis and for the remainder.

    From $m = \lfloor k/2 \rfloor$ probes, $Q = \mathrm{orth}(A \Omega)$. Sample $i$ is
    the Hutch++ estimate with the basis $Q_{(i)}$ of the other products and the single
    remaining probe $\omega_i$; all are had from $A\Omega$ and $AQ$. Any square operator.
    The error falls with the tail of the singular values: fast where they decay, as
    Hutchinson's where they do not.

    Cost: $2m$ products, $O(n m^2)$ operations, four arrays of m vectors of length n.
    Needs `k >= 2`; for an error bar, `k >= 4`. The standard error counts
    the correlation of the samples; `stats` has the more conservative jackknife over
    probes as `"jackknife_std_err"`, and as `"independent_std_err"` the published one,
    which is too small.

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

    def num_probes(self, k):
        return k // 2

    def sketch(self, matmat, probes, k, eps):
        n, m = probes.shape
        products, scale = normalise(matmat(probes))
        q, s, vh = thin_svd(products, eps)
        loo = leave_one_out(s, vh)
        essential = loo.essential.astype(int)
        z = matmat(q) / scale

        # Below, e_j = omega_j - Q w_j is the part of probe j outside Q, and leaving out
        # the probes of a projector P changes it to e_j + Q P w_j:
        #   t = tr(H) - tr(P H) + c (e_j + Q P w_j)* A (e_j + Q P w_j).
        r = s[:, None] * vh
        h, w = q.conj().T @ z, q.conj().T @ probes
        across = probes.conj().T @ z - w.conj().T @ h  # [j, :] = e_j* A Q
        back = r - h @ w  # [:, j] = Q* A e_j
        outside = jnp.sum(probes.conj() * products, axis=0)  # e_j* A e_j
        outside = outside - jnp.sum(w.conj() * r + across.T * w, axis=0)

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
            return resphere(n, loo.rank - removed, norms, inside)

        norms = jnp.sum(jnp.abs(probes) ** 2, axis=0)
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

        std_err, extra = standard_errors(samples, without)
        return Sketch(
            samples,
            std_err,
            leave_one_out_frame(probes, q, loo, self.improved),
            num_matvecs=2 * m,
            scale=scale,
            extra=extra,
        )


XTraceEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: distribution of the probes. Default is [`traceax.SphereSampler`][].
- `improved`: whether to rescale the part of each probe outside the basis to the length
    that it has in the mean ("resphering"). Lowers the variance; needs a
    rotation-invariant sampler. Default is `True`.

**Raises:**

`ValueError` for `improved=True` with a sampler that is not rotation invariant.
"""
