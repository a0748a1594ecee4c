"""A preconditioner of low rank: `P = U diag(values) U* + shift I`."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Bool, Inexact, Int, PyTree, Real

from .._core.flat import FlatOperator
from .._core.results import RESULTS
from .._run.execution import AbstractExecution
from .._run.gradient import attach, Frame
from .base import AbstractPreconditioner


@eqx.filter_jit
def _log_determinant(values: Array, shift: Array, size: int) -> Array:
    return size * jnp.log(shift) + jnp.sum(jnp.log1p(values / shift))


class Preconditioner(AbstractPreconditioner):
    """$P = \\hat A + \\sigma I$, with a Nystrom approximation $\\hat A$ of $A - \\sigma
    I$: for [`traceax.logdet`][] and, through `inverse`, for `lineax.CG`.

    [`traceax.nystrom_preconditioner`][] and [`traceax.pivoted_cholesky_preconditioner`][]
    make one. It is constant to all derivatives. A power of P takes `O(n r)` operations
    for each vector, and P holds r vectors of length n.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jnp.linspace(0.0, 1.0, 300)
        kernel = jnp.exp(-50 * (x[:, None] - x) ** 2) + 0.1 * jnp.eye(300)
        operator = lx.MatrixLinearOperator(kernel, lx.positive_semidefinite_tag)
        key = jax.random.key(0)
        preconditioner = tx.nystrom_preconditioner(operator, rank=20, key=key, shift=0.1)
        solver = lx.CG(rtol=1e-4, atol=1e-4)
        options = {"preconditioner": preconditioner.inverse()}
        solution = lx.linear_solve(operator, jnp.ones(300), solver, options=options)
        print(preconditioner.logdet, solution.stats["num_steps"])
        ```

    **Attributes:**

    - `vectors`, `values`: U, shape `(n, r)`, and the diagonal of $\\Lambda$, shape `(r,)`
        and in descending order, of $\\hat A = U \\Lambda U^*$.
    - `shift`: $\\sigma$, a real scalar.
    - `num_matvecs`: the number of matvecs that it was made from.
    - `result`: a [`traceax.RESULTS`][] member: `successful` or `nonfinite_product`.
    - `least`: a lower bound of the eigenvalues of $P^{-1/2} A P^{-1/2}$, or `None`.
    """

    vectors: Inexact[Array, "n r"]
    values: Real[Array, " r"]
    shift: Real[Array, ""]
    # The vector d: the derivative of sigma is taken to be `d* dA d` (see `control`).
    shift_direction: Inexact[Array, " n"]
    template: lx.IdentityLinearOperator
    num_matvecs: int | Int[Array, ""]
    result: RESULTS
    least: Real[Array, ""] | None = None  # pyright: ignore
    estimated: ClassVar[tuple[str, ...]] = ("vectors", "values", "shift")

    def prepare(self, operator: FlatOperator, **_: Any) -> AbstractPreconditioner:
        """Return this preconditioner, constant to derivatives."""
        return jax.lax.stop_gradient(super().prepare(operator))

    @property
    def logdet(self) -> Real[Array, ""]:
        """The exact $\\log\\det P$, by the matrix determinant lemma."""
        return _log_determinant(self.values, self.shift, self.size)

    @property
    def size(self) -> int:
        """n, the number of rows."""
        return self.vectors.shape[0]

    @property
    def largest(self) -> Real[Array, ""]:
        """The largest eigenvalue, a real scalar."""
        return jnp.max(self.values) + self.shift

    @property
    def structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.template.in_structure()

    def power(
        self, exponent: float, x: Inexact[Array, " n *k"]
    ) -> Inexact[Array, " n *k"]:
        """$P^p x$ for a flat vector x, or for the columns of x."""
        # P^p = sigma^p I + U ((Lambda + sigma)^p - sigma^p) U*.
        outer = self.shift**exponent
        inner = ((self.values + self.shift) ** exponent - outer).astype(x.dtype)
        part = jax.lax.cond(
            self._has_rank, _low_rank_part, _nothing, self.vectors, inner, x
        )
        return outer.astype(x.dtype) * x + part

    @property
    def _has_rank(self) -> Bool[Array, ""]:
        """False if P is a multiple of the identity, as `AutoPreconditioner` chooses where
        no rank pays. Then the low-rank part is skipped."""
        return self.values[0] > 0

    def diagonal_of_power(self, exponent: float) -> Real[Array, " n"]:
        """The diagonal of $P^p$, by `O(n r)` operations."""
        outer = self.shift**exponent
        inner = (self.values + self.shift) ** exponent - outer
        squares = jnp.abs(self.vectors) ** 2
        return outer + jnp.matmul(squares, inner, precision="highest")

    def control(
        self,
        operator: FlatOperator,
        value: Real[Array, ""],
        probes: Inexact[Array, "n k"],
        execution: AbstractExecution,
    ) -> Real[Array, ""]:
        """`value`, with a term of mean zero in its derivative that cancels sampling
        error. In a direction dA the term is

            tr(P^-1 dP) - mean(z* P^(-1/2) dP P^(-1/2) z)

        with dP close to the derivative of P: the exact trace replaces its estimate from
        the probes (Wenger, Pleiss et al., ICML 2022, arXiv:2107.00243).

        On the complement of the range of U, dP is `dsigma I` for `dsigma = d* dA d`;
        elsewhere it is dA. With `dY = (dA - dsigma I) U` and `g = U* x`,

            x* dP x = Re (2 x - U g)* dY g + dsigma x* x,
            tr(P^-1 dP) = Re tr((Lambda + sigma)^-1 U* dY) + dsigma tr(P^-1).

        Both are linear in `dA U` and `dA d`, and so are a frame of r + 1 columns.
        """
        x = self._split(probes / probes.shape[1] ** 0.5)
        basis, inverse = self.vectors, 1 / (self.values + self.shift)
        with jax.default_matmul_precision("highest"):
            g = basis.conj().T @ x
            left = basis * inverse - (2 * x @ g.conj().T - basis @ (g @ g.conj().T))
        trace = (self.size - self.values.size) / self.shift + jnp.sum(inverse)
        # The coefficient of dsigma, of which -Re tr(left* U) stems from dY.
        slope = trace - jnp.sum(jnp.abs(x) ** 2) - jnp.sum(left.conj() * basis).real
        direction = self.shift_direction[:, None]
        left = jnp.concatenate([left, slope.astype(left.dtype) * direction], axis=1)
        right = jnp.concatenate([basis, direction], axis=1)
        frame = Frame(jax.lax.stop_gradient(left), right)
        return jax.lax.cond(
            self._has_rank,
            lambda value: attach(operator, value, frame, execution=execution),
            lambda value: value,
            value,
        )

    def _split(self, z: Inexact[Array, "n k"]) -> Inexact[Array, "n p"]:
        """The vectors x over which the control variate sums `x* dP x`, from probes z.

        `M = P^(-1/2) A P^(-1/2)` is close to the identity on the range of U. For a pair
        of eigenvectors, one in it and one outside with the eigenvalue m, the coupling has
        the weight `log(m) / (m - 1)` in the derivative of `z* log(M) z`, but 1 in
        `z* K z` for `K = P^(-1/2) dP P^(-1/2)`. Its mean is zero for any weight, so w is
        the former for the largest m expected, `1 + lambda_r / sigma`. With `Pi = U U*`,

            w z* K z + (1 - w) ((Pi z)* K Pi z + (z - Pi z)* K (z - Pi z))

        is `z* K z` with the coupling times w; w = 1 adds variance if the rank is low.
        """
        excess = self.values[self.num_matvecs - 1] / self.shift
        weight = jnp.where(excess > 0, jnp.log1p(excess) / excess, 1).astype(z.dtype)
        with jax.default_matmul_precision("highest"):
            projected = self.vectors @ (self.vectors.conj().T @ z)
        parts = jnp.concatenate([projected, z - projected], axis=1)
        # A quadratic form takes the square root of its weight in the vector.
        weighted = [weight**0.5 * z, (1 - weight) ** 0.5 * parts]
        return self.power(-0.5, jnp.concatenate(weighted, axis=1))


# At module level: JAX compiles a condition anew for functions that it has not seen.


def _low_rank_part(vectors, inner, x):
    part = jnp.matmul(vectors.conj().T, x, precision="highest")
    return jnp.matmul(vectors * inner, part, precision="highest")


def _nothing(vectors, inner, x):
    # The vectors may have a wider dtype than x.
    return jnp.zeros(x.shape, jnp.promote_types(vectors.dtype, x.dtype))
