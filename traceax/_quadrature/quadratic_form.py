"""The quadratic form `z* f(A) z` of one probe z, as a Krylov method returns it.

With the nodes theta_j and weights w_j of a Gauss rule (`nodes`, `weights`),

    z* f(A) z           ~  ||z||^2 sum_j w_j f(theta_j)             (`value`)
    z* (f(A) - c)^2 z   ~  ||z||^2 sum_j w_j (f(theta_j) - c)^2     (`deviation`, squared)

for the mean c of f in the rule. Golub and Meurant, Matrices, Moments and Quadrature with
Applications, 2010, chapter 6; docs/devdocs/quadrature.md.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real

from .._core.reductions import reduce_together
from .._numerics.gram_schmidt import unit


class QuadraticForm(eqx.Module):
    """The quadratic form $z^* f(A) z$ of one probe z, shape `(n,)`, with its bracket and
    derivative. A is an m by n operator. Fields without a shape here are real, of shape
    `()`.

    - `value`: the Gauss rule for `z* f(A) z`, complex where f(A) is.
    - `deviation`: the root of the Gauss rule for `z* (f(A) - c)^2 z`, with c the mean of
        f in the rule of z. Its root mean square over z is about `||f(A) - c||_F`.
    - `left`, `right`: shapes `(r, m)` and `(r, n)`. Their rows L_j and R_j give
        `sum_j Re(L_j* dA R_j)`, the derivative of the form in a direction dA, for a
        complex form the sum itself; or a number whose mean over z is the derivative of
        the mean.
    - `residual`: the residual norm of `A f'(A) z`, or for a function of singular values
        of `A* U f'(S) V* z`, relative to the norm of that vector. For the logarithm it is
        the residual of the solve `A x = z`.
    - `bracket`: shape `(2,)`, lower and upper bound of `z* f(A) z`: proven, by Gauss and
        Gauss-Radau, where these are known to be on both sides, and estimated elsewhere.
    - `changes`: shape `(2,)`, how much the value changed over the second half of the
        steps, and over the second quarter. The remaining error is extrapolated from them.
        `None` where the bracket is an estimate already.
    - `hidden`: shape `(3,)`: how many eigenvalues at the lower end of the spectrum the
        run may have overlooked; by how much one of them changes the trace; and 1 if the
        function is infinite at zero and that end cannot be told from zero, else 0. `None`
        where this is not known.
    - `magnitude`: the size that rounding errors of `value` are relative to.
    - `rounding`: the change of `value` when each coefficient of the run is recomputed
        from the other of its two matvecs, which in exact arithmetic is 0; of the dtype of
        `value`.
    - `unresolved`: how far `value` may be off where the function is steep, because nodes
        are known only up to rounding.
    - `extremes`: shape `(2,)`, or `(r, 2)` for several operators: the smallest and the
        largest Ritz value. For Golub-Kahan these are singular values of the bidiagonal
        matrix. For Arnoldi they are eigenvalues of the Hermitian part of the Hessenberg
        matrix, which enclose the real parts of its eigenvalues.
    - `spread`: an estimate of the standard deviation of the form over z, in the root mean
        square, where one z is enough to give it; else `None`.
    """

    value: Inexact[Array, ""]
    deviation: Real[Array, ""]
    left: Inexact[Array, "r m"]
    right: Inexact[Array, "r n"]
    residual: Real[Array, ""]
    bracket: Real[Array, "2"]
    magnitude: Real[Array, ""]
    rounding: Inexact[Array, ""]
    extremes: Real[Array, "*r 2"]
    unresolved: Real[Array, ""] | float = 0.0
    # Fields that most callers do not need are None for them, not 0: None needs no kernel.
    changes: Real[Array, "2"] | None = None
    hidden: Real[Array, "3"] | None = None
    spread: Real[Array, ""] | None = None


def deviation_of(
    root_weights: Inexact[Array, " s"],
    values: Inexact[Array, " s"],
    mean: Inexact[Array, ""],
) -> Real[Array, ""]:
    """`QuadraticForm.deviation` of a unit vector, from a rule with this `mean`, and the
    roots of its weights."""
    # `unit` scales before it squares, so squares of large values do not overflow.
    return unit(root_weights * (values - mean))[1]


def gauss_rule(
    weights: Real[Array, " s"],
    nodes: Real[Array, " s"],
    values: Inexact[Array, " s"],
    slopes: Inexact[Array, " s"],
) -> tuple[Inexact[Array, ""], Real[Array, ""]]:
    """The value of a quadrature rule, and the size that its rounding errors are relative
    to: the modulus of the value or, if larger, its change by a common relative change of
    all nodes."""
    # The logarithm and the entropy are 0 at 1, where rounding of the nodes still moves
    # them. One reduction for both sums is one kernel.
    value, change = reduce_together((weights * values, weights * jnp.abs(nodes * slopes)))
    change = jnp.where(jnp.isfinite(change), change, 0)
    return value, jnp.maximum(jnp.abs(value), change)


def spectral_range(
    extremes: Real[Array, "k *r 2"], count: Real[Array, " k"] | None = None
) -> Real[Array, "*r 2"]:
    """The smallest and the largest of all Ritz values of k runs, without the runs whose
    `count` is 0."""
    if count is not None:
        # Rows of runs that were not made are replaced by the first one that was.
        index = jnp.arange(len(count))
        extremes = extremes[jnp.where(count > 0, index, jnp.argmax(count > 0))]
    ends = jnp.min(extremes[..., 0], axis=0), jnp.max(extremes[..., 1], axis=0)
    return jnp.stack(ends, axis=-1)


def combine_ritz_vectors(
    coefficients: Inexact[Array, "r s"],
    vectors: Real[Array, "s s"],
    basis: Inexact[Array, "s n"],
) -> Inexact[Array, "r n"]:
    """Linear combinations of Ritz vectors. The rows of `vectors` are the coordinates of
    the Ritz vectors in the `basis`."""
    # The small product first: s^2 r + s n r operations instead of s^2 n.
    weights = jnp.matmul(coefficients, vectors, precision="highest")
    return jnp.matmul(weights, basis, precision="highest")
