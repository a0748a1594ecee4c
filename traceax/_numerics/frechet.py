"""The derivative of a quadratic form of a function, from divided differences.

In an eigenbasis the derivative of f(T) in a direction E has the entries `F_ij E_ij`, with
`F_ij = (f(t_i) - f(t_j)) / (t_i - t_j)` and `F_ii = f'(t_i)`: Daleckii and Krein; see
Higham, Functions of Matrices, 2008, section 3.2.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Real

from .dense import diagonal


def divided_differences(
    nodes: Real[Array, " s"], values: Real[Array, " s"], slopes: Real[Array, " s"]
) -> Real[Array, "s s"]:
    """F, from f and f' at the nodes; the mean of two slopes in place of a quotient where
    that is more accurate. Cancellation costs the quotient `eps |f| / gap`, and the mean
    is wrong by a small part of the difference of the slopes. The power balances the two
    where f varies on one scale: errors are then of the order `eps^(2/3)`."""
    eps = jnp.finfo(nodes.dtype).eps
    gaps = nodes[:, None] - nodes
    size = jnp.abs(values)[:, None] + jnp.abs(values)
    change = jnp.abs((slopes[:, None] - slopes) * gaps)
    close = change <= eps ** (2 / 3) * size
    quotients = (values[:, None] - values) / jnp.where(close, 1, gaps)
    return jnp.where(close, (slopes[:, None] + slopes) / 2, quotients)


def few_pairs(
    differences: Real[Array, "s s"], weights: Real[Array, " s"], count: int
) -> tuple[Real[Array, "r s"], Real[Array, "r s"]]:
    """L and R with `count` rows and `L^T R ~ weights_i differences_ij weights_j`.

    All but the last are a cross approximation: elimination with the largest pivot of what
    is left (Bebendorf, Numer. Math. 86, 2000), nearly the best one, as singular values
    of divided differences fall fast. The last makes up for the error on the diagonal,
    `weights_i missing_i weights_j`. In the mean over a random start vector only the
    diagonal counts, so the number of rows affects the variance alone.
    """
    size = jnp.abs(weights)
    # So that the choice between an entry and its mirror image is not left to rounding.
    upper = 1 + 1e-3 * jnp.triu(jnp.ones_like(differences), 1)

    def eliminate(rest, _):
        largest = jnp.argmax(size[:, None] * jnp.abs(rest) * size * upper)
        i, j = jax.lax.div(largest, size.size), jax.lax.rem(largest, size.size)
        column, row = _take(rest, j, 1), _take(rest, i, 0)
        pivot = _take(column, i, 0)
        row = row / jnp.where(pivot == 0, 1, pivot)
        return rest - column[:, None] * row, (column, row)

    count = min(count, size.size)
    rest, pairs = differences, 2 * (jnp.zeros((0, size.size), differences.dtype),)
    if count > 1:  # without rows a scan is an error under `jax.disable_jit`
        rest, pairs = jax.lax.scan(eliminate, rest, length=count - 1)
    last = diagonal(rest), jnp.ones_like(weights)
    left, right = (
        jnp.append(x, y[None], axis=0) for x, y in zip(pairs, last, strict=True)
    )
    return left * weights, right * weights


def _take(x: Real[Array, "..."], i: Int[Array, ""], axis: int) -> Real[Array, "..."]:
    return jax.lax.dynamic_index_in_dim(x, i, axis, keepdims=False)
