"""Products `f(A) v` with a function of a Hermitian operator, by Lanczos.

s steps from v give orthonormal vectors V and a tridiagonal matrix T with

    A V = V T + beta_s v_(s+1) e_s*,    T = S diag(t_1, ..., t_s) S*,
    f(A) v ~ ||v|| V f(T) e_1 = ||v|| V S f(diag(t)) S* e_1

(Higham, Functions of Matrices, 2008, chapter 13). The approximation is exact for
polynomials of degree up to s - 1.

In the code the rows of `run.basis` are the columns of V, `run.alpha` and `run.beta` are
the entries of T, `run.norm` is ||v||, `nodes` are the t_j, the columns of `vectors` are
those of S, `edge` is beta_s and `following` is v_(s+1).
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, PyTree, Real

from .._core.flat import FlatOperator, freeze
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
from .._run.steps import AdaptiveSteps, advance_until, excess


# The change of a product by another rule counts this many times. On twenty spectra the
# change was 1 to 10 times the error, but entries of diagonal operators differ in their
# errors (docs/devdocs/quadrature.md, "Without a bracket").
_SAFETY = 2
# `lower_end` tries this many points, four for each halving of the distance from the
# floor, which reaches a thousandth of it to within 19%. A finer grid costs operations and
# gains little, as the Christoffel function falls fast.
_GRID_SIZE, _POINTS_PER_HALVING = 40, 4


class Action(eqx.Module):
    """`v -> f(A) v`, by Lanczos from v, in buffers for `most` steps.

    `steps` is the number of steps. If it is adaptive, then each run makes as many as
    reduce the error estimate to its share of the norm of the product, and the product is
    NaN if `most` steps are too few."""

    operator: FlatOperator
    function: AbstractSpectralFunction
    most: int = eqx.field(static=True)
    steps: Int[Array, ""] | int | AdaptiveSteps

    def __call__(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
        arrays, static = eqx.partition(self, eqx.is_array)
        return _apply(arrays, vector, static=static)

    def linear_map(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
        """`f(A) v`, with the derivative and the transpose of a linear map of v.

        Lanczos is linear in v only to its accuracy. The derivative of its recurrence
        would lose all digits once Ritz values converge, so it is not used. The transpose
        of f(A) is the complex conjugate of its adjoint."""

        def transposed(_, v):
            return self.matvec(v.conj(), conjugate=True).conj()

        # A "solve" with the identity declares a linear map with a transpose of its own.
        return jax.lax.custom_linear_solve(
            lambda v: v, vector, lambda _, v: self.matvec(v), transposed
        )

    def matvec(
        self, vector: Inexact[Array, " n"], *, conjugate: bool = False
    ) -> Inexact[Array, " n"]:
        """`f(A) v`, or `f(A)* v`, without rules for derivatives."""
        state, steps, converged = self.advanced(vector)
        run, nodes, vectors = self.read(state, steps)
        product = self.evaluate(run, nodes, vectors, conjugate=conjugate)
        return jnp.where(converged, product, jnp.nan)

    def evaluate(
        self,
        run: LanczosDecomposition,
        nodes: Real[Array, " s"],
        vectors: Real[Array, "s s"],
        *,
        conjugate: bool = False,
    ) -> Inexact[Array, " n"]:
        """`f(A) v` or `f(A)* v` from a run, NaN if a Ritz value is outside the domain."""
        values = values_at(self.function, nodes, self.operator.eps)
        ends = jnp.stack([nodes[0], nodes[-1]])
        outside = leaves_domain(self.function, self.operator, ends, jnp.sum(values))
        values = jnp.where(outside, jnp.nan, values)
        values = values.conj() if conjugate else values
        # For the zero vector there is no Krylov space, and f(0) may be infinite.
        first = jnp.where(run.norm > 0, apply_to_first(nodes, vectors, values), 0)
        return run.norm * jnp.matmul(first, run.basis, precision="highest")

    def run(
        self, vector: Inexact[Array, " n"]
    ) -> tuple[LanczosDecomposition, Real[Array, " s"], Real[Array, "s s"]]:
        """A run from this vector, its Ritz values and the eigenvectors of T."""
        state, steps, _ = self.advanced(vector)
        return self.read(state, steps)

    def advanced(
        self, vector: Inexact[Array, " n"]
    ) -> tuple[LanczosState, Int[Array, ""] | int, Bool[Array, ""] | bool]:
        """The state of a run from this vector after its last step, the number of its
        steps, and whether the number was large enough, as far as that is asked for."""
        flat, state = self.operator, lanczos_start(vector, self.most)

        def advance(state, first, last):
            return lanczos_advance(flat.mv, state, first, last, eps=flat.eps)

        if not isinstance(self.steps, AdaptiveSteps):
            return advance(state, 0, self.steps), self.steps, True
        constant = freeze(self)
        return advance_until(
            advance, state, self.steps, first=2, excess_after=constant.relative_error
        )

    def relative_error(
        self, state: LanczosState, steps: Int[Array, ""] | int
    ) -> Real[Array, ""]:
        """The estimated truncation error of `f(A) v` over its norm, without the rounding
        error, which further steps do not reduce."""
        run, nodes, vectors = self.read(state, steps)
        # An eigenvector that v has a share of below this one, over n, may be overlooked.
        # v may be any vector, so this is less than random vectors call for; and for none
        # at all, functions that are infinite at zero would take half as many steps again.
        truncated, rounded, _ = self.changes(
            run, nodes, vectors, hidden=self.operator.eps
        )
        values = values_at(self.function, nodes, self.operator.eps)
        product = two_norm(apply_to_first(nodes, vectors, values))
        error = jnp.max(jax.vmap(two_norm)(truncated))
        floor = jnp.max(jax.vmap(two_norm)(rounded)) + self.operator.rounding * product
        return excess(error - floor, product)

    def read(
        self, state: LanczosState, steps: Int[Array, ""] | int
    ) -> tuple[LanczosDecomposition, Real[Array, " s"], Real[Array, "s s"]]:
        """A run after `steps` steps, its Ritz values and the eigenvectors of T."""
        run = lanczos_run(state, steps)
        return run, *ritz(run.alpha, run.beta)

    def errors(
        self,
        run: LanczosDecomposition,
        nodes: Real[Array, " s"],
        vectors: Real[Array, "s s"],
        following: Inexact[Array, " n"],
        hidden: float,
    ) -> tuple[Inexact[Array, "r n"], Inexact[Array, "2 n"], Real[Array, "2"]]:
        """Estimates of the errors of `f(A) v` from a run. None of them is proven.
        `following` is the basis vector of the next step. The errors are the `changes`, in
        the basis of the run."""
        truncated, rounded, beyond = self.changes(run, nodes, vectors, hidden)
        basis = jnp.append(run.basis, following[None], axis=0)
        truncated, rounded = (
            run.norm * jnp.matmul(changes, basis, precision="highest")
            for changes in (truncated, rounded)
        )
        return truncated, rounded, beyond

    def changes(
        self,
        run: LanczosDecomposition,
        nodes: Real[Array, " s"],
        vectors: Real[Array, "s s"],
        hidden: float,
    ) -> tuple[Inexact[Array, "r q"], Inexact[Array, "2 q"], Inexact[Array, "2"]]:
        """Changes of `f(T) e_1` that estimate the errors of a run. They have one entry
        more than the run, along v_(s+1). `hidden` is explained in `lower_end`.

        - Truncation: twice the change by the Gauss-Radau rule with a node at `lower_end`.
          If the rules of the function do not bracket, also twice the change by the
          Gauss-Radau rule at the upper end, and by the Gauss rule with one step fewer.
        - Rounding: the change by rounding in the coefficients of the run, and to first
          order the change when all eigenvalues shift by the machine epsilon times the
          largest one.
        - How much further f(A) may lie below and above: infinitely far if the function is
          infinite at zero and the run does not show where the spectrum begins.
        """
        eps, edge, f = self.operator.eps, run.beta[-1], self.function

        def first_column(matrix, end=jnp.inf):
            """`f(T') e_1` for the matrix T' of a rule whose smallest node is `end`, if
            that is finite."""
            ritz_values, basis = eigh(matrix)
            # The prescribed node is set, not computed: where the function is steep, a
            # rounding error of the node would change f by more than truncation does, and
            # below zero f may be NaN.
            smallest = jnp.where(jnp.isfinite(end), end, ritz_values[0])
            values = values_at(f, ritz_values.at[0].set(smallest), eps)
            return apply_to_first(ritz_values, basis, values)

        matrix = tridiagonal(run.alpha, run.beta)
        compression = Compression(
            matrix=matrix,
            coupling=edge[None, None],
            first=run.last,
            nodes=nodes,
            vectors=vectors,
        )
        floor, lower = self.lower_end(compression, hidden)
        rules, ends = radau(compression, lower)[None], lower[None]
        if not f.bracketed:
            above = -radau(-compression, -nodes[-1] - edge)
            rules = jnp.stack([*rules, above, drop_last_step(compression)])
            ends = jnp.append(ends, jnp.full_like(ends, jnp.inf, shape=2))
        columns = jax.lax.map(lambda rule: first_column(rule[0], rule[1]), (rules, ends))
        reference = apply_to_first(nodes, vectors, values_at(f, nodes, eps))
        # A Radau rule has one entry more than the run, along v_(s+1). After a breakdown
        # the Krylov space is invariant, and nothing is truncated.
        changes = columns - jnp.append(reference, 0)
        truncated = jnp.where(edge > 0, _SAFETY * changes, 0)
        recomputed = first_column(tridiagonal(run.alpha, run.projected))
        slopes = slopes_at(f, nodes, eps)
        shift = eps * jnp.max(jnp.abs(nodes)) * apply_to_first(nodes, vectors, slopes)
        rounded = jnp.stack([recomputed - reference, shift])
        rounded = jnp.pad(rounded, ((0, 0), (0, 1)))
        # A rule with a node outside of the domain says nothing.
        truncated, rounded = (
            jnp.where(jnp.isnan(changes), 0, changes) for changes in (truncated, rounded)
        )

        unknown = (edge > 0) & (lower <= floor) & f.singular_at_zero
        change = f(jnp.maximum(jnp.stack([floor, nodes[0]]), floor)).real
        down = jnp.stack([change[0] < change[1], change[0] >= change[1]])
        beyond = jnp.where(unknown & down, jnp.inf, 0).astype(edge.dtype)
        return truncated, rounded, beyond

    def residual(
        self,
        run: LanczosDecomposition,
        nodes: Real[Array, " s"],
        vectors: Real[Array, "s s"],
    ) -> Real[Array, ""]:
        """The residual of `A f'(A) v` in the Krylov space, `beta_s |g_s| / ||T g||` with
        `g = f'(T) e_1`. For the logarithm it is the relative residual of the solve
        `A x = v` by conjugate gradients."""
        slopes = slopes_at(self.function, nodes, self.operator.eps)
        last = apply_to_first(nodes, vectors, slopes)[run.last]
        size = two_norm(apply_to_first(nodes, vectors, slopes * nodes))
        return run.beta[-1] * jnp.abs(last) / jnp.where(size > 0, size, 1)

    def lower_end(
        self, compression: Compression, hidden: float
    ) -> tuple[Real[Array, ""], Real[Array, ""]]:
        """The smallest value that an eigenvalue can have (the floor), and the smallest
        point where the run leaves room for one.

        If p_j are the orthonormal polynomials of the run, then an eigenvalue at x has at
        most the share `1 / sum_(j < s) p_j(x)^2` of the weight of the start vector (the
        Christoffel function: Szego, Orthogonal Polynomials, 1975, section 3.41). Below
        the Ritz values it falls fast with the distance. An eigenvector has the share
        1 / n in the mean over random start vectors, and seldom less than `hidden / n`. So
        points where the bound is smaller than that are excluded."""
        f, nodes, eps = self.function, compression.nodes, self.operator.eps
        at_zero = f(jnp.zeros_like(nodes[:1]))
        defined = not f.singular_at_zero and jnp.all(jnp.isfinite(at_zero))
        floor = jnp.where(defined, 0, roundoff(compression.largest, eps))
        positive = (nodes[0] > 0) | f.semidefinite_domain
        edge = jnp.abs(compression.coupling[0, 0])
        floor = jnp.where(positive, floor, nodes[0] - edge)
        room = jnp.maximum(nodes[0] - floor, 0)
        index = jnp.arange(1, _GRID_SIZE + 1, dtype=nodes.dtype)
        points = floor + room * 2.0 ** (-index / _POINTS_PER_HALVING)
        # In units of `room`, so that squares neither overflow nor vanish.
        distances = (nodes - points[:, None]) / jnp.where(room > 0, room, 1)
        # The vector u = (T - x)^-1 e_s is a multiple of (p_0(x), ..., p_(s-1)(x)), since
        # (T - x) p = -beta_s p_s(x) e_s, and p_0 = 1. So the bound is u_1^2 / ||u||^2.
        last = compression.vectors[compression.first] / jnp.where(room > 0, distances, 1)
        u1 = jnp.matmul(last, compression.vectors[0], precision="highest")
        weights = u1**2 / jnp.sum(last**2, axis=1)
        excluded = (weights < hidden / self.operator.size) & (room > 0)
        return floor, jnp.max(jnp.where(excluded, points, floor))

    def differences(
        self, nodes: Real[Array, " s"], others: Real[Array, " s"]
    ) -> Inexact[Array, "s s"]:
        """Divided differences of f between the nodes of two runs."""
        f, eps = self.function, self.operator.eps
        # Each run has its own largest node, to which rounding is relative.
        values = jnp.append(values_at(f, nodes, eps), values_at(f, others, eps))
        slopes = jnp.append(slopes_at(f, nodes, eps), slopes_at(f, others, eps))
        all_nodes = jnp.append(nodes, others)
        return divided_differences(all_nodes, values, slopes)[: len(nodes), len(nodes) :]

    def derivative(
        self,
        nodes: Real[Array, " s"],
        weights: Real[Array, " s"],
        products: Inexact[Array, "s n"],
    ) -> Inexact[Array, " n"]:
        """`sum_j weights_j f[A, t_j] p_j` for the rows p_j of `products` and the nodes
        t_j. It is linear in the products. Forward mode takes a run from each of them.
        Reverse mode applies all `f[A, t_j]` to one vector u, and takes a single run."""

        def term(entry):
            node, weight, product = entry
            run, others, vectors = self.run(product)
            values = self.differences(others, node[None])[:, 0]
            first = weight * apply_to_first(others, vectors, values)
            return run.norm * jnp.matmul(first, run.basis, precision="highest")

        def forward(_, products):
            # A "solve" keeps the shape, so the sum is in the first row of zeros.
            total = jnp.sum(jax.lax.map(term, (nodes, weights, products)), axis=0)
            return jnp.zeros_like(products).at[0].set(total)

        def backward(_, cotangents):
            # The transpose is the conjugate of the adjoint, as in `linear_map`.
            run, others, vectors = self.run(cotangents[0].conj())
            values = self.differences(others, nodes).conj() * vectors[0][:, None]
            values = values * weights
            first = jnp.matmul(vectors, values, precision="highest").T
            return run.norm * jnp.matmul(first, run.basis, precision="highest").conj()

        return jax.lax.custom_linear_solve(lambda x: x, products, forward, backward)[0]


@eqx.filter_custom_jvp
def _apply(arrays, vector, *, static) -> Any:
    return eqx.combine(arrays, static).linear_map(vector)


@_apply.def_jvp
def _apply_rule(primals, tangents, *, static) -> Any:
    """The derivative of `f(A) v` in a direction dA, from the run of the value.

    With v ~ sum_j c_j x_j over the Ritz vectors x_j, for which A x_j ~ t_j x_j, it is

        sum_j c_j f[A, t_j] dA x_j,    f[x, t] = (f(x) - f(t)) / (x - t).

    For f(x) = x^m, d(A^m) x_j is the sum over i of A^i dA A^(m-1-i) x_j, which is
    t_j^(m-1-i) A^i dA x_j, and sum_i t^(m-1-i) A^i = (A^m - t^m) (A - t)^-1. Other
    functions follow by approximation. f[., t_j] is a function of A again, which
    `derivative` applies."""
    arrays, direction = primals[0], tangents[0]
    frozen, vector = first_order_only(primals)
    constant = eqx.combine(frozen, static)
    out, tangent = _apply(*primals, static=static), jnp.zeros_like(vector)
    if tangents[1] is not None:
        tangent = constant.linear_map(tangents[1])
    if not jax.tree.leaves(direction):
        return out, tangent
    run, nodes, vectors = constant.run(vector)
    weights = run.norm * vectors[0]
    ritz_vectors = jnp.matmul(vectors.T, run.basis, precision="highest")

    def products_and_values(arrays):
        # The Ritz pairs are held constant: only A and the parameters of f are varied.
        action = eqx.combine(arrays, static)
        products = jax.vmap(action.operator.mv)(ritz_vectors)
        return products, values_at(action.function, nodes, action.operator.eps)

    _, (products, values) = eqx.filter_jvp(products_and_values, (arrays,), (direction,))
    if products is not None:
        tangent = tangent + constant.derivative(nodes, weights, products)
    if values is not None:
        coefficients = weights * values
        tangent = tangent + jnp.matmul(coefficients, ritz_vectors, precision="highest")
    return out, tangent


@eqx.filter_custom_jvp
def first_order_only(primals: PyTree) -> PyTree:
    """The `primals` of a derivative rule. Differentiating them again raises an error.
    Without it a second derivative would miss the dependence of the run on A."""
    return primals


@first_order_only.def_jvp
def _first_order_only_rule(primals, tangents) -> Any:
    if jax.tree.leaves(tangents):
        raise NotImplementedError(
            "`traceax.function_of` has no second derivatives, nor mixed ones, nor has "
            "`traceax.diagonal_of_function`, nor have traces of functions of structured "
            "operators. Take differences of first derivatives."
        )
    return primals[0], tangents[0]
