from typing import ClassVar

import jax.numpy as jnp

from .._kernel.dense import qr
from .._moments import Moments
from .._sampler import AbstractSampler, RademacherSampler
from .base import AbstractSketchEstimator, Sketch


class HutchPlusPlusEstimator(AbstractSketchEstimator):
    r"""Hutch++: the trace of $A$ on a sketched range exactly, the rest by Hutchinson.

    With $Q$ an orthonormal basis of $A \Omega$ for $m = \lfloor k/3 \rfloor$ probes and
    $G$ the other $g = k - 2m$ probes with their part in $Q$ removed,
    $\mathrm{tr}(Q^* A Q) + \frac{1}{g} \sum_j g_j^* A g_j$. Any square operator; the
    samples are independent given $Q$, so the standard error is that of a mean of `g`.

    Cost: `k` products, $O(n k^2)$ operations, about $2k/3$ vectors of length n several
    times over. Needs `k >= 3`.

    ??? cite

        ```bibtex
        @inproceedings{meyer2021hutch,
            author    = {Meyer, Raphael A. and Musco, Cameron and Musco, Christopher and
                         Woodruff, David P.},
            title     = {Hutch++: Optimal Stochastic Trace Estimation},
            booktitle = {Symposium on Simplicity in Algorithms (SOSA)},
            pages     = {142--155},
            year      = {2021},
        }
        ```
    """

    sampler: AbstractSampler = RademacherSampler()
    min_matvecs: ClassVar[int] = 3
    semidefinite: ClassVar[bool] = False

    def num_probes(self, k):
        return k - k // 3

    def sketch(self, matmat, probes, k, eps):
        m = k // 3
        g = k - 2 * m
        basis, _ = qr(matmat(probes[:, :m]))
        rest = probes[:, m:]
        rest = rest - basis @ (basis.conj().T @ rest)
        # Algorithm 1 of the paper: both traces from one more block of products.
        directions = jnp.concatenate([basis, rest], axis=1)
        forms = jnp.sum(directions.conj() * matmat(directions), axis=0)
        samples = jnp.sum(forms[:m]) + forms[m:]
        left = jnp.concatenate([basis, rest / g], axis=1)
        std_err = Moments.of(samples).std_err()
        return Sketch(samples, std_err, (left, directions), num_matvecs=k)


HutchPlusPlusEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: distribution of the probes. Default is [`traceax.RademacherSampler`][].
"""
