import equinox as eqx

from .._core.sampler import AbstractSampler, RademacherSampler
from .xnystrace import XNysTraceEstimator


class XNysDiagEstimator(XNysTraceEstimator):
    r"""XNysDiag: for the diagonal of a positive or negative semidefinite operator, the
    estimates of [`traceax.XNysTraceEstimator`][] from random signs.

    From all `k` probes, a Nystrom approximation $\hat A$. Estimate $i$ of the operator is
    $\hat A_{(i)} + (A - \hat A_{(i)}) \omega_i \omega_i^*$ with probe $i$ left out of
    the approximation. With signs, the diagonal of the second part is that of the
    remainder plus noise from its other entries alone; probes of the sphere, which serve
    the trace best, add noise from the diagonal itself.

    Cost: `k` products, $O(n k^2)$ operations, about `3.2 k` vectors of length n. Needs
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


XNysDiagEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: distribution of the probes. Default is [`traceax.RademacherSampler`][].
- `improved`: as for [`traceax.XNysTraceEstimator`][]. Default is `False`.

**Raises:**

`TypeError` for a `sampler` that is no [`traceax.AbstractSampler`][], and `ValueError`
for `improved=True` with one that is not rotation invariant.
"""
