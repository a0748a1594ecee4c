"""The derivative of a quadratic form of a function, from divided differences.

In an eigenbasis of T, with eigenvalues `t_i`, the derivative of f(T) in a direction E has
the entries `F_ij E_ij` (Daleckii and Krein), with

    F_ij = (f(t_i) - f(t_j)) / (t_i - t_j),    F_ii = f'(t_i).

In the code: the `t_i` are `nodes`, `f(t_i)` are `values`, `f'(t_i)` are `slopes`, and F
is `differences`.

Reference: Higham, Functions of Matrices, 2008, section 3.2. "Gradients" in the developer
documentation derives the use of F for quadratic forms.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, Real

from .dense import diagonal


# An entry above the diagonal counts as this much larger in the choice of a pivot. F is
# symmetric but for rounding, which must not choose between an entry and its mirror image:
# results would differ between devices. Any factor that is above rounding errors, and too
# small to pass over a larger pivot, would do.
_UPPER_PREFERENCE = 1e-3


def divided_differences(
    nodes: Real[Array, " s"], values: Inexact[Array, " s"], slopes: Inexact[Array, " s"]
) -> Inexact[Array, "s s"]:
    """F, from f and f' at the nodes. The mean of the two slopes replaces the quotient
    where it is more accurate."""
    # Let f vary on the scale L, and let h be the gap. Cancellation gives the quotient an
    # error of `eps |f| / h`, and the mean of the slopes is off by about `h^2 |f| / L^3`.
    # Both are `eps^(2/3) |f| / L` at `h = eps^(1/3) L`. There the slopes, which differ by
    # about `h |f| / L^2`, differ by `eps^(2/3) |f| / h`, which is the condition below.
    eps = jnp.finfo(nodes.dtype).eps
    gaps = nodes[:, None] - nodes
    size = jnp.abs(values)[:, None] + jnp.abs(values)
    change = jnp.abs((slopes[:, None] - slopes) * gaps)
    is_close = change <= eps ** (2 / 3) * size
    quotients = (values[:, None] - values) / jnp.where(is_close, 1, gaps)
    return jnp.where(is_close, (slopes[:, None] + slopes) / 2, quotients)


def few_pairs(
    differences: Inexact[Array, "s s"], weights: Real[Array, " s"], count: int
) -> tuple[Inexact[Array, "r s"], Real[Array, "r s"]]:
    """L and R with `count` rows and `L^T R ~ weights_i differences_ij weights_j`, or with
    twice as many where the differences are complex: R is real.

    All but the last pair of rows are a cross approximation: elimination with the largest
    pivot of the remainder (Bebendorf, Numer. Math. 86, 2000). It is nearly the best one,
    since singular values of divided differences fall fast. The last pair corrects the
    diagonal: with `missing_i` the error of the others there, it is `weights_i missing_i
    weights_j`. In the mean over a random start vector only the diagonal counts, so the
    number of rows affects the variance alone.
    """
    if jnp.iscomplexobj(differences):
        parts = differences.real, differences.imag
        (left, right), others = (few_pairs(x, weights, count) for x in parts)
        return jnp.concatenate([left, 1j * others[0]]), jnp.append(right, others[1], 0)
    size = jnp.abs(weights)
    preference = 1 + _UPPER_PREFERENCE * jnp.triu(jnp.ones_like(differences), 1)

    def eliminate(remainder, _):
        largest = jnp.argmax(size[:, None] * jnp.abs(remainder) * size * preference)
        i, j = jax.lax.div(largest, size.size), jax.lax.rem(largest, size.size)
        column, row = _take(remainder, j, axis=1), _take(remainder, i, axis=0)
        pivot = _take(column, i, axis=0)
        # A zero pivot means that nothing is left; `row` is then zero.
        row = row / jnp.where(pivot == 0, 1, pivot)
        return remainder - column[:, None] * row, (column, row)

    count = min(count, size.size)
    no_rows = jnp.zeros((0, size.size), differences.dtype)
    remainder, columns, rows = differences, no_rows, no_rows
    if count > 1:  # without rows a scan is an error under `jax.disable_jit`
        remainder, (columns, rows) = jax.lax.scan(eliminate, remainder, length=count - 1)
    missing, ones = diagonal(remainder), jnp.ones_like(weights)
    left = jnp.append(columns, missing[None], axis=0)
    right = jnp.append(rows, ones[None], axis=0)
    return left * weights, right * weights


def _take(x: Real[Array, "..."], i: Int[Array, ""], axis: int) -> Real[Array, "..."]:
    return jax.lax.dynamic_index_in_dim(x, i, axis, keepdims=False)
