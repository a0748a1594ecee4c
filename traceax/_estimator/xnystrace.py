from typing import ClassVar

import jax.numpy as jnp

from .._kernel.dense import normalise, thin_svd
from .._kernel.leave_one_out import (
    leave_one_out,
    leave_one_out_frame,
    Pairs,
    standard_errors,
)
from .._kernel.nystrom import nystrom, orthonormalise
from .._sampler import AbstractSampler, check_resphering, SphereSampler
from .base import AbstractSketchEstimator, Sketch


class XNysTraceEstimator(AbstractSketchEstimator):
    r"""XNysTrace: Nystrom++ with every probe used for both of its parts.

    From all `k` probes, a Nystrom approximation $\hat A$. Sample $i$ is
    $\mathrm{tr}(\hat A_{(i)}) + \omega_i^* (A - \hat A_{(i)}) \omega_i$ with probe $i$
    left out of the approximation; no further product is needed. Positive or negative
    semidefinite operators only, for which it is the most accurate choice: its basis is
    twice the size of XTrace's for the same budget.

    Cost: `k` products, $O(n k^2)$ operations, three arrays of `k` vectors of length n.
    Needs `k >= 1`; for an error bar, `k >= 2`. The standard error counts
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
    min_matvecs: ClassVar[int] = 1
    semidefinite: ClassVar[bool] = True

    def __check_init__(self):
        check_resphering(self.sampler, self.improved)

    def num_probes(self, k):
        return k

    def sketch(self, matmat, probes, k, eps):
        n, m = probes.shape
        # NOTE: the paper multiplies A by the probes; we multiply it by an orthonormal
        # basis of them, which spans the same approximation and is better conditioned.
        basis, s, vh = orthonormalise(probes)
        loo = leave_one_out(s, vh)
        essential = loo.essential.astype(int)
        products, scale = normalise(matmat(basis))
        approximation = nystrom(basis, products, eps)

        # In the coordinates of B, leaving probe i out projects off the unit vector p_i,
        # and outside the other probes' span A - A_i is the number 1 / weight_i.
        p = approximation.whitener @ loo.directions
        weight = jnp.sum(jnp.abs(p) ** 2, axis=0)
        rest = jnp.where(weight > 0, 1 / jnp.where(weight > 0, weight, 1), 0)
        p = p * jnp.sqrt(rest)
        gram = approximation.factor.conj().T @ approximation.factor
        form = p.conj().T @ gram @ p
        trace = jnp.trace(gram).real - approximation.shift * n

        c = (n - loo.rank + essential) if self.improved else loo.distance**2
        samples = trace - jnp.diagonal(form).real + c * rest

        pairs = Pairs.of(p.conj().T @ p)
        if self.improved:
            overlap = jnp.abs(loo.directions.conj().T @ loo.directions) ** 2
            c = (n - loo.rank + essential[:, None] + essential) * (1 - overlap)
        without = trace - pairs.trace(form).real + c * rest / pairs.det

        # The frame is that of XTrace for the same probes.
        q, s, vh = thin_svd(products @ (s[:, None] * vh), eps)
        frame = leave_one_out_frame(probes, q, leave_one_out(s, vh), self.improved)
        std_err, extra = standard_errors(samples, without)
        # What inexact products add, measured with products in TF32: see `nystrom`.
        inexact = 2 * m**0.5 * approximation.shift
        return Sketch(
            samples,
            jnp.hypot(std_err, inexact),
            frame,
            num_matvecs=k,
            scale=scale,
            semidefinite=approximation.semidefinite,
            extra=extra,
        )


XNysTraceEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: distribution of the probes. Default is [`traceax.SphereSampler`][].
- `improved`: whether to rescale the part of each probe outside the span of the others
    to the length that it has in the mean ("resphering"). Lowers the variance; needs a
    rotation-invariant sampler. Default is `True`.

**Raises:**

`ValueError` for `improved=True` with a sampler that is not rotation invariant.
"""
