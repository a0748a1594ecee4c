"""The Girard-Hutchinson estimator, for probes with `E[omega omega*] = I`.

    A ~ (1/k) sum_i A omega_i omega_i*,    tr A ~ (1/k) sum_i omega_i* A omega_i.

In the code: `omega_i` is `probe`. `AbstractStreamingEstimator` takes the mean, and reads
the trace or another quantity from the pairs `omega_i, A omega_i`.

References: Girard, A fast "Monte-Carlo cross-validation" procedure for large least
squares problems with noisy data, Numerische Mathematik 56 (1989); Hutchinson, A
stochastic estimator of the trace of the influence matrix for Laplacian smoothing splines,
Communications in Statistics - Simulation and Computation 18 (1989).
"""

from collections.abc import Callable
from typing import ClassVar

from jaxtyping import Array, Inexact

from .._core.sampler import AbstractSampler
from .._core.samplers import RademacherSampler
from .streaming import AbstractStreamingEstimator


class HutchinsonEstimator(AbstractStreamingEstimator):
    r"""Girard-Hutchinson: the mean of $A \omega_i \omega_i^*$ over `k` probes, which is
    $A$ in expectation.

    The trace is the mean of $\omega_i^* A \omega_i$, and the diagonal is the mean of
    $A \omega_i \circ \bar\omega_i$. Norms are found from the mean of
    $\|A \omega_i\|^2$.

    It takes any square operator. It is best for flat spectra, where a basis explains
    little, and if memory is too small for a basis. The error falls as $1/\sqrt{k}$. For
    real symmetric $A$ and random signs the variance is
    $2 (\|A\|_F^2 - \sum_i a_{ii}^2) / k$.

    Cost: `k` matvecs, and memory for one block of probes. It needs `k >= 1`; for an error
    bar, `k >= 2`.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        matrix = 2 * jnp.eye(400) + jnp.eye(400, k=1) + jnp.eye(400, k=-1)
        operator = lx.MatrixLinearOperator(matrix)
        key = jax.random.key(0)
        solution = tx.trace(operator, tx.HutchinsonEstimator(), k=100, key=key)
        print(f"{solution.value:.0f} +- {solution.std_err:.0f}, exactly 800")
        ```

    ??? cite

        ```bibtex
        @article{hutchinson1989stochastic,
            author  = {Hutchinson, M. F.},
            title   = {A Stochastic Estimator of the Trace of the Influence Matrix for
                       {Laplacian} Smoothing Splines},
            journal = {Communications in Statistics - Simulation and Computation},
            volume  = {18},
            number  = {3},
            pages   = {1059--1076},
            year    = {1989},
        }
        ```
    """

    sampler: AbstractSampler = RademacherSampler()
    min_matvecs: ClassVar[int] = 1

    def sample(
        self, mv: Callable[[Array], Array], probe: Inexact[Array, " n"]
    ) -> tuple[Inexact[Array, " n"], Inexact[Array, " m"]]:
        return probe, mv(probe)


HutchinsonEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: distribution of the probes. Default is [`traceax.RademacherSampler`][].

**Raises:**

`TypeError` for a `sampler` that is not a [`traceax.AbstractSampler`][].
"""
