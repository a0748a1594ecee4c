"""Diag++ without bias: a sketched range exactly, the remainder by Hutchinson.

With Q an orthonormal basis of `A Omega` for m probes, and g other probes `omega_j`,

    A ~ Q Q* A + (1/g) sum_j (I - Q Q*) A omega_j omega_j*,

of which the diagonal, or another linear quantity, is read.

In the code: Q is `basis`, `A* Q` is `adjoint_images`, the `omega_j` are `sample_probes`,
and `(I - Q Q*) A omega_j` are `images`.

Reference: Epperly, Make the Most of What You Have: Resource-Efficient Randomized
Algorithms for Matrix Computations, PhD thesis, California Institute of Technology (2025).
"""

from collections.abc import Callable
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Inexact

from .._core.sampler import AbstractSampler
from .._core.samplers import RademacherSampler
from .._numerics.dense import normalise, qr
from .._numerics.expansion import Independent
from .sketch import AbstractSketchEstimator, Sketch


class DiagPlusPlusEstimator(AbstractSketchEstimator):
    r"""Diag++ without bias, for the diagonal of any square operator: exact on a sketched
    range, Hutchinson for the remainder.

    With $Q$ an orthonormal basis of $A \Omega$ for $m = \lfloor k/3 \rfloor$ probes, and
    $g = k - 2m$ other probes, the estimate is the diagonal of
    $Q Q^* A + \frac{1}{g} \sum_j (I - Q Q^*) A \omega_j \omega_j^*$, or another linear
    quantity of it. Its samples are independent given $Q$. The first Diag++ (Baston and
    Nakatsukasa, arXiv:2208.03268) divides by the squares of probes with their part in $Q$
    removed, and is biased.

    Cost: `k` matvecs, m of them with the adjoint, $O(n k^2)$ operations, about `2 k`
    vectors of length n. It needs `k >= 3`; for an error bar, `k >= 4`.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jax.random.normal(jax.random.key(0), (300, 10))
        operator = lx.FunctionLinearOperator(
            lambda v: x @ (x.T @ v), jax.ShapeDtypeStruct((300,), x.dtype)
        )
        key = jax.random.key(1)
        solution = tx.diagonal(operator, tx.DiagPlusPlusEstimator(), k=60, key=key)
        # Exact up to rounding: the rank, 10, is below k / 3.
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
    min_matvecs: ClassVar[int] = 3
    semidefinite: ClassVar[bool] = False

    def num_probes(self, k: int) -> int:
        return k - k // 3

    def sketch(
        self,
        matmat: Callable[..., Array],
        probes: Inexact[Array, "n m"],
        k: int,
        eps: float,
    ) -> Sketch:
        # Q takes 2m matvecs, m of them with the adjoint, and the other probes take g. The
        # split into thirds is that of Hutch++.
        m = k // 3
        g = k - 2 * m
        products, scale = normalise(matmat(probes[:, :m]))
        basis, _ = qr(products)
        sample_probes = probes[:, m:]
        adjoint_images = matmat(basis, adjoint=True) / scale
        images = matmat(sample_probes) / scale
        # The images are projected, and not the probes: this keeps the entries of signs at
        # modulus one, so that the diagonal of the remainder adds no variance.
        images = images - basis @ (basis.conj().T @ images)
        projected = sample_probes - basis @ (basis.conj().T @ sample_probes)
        # The frame has `A Q Q*` in place of `Q Q* A`, which has the same mean, so that
        # derivatives need no product with the adjoint.
        return Sketch(
            samples=None,
            std_err=None,
            frame=(
                jnp.concatenate([basis, sample_probes / g], axis=1),
                jnp.concatenate([basis, projected], axis=1),
            ),
            num_matvecs=k,
            scale=scale,
            expansion=lambda: Independent(
                shared=(adjoint_images.T, basis.T),
                own_pair=(sample_probes.T, images.T),
                products=products.T / m**0.5,
            ),
        )


DiagPlusPlusEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: distribution of the probes. Default is [`traceax.RademacherSampler`][].

**Raises:**

`TypeError` for a `sampler` that is not a [`traceax.AbstractSampler`][].
"""
