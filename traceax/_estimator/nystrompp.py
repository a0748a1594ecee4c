from typing import ClassVar

import jax.numpy as jnp

from .._kernel.dense import normalise, qr
from .._kernel.nystrom import nystrom, orthonormalise
from .._moments import Moments
from .._sampler import AbstractSampler, RademacherSampler
from .base import AbstractSketchEstimator, Sketch


class NystromPlusPlusEstimator(AbstractSketchEstimator):
    r"""Nystrom++: the trace of a Nystrom approximation, the rest by Hutchinson.

    Half of the products make a Nystrom approximation $\hat A$, the other
    $g = k - \lfloor k/2 \rfloor$ estimate the trace of $A - \hat A$:
    $\mathrm{tr}(\hat A) + \frac{1}{g} \sum_j \omega_j^* (A - \hat A) \omega_j$. Positive
    or negative semidefinite operators only. Its samples are independent given
    $\hat A$, and all products can be made in one pass over the operator.

    Cost: `k` products, $O(n k^2)$ operations, about `k` vectors of length n several
    times over. Needs `k >= 2`.

    ??? cite

        ```bibtex
        @article{persson2022improved,
            author  = {Persson, David and Cortinovis, Alice and Kressner, Daniel},
            title   = {Improved Variants of the {Hutch++} Algorithm for Trace Estimation},
            journal = {SIAM Journal on Matrix Analysis and Applications},
            volume  = {43},
            number  = {3},
            pages   = {1162--1185},
            year    = {2022},
        }
        ```
    """

    sampler: AbstractSampler = RademacherSampler()
    min_matvecs: ClassVar[int] = 2
    semidefinite: ClassVar[bool] = True

    def num_probes(self, k):
        return k

    def sketch(self, matmat, probes, k, eps):
        n, m = probes.shape[0], k // 2
        g = k - m
        basis, _, _ = orthonormalise(probes[:, :m])
        rest = probes[:, m:]
        products, scale = normalise(matmat(jnp.concatenate([basis, rest], axis=1)))
        approximation = nystrom(basis, products[:, :m], eps)
        inside = jnp.sum(jnp.abs(approximation.factor.conj().T @ rest) ** 2, axis=0)
        forms = jnp.sum(rest.conj() * products[:, m:], axis=0)
        norms = jnp.sum(jnp.abs(rest) ** 2, axis=0)
        # The approximation is one of A + shift I.
        samples = jnp.sum(jnp.abs(approximation.factor) ** 2) + forms - inside
        samples = samples + approximation.shift * (norms - n)
        # The frame is that of Hutch++ on the same products.
        span, _ = qr(products[:, :m])
        outside = rest - span @ (span.conj().T @ rest)
        left = jnp.concatenate([span, outside / g], axis=1)
        right = jnp.concatenate([span, outside], axis=1)
        return Sketch(
            samples,
            Moments.of(samples).std_err(),
            (left, right),
            num_matvecs=k,
            scale=scale,
            semidefinite=approximation.semidefinite,
        )


NystromPlusPlusEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: distribution of the probes. Default is [`traceax.RademacherSampler`][].
"""
