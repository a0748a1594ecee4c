from collections.abc import Callable
from typing import ClassVar

from jaxtyping import Array, Inexact

from .._core.sampler import AbstractSampler, RademacherSampler
from .base import AbstractStreamingEstimator


class HutchinsonEstimator(AbstractStreamingEstimator):
    r"""Girard-Hutchinson: the mean of $A \omega_i \omega_i^*$ over `k` probes, which is
    $A$ in expectation. Its trace is the mean of $\omega_i^* A \omega_i$, its diagonal
    that of $A \omega_i \circ \bar\omega_i$; norms come from the mean of
    $\|A \omega_i\|^2$.

    For any square operator. It is best for flat spectra, where a basis explains little,
    and where memory is too small for a basis. The error falls as $1/\sqrt{k}$. For real
    symmetric $A$ and random signs the variance is $2 (\|A\|_F^2 - \sum_i a_{ii}^2) / k$.

    Cost: `k` products, one block of probes of memory.

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

`TypeError` for a `sampler` that is no [`traceax.AbstractSampler`][].
"""
