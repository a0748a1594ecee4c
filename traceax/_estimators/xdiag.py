"""XDiag: every probe serves a basis of the range and, left out of it, a sample.

With Q_(i) an orthonormal basis of the products `A omega_j` of all m probes but `omega_i`,

    A ~ (1/m) sum_i A_i,
    A_i = Q_(i) Q_(i)* A + (I - Q_(i) Q_(i)*) A omega_i omega_i*,

of which the diagonal is read. With `A Omega = Q R` (columns `r_i`), `Z = A* Q` and the
unit vector `s_i` for which `Q s_i` is orthogonal to the other products,

    A_i = Q Z* + Q s_i (conj(s_i* r_i) omega_i - Z s_i)*,

so that all share `Q Z*` and each has one pair of vectors of its own: `OneSided`.

In the code: Q is `q`, Z is `z`, R is `r`, and `loo` holds `s_i` (`directions`) and
`s_i* r_i` (`distance`), in coordinates of `Q U` with U the `rotation`.

Reference: Epperly, Tropp and Webber, XTrace: making the most of every sample in
stochastic trace estimation, SIMAX 45 (2024).
"""

from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Inexact, Int, Real

from .._core.sampler import AbstractSampler
from .._core.samplers import RademacherSampler
from .._numerics.expansion import OneSided
from .._numerics.growth import extend, put, put_rows, rescale
from .._numerics.leave_one_out import leave_one_out_frame, leave_one_out_of
from .._run.budget import Budget
from .growing import AbstractGrowingEstimator, by_round
from .sketch import Sketch


class XDiagEstimator(AbstractGrowingEstimator):
    r"""XDiag: for the diagonal of any square operator, with every probe used for a basis
    and for the remainder.

    From $m = \lfloor k/2 \rfloor$ probes, $Q = \mathrm{orth}(A \Omega)$ and $A^* Q$.
    Estimate $i$ of the operator is $Q_{(i)} Q_{(i)}^* A + (I - Q_{(i)} Q_{(i)}^*) A
    \omega_i \omega_i^*$ with the basis $Q_{(i)}$ of the other products; its diagonal,
    or another linear quantity, is the sample. The error falls with the tail of the
    singular values: fast where they decay. On flat spectra
    [`traceax.HutchinsonEstimator`][] has half the error.

    Cost: $2m$ matvecs, half of them with the adjoint, $O(n m^2)$ operations, about five
    arrays of m vectors of length n. It needs `k >= 2`; for an error bar, `k >= 4`.

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
        solution = tx.diagonal(operator, tx.XDiagEstimator(), k=40, key=key)
        # Exact up to rounding: the rank, 10, is below k / 2.
        error = jnp.max(jnp.abs(solution.value - jnp.sum(x**2, axis=1)))
        print(f"{error:.0e}")
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

    sampler: AbstractSampler = RademacherSampler()
    min_matvecs: ClassVar[int] = 2
    semidefinite: ClassVar[bool] = False

    def probes_in_round(self, k: int) -> int:
        return k // 2

    def start(self, n: int, dtype: DTypeLike, k: Budget) -> "XDiagBuffers":
        m = k.num_rounds * self.probes_in_round(k.round_size)
        tall, square = jnp.zeros((n, m), dtype), jnp.zeros((m, m), dtype)
        scale = jnp.ones((), jnp.finfo(dtype).dtype)
        return XDiagBuffers(probes=tall, q=tall, z=tall, r=square, scale=scale)

    def grow(
        self,
        matmat: Callable[..., Array],
        probes: Inexact[Array, "n b"],
        state: "XDiagBuffers",
        rounds: Int[Array, ""],
        eps: float,
        k: Budget,
    ) -> "XDiagBuffers":
        products, scale = rescale(matmat(probes), state.scale, rounds)
        new = extend(state.q, products, rounds)
        # With the new columns of Q only: no work is repeated between rounds.
        z = matmat(new.block, adjoint=True) / scale
        column = put_rows(new.coefficients, new.coupling, rounds)
        return XDiagBuffers(
            probes=put(state.probes, probes, rounds),
            q=put(state.q, new.block, rounds),
            z=put(state.z, z, rounds),
            r=put(state.r, column, rounds),
            scale=scale,
        )

    def assess(
        self, state: "XDiagBuffers", rounds: Int[Array, ""] | int, eps: float, k: Budget
    ) -> Sketch:
        b, m = self.probes_in_round(k.round_size), state.r.shape[1]
        count = jnp.maximum(rounds * b, 1)
        rotation, r, loo = leave_one_out_of(state.r, eps)
        q, z = state.q @ rotation, state.z @ rotation

        def expansion():
            lefts = (z @ loo.directions).T
            products = state.q @ state.r
            # `r` is cut at the numerical rank; the samples keep what is cut.
            dropped = state.q @ (state.r - rotation @ r)
            return OneSided(
                shared=(z.T, q.T),
                images=(q @ loo.directions).T,
                lefts=lefts,
                residuals=(loo.distance * state.probes).T - lefts,
                gram=loo.directions.conj().T @ loo.directions,
                # As E[omega omega*] = I, these columns have about the norms of rows of A.
                products=products.T / count**0.5,
                dropped=(state.probes.T, dropped.T),
            )

        # The frame has `A Q Q*` in place of `Q Q* A`, which has the same mean, so that
        # derivatives need no product with the adjoint.
        left, right = leave_one_out_frame(
            state.probes, q, loo, improved=False, count=count, one_sided=True
        )
        return Sketch(
            samples=None,
            std_err=None,
            frame=by_round(jnp.split(left, 2, 1), jnp.split(right, 2, 1), k.num_rounds),
            num_matvecs=rounds * 2 * b,
            scale=state.scale,
            valid=jnp.arange(m) < rounds * b,
            expansion=expansion,
        )


class XDiagBuffers(eqx.Module):
    """The probes, Q and `Z = A* Q`, where `A Omega = Q R`. Products with A are in units
    of `scale`."""

    probes: Inexact[Array, "n m"]
    q: Inexact[Array, "n m"]
    z: Inexact[Array, "n m"]
    r: Inexact[Array, "m m"]
    scale: Real[Array, ""]


XDiagEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: distribution of the probes. Default is [`traceax.RademacherSampler`][].

**Raises:**

`TypeError` for a `sampler` that is not a [`traceax.AbstractSampler`][].
"""
