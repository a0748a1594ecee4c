"""Quadratic forms `z* f(A) z` from a Krylov method, their brackets, and the effect of
rounding."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real

from .._core.reductions import reduce_together
from .._numerics.gram_schmidt import unit


class QuadraticForm(eqx.Module):
    """The quadratic form of one probe z, shape `(n,)`, with a function of A, an m by n
    operator, with its bracket and derivative. Fields for which no shape is given are
    real, of shape `()`.

    - `value`: the Gauss rule for `z* f(A) z`, complex where f(A) is.
    - `deviation`: the root of the Gauss rule for `z* (f(A) - c)^2 z`, c the mean of f in
        its rule for z. In the root mean square over z, about `||f(A) - c||_F`.
    - `left`, `right`: shapes `(r, m)` and `(r, n)`, rows L_j and R_j with
        `sum_j Re(L_j* dA R_j)` the derivative of the form in a direction dA, or in the
        mean over z that of its mean.
    - `residual`: of `A f'(A) z` (for a function of singular values `A* U f'(S) V* z`),
        relative to what it should be; for the logarithm that of the solve `A x = z`.
    - `bracket`: shape `(2,)`, lower and upper bound of `z* f(A) z`, by Gauss and
        Gauss-Radau where these are known to be on both sides, and estimated elsewhere.
    - `changes`: shape `(2,)`, how far the value moved over the second half of the steps,
        and over the second quarter, from which the rest is extrapolated; `None` where
        the bracket is an estimate already.
    - `hidden`: shape `(3,)`, how many eigenvalues at the lower end of the spectrum the
        run may have overlooked, by how much one of them changes the trace, and 1 if the
        function is infinite at zero and that end cannot be told from it, else 0; `None`
        where this is not known.
    - `magnitude`: the size of what `value` is made of, to which rounding is relative.
    - `rounding`: how far `value` moves where the entries of the run that products give
        twice are taken the other time, which only rounding tells apart; of its dtype.
    - `unresolved`: how far it may be off where the function is steep, at eigenvalues or
        singular values that are known to rounding.
    - `extremes`: shape `(2,)`, smallest and largest Ritz value; by Golub-Kahan, singular
        value of the bidiagonal matrix; by Arnoldi, eigenvalue of the Hermitian part of
        the Hessenberg matrix, between which the real parts of its eigenvalues are. Of
        several operators `(r, 2)`.
    - `spread`: about the standard deviation of the form over z where one z tells it, in
        the root mean square; elsewhere `None`.
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
    changes: Real[Array, "2"] | None = None
    hidden: Real[Array, "3"] | None = None
    spread: Real[Array, ""] | None = None


def deviation_of(
    root_weights: Inexact[Array, " s"],
    values: Real[Array, " s"],
    mean: Inexact[Array, ""],
) -> Real[Array, ""]:
    """`QuadraticForm.deviation` of a unit vector, by a rule whose weights have these
    roots and which gives this mean."""
    return unit(root_weights * (values - mean))[1]


def gauss_rule(
    weights: Real[Array, " s"],
    nodes: Real[Array, " s"],
    values: Real[Array, " s"],
    slopes: Real[Array, " s"],
) -> tuple[Real[Array, ""], Real[Array, ""]]:
    """What a quadrature rule gives, and the size that its rounding errors are relative
    to: that value or, if larger, its change when all nodes change by the same factor.
    (The logarithm and the entropy are 0 at 1, but change there.)"""
    value, change = reduce_together((weights * values, weights * jnp.abs(nodes * slopes)))
    change = jnp.where(jnp.isfinite(change), change, 0)
    return value, jnp.maximum(jnp.abs(value), change)


def spectral_range(
    extremes: Real[Array, "k *r 2"], count: Real[Array, " k"] | None = None
) -> Real[Array, "*r 2"]:
    """The smallest and the largest of all Ritz values; where a `count` is 0, there are
    none."""
    if count is not None:
        index = jnp.arange(len(count))
        extremes = extremes[jnp.where(count > 0, index, jnp.argmax(count > 0))]
    ends = jnp.min(extremes[..., 0], axis=0), jnp.max(extremes[..., 1], axis=0)
    return jnp.stack(ends, axis=-1)


def combine_ritz_vectors(
    coefficients: Real[Array, "r s"],
    vectors: Real[Array, "s s"],
    basis: Inexact[Array, "s n"],
) -> Inexact[Array, "r n"]:
    """Combinations of Ritz vectors, whose coordinates in the basis are rows."""
    weights = jnp.matmul(coefficients, vectors, precision="highest")
    return jnp.matmul(weights, basis, precision="highest")
