"""XNysDiag: the estimates of the operator of XNysTrace, from random signs.

With `A_(i)` the Nystrom approximation of A from all m probes but `omega_i`,

    A ~ (1/m) sum_i (A_(i) + (A - A_(i)) omega_i omega_i*),

of which the diagonal is read. The algorithm is that of XNysTrace, and both classes call
it in `xnystrace.py`. Only the defaults differ: signs, and so no resphering, which needs
rotation-invariant probes.

Reference: Epperly, Make the Most of What You Have: Resource-Efficient Randomized
Algorithms for Matrix Computations, PhD thesis, California Institute of Technology (2025).
"""

from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
from jaxtyping import Array, DTypeLike, Inexact, Int

from .._core.sampler import AbstractSampler, check_resphering
from .._core.samplers import RademacherSampler
from .._run.budget import Budget
from .growing import AbstractGrowingEstimator
from .sketch import Sketch
from .xnystrace import xnystrace_sketch, XNysTraceBuffers


class XNysDiagEstimator(AbstractGrowingEstimator):
    r"""XNysDiag: for the diagonal of a positive or negative semidefinite operator, the
    estimates of [`traceax.XNysTraceEstimator`][] from random signs.

    All `k` probes make a Nystrom approximation $\hat A$. Estimate $i$ of the operator is
    $\hat A_{(i)} + (A - \hat A_{(i)}) \omega_i \omega_i^*$ with probe $i$ left out of
    the approximation. With signs, the diagonal of the second part is the diagonal of the
    remainder plus noise from its off-diagonal entries alone. Probes on the sphere, which
    serve the trace best, add noise from the diagonal itself.

    Cost: `k` matvecs, $O(n k^2)$ operations, about `3.2 k` vectors of length n. It needs
    `k >= 1`; for an error bar, `k >= 2`.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jax.random.normal(jax.random.key(0), (300, 10))
        operator = lx.FunctionLinearOperator(
            lambda v: x @ (x.T @ v),
            jax.ShapeDtypeStruct((300,), x.dtype),
            lx.positive_semidefinite_tag,
        )
        key = jax.random.key(1)
        solution = tx.diagonal(operator, tx.XNysDiagEstimator(), k=20, key=key)
        # Exact up to rounding: the rank, 10, is below k.
        error = jnp.max(jnp.abs(solution.value - jnp.sum(x**2, axis=1)))
        print(f"{error:.0e}")
        ```

    ??? cite

        ```bibtex
        @phdthesis{epperly2025make,
            author  = {Epperly, Ethan N.},
            title   = {Make the Most of What You Have: Resource-Efficient Randomized
                       Algorithms for Matrix Computations},
            school  = {California Institute of Technology},
            year    = {2025},
            note    = {arXiv:2512.15929},
        }
        ```
    """

    sampler: AbstractSampler = RademacherSampler()
    improved: bool = eqx.field(static=True, default=False)
    min_matvecs: ClassVar[int] = 1
    semidefinite: ClassVar[bool] = True

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

    def start(self, n: int, dtype: DTypeLike, k: Budget) -> XNysTraceBuffers:
        return XNysTraceBuffers.empty(n, k.num_rounds * k.round_size, dtype)

    def grow(
        self,
        matmat: Callable[[Array], Array],
        probes: Inexact[Array, "n b"],
        state: XNysTraceBuffers,
        rounds: Int[Array, ""],
        eps: float,
        k: Budget,
    ) -> XNysTraceBuffers:
        return state.grow(matmat, probes, rounds, eps)

    def assess(
        self,
        state: XNysTraceBuffers,
        rounds: Int[Array, ""] | int,
        eps: float,
        k: Budget,
    ) -> Sketch:
        return state.assess(rounds, eps, k, improved=self.improved)


XNysDiagEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: distribution of the probes. Default is [`traceax.RademacherSampler`][].
- `improved`: as for [`traceax.XNysTraceEstimator`][]. Default is `False`.

**Raises:**

`TypeError` for a `sampler` that is not a [`traceax.AbstractSampler`][], and `ValueError`
for `improved=True` with one that is not rotation invariant.
"""
