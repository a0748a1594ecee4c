from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PyTree, Real

from .._core.flat import FlatOperator
from .._krylov.lanczos_recurrence import (
    lanczos_advance,
    lanczos_run,
    lanczos_start,
    LanczosDecomposition,
    LanczosState,
)
from .._numerics.dense import eigh, two_norm
from .._numerics.frechet import divided_differences
from .._quadrature.domain import leaves_domain, slopes_at, values_at
from .._quadrature.functions import AbstractSpectralFunction
from .._quadrature.rules import roundoff
from .._quadrature.tridiagonal import (
    apply_to_first,
    Compression,
    drop_last_step,
    radau,
    ritz,
    tridiagonal,
)


class Action(eqx.Module):
    """`v -> f(A) v`, by `steps` steps of Lanczos from v, for which room is made for
    `most`."""

    operator: FlatOperator
    function: AbstractSpectralFunction
    most: int = eqx.field(static=True)
    steps: Int[Array, ""] | int

    def __call__(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
        arrays, static = eqx.partition(self, eqx.is_array)
        return _apply(arrays, vector, static=static)

    def linear(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
        """Taken as linear in the vector, although Lanczos is so only to its accuracy;
        f(A) is Hermitian, so its transpose is its complex conjugate."""

        def conjugate(_, v):
            return self.product(v.conj()).conj()

        return jax.lax.custom_linear_solve(
            lambda v: v, vector, lambda _, v: self.product(v), conjugate
        )

    def product(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
        return self.applied(*self.run(vector))

    def applied(
        self,
        run: LanczosDecomposition,
        nodes: Real[Array, " s"],
        vectors: Real[Array, "s s"],
    ) -> Inexact[Array, " n"]:
        """`f(A) v`, or NaN where a Ritz value is outside the domain."""
        values = values_at(self.function, nodes, self.operator.eps)
        ends = jnp.stack([nodes[0], nodes[-1]])
        outside = leaves_domain(self.function, self.operator, ends, jnp.sum(values))
        values = jnp.where(outside, jnp.nan, values)
        # For the zero vector there is no Krylov space, and f(0) may be infinite.
        first = jnp.where(run.norm > 0, apply_to_first(nodes, vectors, values), 0)
        return run.norm * jnp.matmul(first, run.basis, precision="highest")

    def run(
        self, vector: Inexact[Array, " n"]
    ) -> tuple[LanczosDecomposition, Real[Array, " s"], Real[Array, "s s"]]:
        return self.read(self.advanced(vector))

    def advanced(self, vector: Inexact[Array, " n"]) -> LanczosState:
        """A run from this vector."""
        flat = self.operator
        state = lanczos_start(vector, self.most)
        return lanczos_advance(flat.mv, state, 0, self.steps, eps=flat.eps)

    def read(
        self, state: LanczosState
    ) -> tuple[LanczosDecomposition, Real[Array, " s"], Real[Array, "s s"]]:
        """A run that has made `steps` steps, with its Ritz values and their vectors."""
        run = lanczos_run(state, self.steps)
        return run, *ritz(run.alpha, run.beta)

    def errors(
        self,
        run: LanczosDecomposition,
        nodes: Real[Array, " s"],
        vectors: Real[Array, "s s"],
        following: Inexact[Array, " n"],
        hidden: float,
    ) -> tuple[Inexact[Array, "r n"], Inexact[Array, "2 n"], Real[Array, "2"]]:
        """Estimates of the errors of `f(A) v`, none of them proven, from a run and the
        basis vector of its next step. `hidden` is as for `lower_end`.

        - Of truncation: twice the change by Gauss-Radau at `lower_end`, and for a
          function whose rules make no bracket by that at the other end, and by one step
          less.
        - Of rounding: the change by rounding in the coefficients of the run; and to first
          order that by a shift of all eigenvalues by the machine epsilon times the
          largest.
        - How far else f(A) may go down and up: without limit if the function is infinite
          at zero, and the run does not tell where the spectrum begins."""
        eps, edge, f = self.operator.eps, run.beta[-1], self.function

        def first(matrix, end=jnp.inf):
            found, basis = eigh(matrix)
            # A node that is known is to be exact, where the function is steep.
            values = values_at(f, found.at[0].min(end), eps)
            return apply_to_first(found, basis, values)

        matrix = tridiagonal(run.alpha, run.beta)
        compression = Compression(matrix, edge[None, None], run.last, nodes, vectors)
        floor, below = self.lower_end(compression, hidden)
        rules, ends = radau(compression, below)[None], below[None]
        if not f.bracketed:
            above = -radau(-compression, -nodes[-1] - edge)
            rules = jnp.stack([*rules, above, drop_last_step(compression)])
            ends = jnp.append(ends, jnp.full_like(ends, jnp.inf, shape=2))
        others = jax.lax.map(lambda rule: first(*rule), (rules, ends))
        reference = apply_to_first(nodes, vectors, values_at(f, nodes, eps))
        truncated = jnp.where(edge > 0, 2 * (others - jnp.append(reference, 0)), 0)
        again = first(tridiagonal(run.alpha, run.projected))
        slopes = slopes_at(f, nodes, eps)
        moved = eps * jnp.max(jnp.abs(nodes)) * apply_to_first(nodes, vectors, slopes)
        rounded = jnp.stack([again - reference, moved])
        rounded = jnp.pad(rounded, ((0, 0), (0, 1)))
        changes = jnp.concatenate([truncated, rounded])
        changes = jnp.where(jnp.isnan(changes), 0, changes)
        basis = jnp.append(run.basis, following[None], axis=0)
        errors = run.norm * jnp.matmul(changes, basis, precision="highest")

        unknown = (edge > 0) & (below <= floor) & f.singular_at_zero
        change = f(jnp.maximum(jnp.stack([floor, nodes[0]]), floor))
        down = jnp.stack([change[0] < change[1], change[0] >= change[1]])
        beyond = jnp.where(unknown & down, jnp.inf, 0).astype(edge.dtype)
        return errors[:-2], errors[-2:], beyond

    def residual(
        self,
        run: LanczosDecomposition,
        nodes: Real[Array, " s"],
        vectors: Real[Array, "s s"],
    ) -> Real[Array, ""]:
        """That of `A f'(A) v` from the Krylov space, relative to what it should be."""
        slopes = slopes_at(self.function, nodes, self.operator.eps)
        last = apply_to_first(nodes, vectors, slopes)[run.last]
        size = two_norm(apply_to_first(nodes, vectors, slopes * nodes))
        return run.beta[-1] * jnp.abs(last) / jnp.where(size > 0, size, 1)

    def lower_end(
        self, compression: Compression, hidden: float
    ) -> tuple[Real[Array, ""], Real[Array, ""]]:
        """The least that an eigenvalue may be, and the least where there may be one, as
        far as a run tells.

        Of the weight of the start vector at most `1 / sum_(j < s) p_j(x)^2` is at a point
        x, for the orthonormal polynomials p_j of its run (the Christoffel function:
        Szego, Orthogonal Polynomials, 1975, section 3.41). Below the Ritz values that
        falls fast with the distance. Random start vectors seldom hide an eigenvector by
        a weight below the share `hidden` of the mean, 1 / n."""
        f, nodes, eps = self.function, compression.nodes, self.operator.eps
        at_zero = f(jnp.zeros_like(nodes[:1]))
        defined = not f.singular_at_zero and jnp.all(jnp.isfinite(at_zero))
        floor = jnp.where(defined, 0, roundoff(compression.largest, eps))
        positive = (nodes[0] > 0) | f.semidefinite_domain
        edge = jnp.abs(compression.coupling[0, 0])
        floor = jnp.where(positive, floor, nodes[0] - edge)
        room = jnp.maximum(nodes[0] - floor, 0)
        points = floor + room * 2.0 ** (-jnp.arange(1, 41, dtype=nodes.dtype) / 4)
        distances = (nodes - points[:, None]) / jnp.where(room > 0, room, 1)
        # With u = (T - x)^-1 e_s the polynomials are u_j / u_1.
        last = compression.vectors[compression.first] / jnp.where(room > 0, distances, 1)
        one = jnp.matmul(last, compression.vectors[0], precision="highest")
        weights = one**2 / jnp.sum(last**2, axis=1)
        excluded = (weights < hidden / self.operator.size) & (room > 0)
        return floor, jnp.max(jnp.where(excluded, points, floor))

    def differences(
        self, nodes: Real[Array, " s"], others: Real[Array, " s"]
    ) -> Real[Array, "s s"]:
        """Divided differences of f between the nodes of two runs."""

        def both(at):
            return jnp.append(*(at(self.function, x, self.operator.eps) for x in runs))

        runs = nodes, others
        found = divided_differences(jnp.append(*runs), both(values_at), both(slopes_at))
        return found[: len(nodes), len(nodes) :]

    def derivative(
        self,
        nodes: Real[Array, " s"],
        weights: Real[Array, " s"],
        products: Inexact[Array, "s n"],
    ) -> Inexact[Array, " n"]:
        """The sum of `weights_j f[A, t_j] p_j` for the rows p_j of `products`, where t_j
        are the nodes and `f[x, t]` is the divided difference. Linear in the products: one
        run from each, or in reverse mode a single one."""

        def each(entry):
            node, weight, product = entry
            run, others, vectors = self.run(product)
            values = self.differences(others, node[None])[:, 0]
            first = weight * apply_to_first(others, vectors, values)
            return run.norm * jnp.matmul(first, run.basis, precision="highest")

        def forward(_, products):
            total = jnp.sum(jax.lax.map(each, (nodes, weights, products)), axis=0)
            return jnp.zeros_like(products).at[0].set(total)

        def backward(_, cotangents):
            run, others, vectors = self.run(cotangents[0].conj())
            values = self.differences(others, nodes) * vectors[0][:, None] * weights
            first = jnp.matmul(vectors, values, precision="highest").T
            return run.norm * jnp.matmul(first, run.basis, precision="highest").conj()

        return jax.lax.custom_linear_solve(lambda x: x, products, forward, backward)[0]


@eqx.filter_custom_jvp
def _apply(arrays, vector, *, static) -> Any:
    return eqx.combine(arrays, static).linear(vector)


@_apply.def_jvp
def _apply_rule(primals, tangents, *, static) -> Any:
    """With `v ~ sum_j c_j x_j` over Ritz vectors x_j at t_j, the derivative of `f(A) v`
    in a direction dA is `sum_j c_j f[A, t_j] dA x_j`."""
    arrays, along = primals[0], tangents[0]
    frozen, vector = first_order_only(primals)
    constant = eqx.combine(frozen, static)
    out, tangent = _apply(*primals, static=static), jnp.zeros_like(vector)
    if tangents[1] is not None:
        tangent = constant.linear(tangents[1])
    if not jax.tree.leaves(along):
        return out, tangent
    run, nodes, vectors = constant.run(vector)
    weights = run.norm * vectors[0]
    rows = jnp.matmul(vectors.T, run.basis, precision="highest")

    def parts(arrays):
        action = eqx.combine(arrays, static)
        products = jax.vmap(action.operator.mv)(rows)
        return products, values_at(action.function, nodes, action.operator.eps)

    _, (products, values) = eqx.filter_jvp(parts, (arrays,), (along,))
    if products is not None:
        tangent = tangent + constant.derivative(nodes, weights, products)
    if values is not None:
        tangent = tangent + jnp.matmul(weights * values, rows, precision="highest")
    return out, tangent


@eqx.filter_custom_jvp
def first_order_only(primals: PyTree) -> PyTree:
    return primals


@first_order_only.def_jvp
def _first_order_only_rule(primals, tangents) -> Any:
    if jax.tree.leaves(tangents):
        raise NotImplementedError(
            "`traceax.function_of` has no second derivatives, nor mixed ones in the "
            "vector and the operator, nor has `traceax.diagonal_of_function`: take "
            "differences of first ones."
        )
    return primals[0], tangents[0]


def check_of_eigenvalues(function: AbstractSpectralFunction) -> None:
    if function.of_singular_values:
        raise ValueError(
            "`function` must be one of eigenvalues here. Found "
            f"`{type(function).__name__}`, of singular values. For that of a positive "
            "semidefinite operator pass a function of eigenvalues; for traces use "
            "`traceax.trace_of_function`."
        )
