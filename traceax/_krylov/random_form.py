"""Quadratic forms from a random number of steps, without quadrature error in the mean.

    X = q_s0 + sum_(s0 < s <= N) (q_s - q_(s-1)) / r^(s - s0)

as in `_run/random_steps.py`, with `start` for s0, `ratio` for r and `steps` for N. All
q_s are read from one run. The derivative has the same form. With one column that of q_s
is `l_s* dA z`, where l_s is f'(A) z in the Krylov space of s steps, and only l_s depends
on s. So

    l = l_s0 + sum_(s0 < s <= N) (l_s - l_(s-1)) / r^(s - s0)

has the mean f'(A) z, and E[z* dA l] = tr(f'(A) dA). The l_s converge like rho^s, where
the q_s do like rho^(2 s), so the variance of the derivative is finite for r > rho^2. With
more columns, which vary less, the last one corrects those of N by l - l_N.
"""

import dataclasses

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, Real

from .._core.flat import FlatOperator
from .._quadrature.base import AbstractSpectralFunction
from .._quadrature.quadratic_form import QuadraticForm
from .base import AbstractKrylovMethod


# Changes of a value below so many roundoffs of its size count as none. Divided by a small
# probability, they would be errors of any size.
_ROUNDOFFS = 4


def random_form(
    krylov: AbstractKrylovMethod,
    operator: FlatOperator,
    probe: Inexact[Array, " n"],
    *,
    function: AbstractSpectralFunction,
    start: int,
    ratio: Real[Array, ""],
    steps: Int[Array, ""],
    most: int,
    lower_bound: Real[Array, ""] | float | None,
    columns: int,
) -> QuadraticForm:
    """The form X of one probe, with the bracket that it has without quadrature error. Its
    other fields are those after `steps` steps. The arguments are as for `form`."""
    # All probes of a block go on for as long as its longest one. Otherwise each step
    # would copy the bases of all of them, to keep those that have ended.
    longest = eqxi.unvmap_max(steps)
    state = krylov.start(operator, probe, most)
    state = krylov.advance(operator, state, 0, longest)

    def read(steps, columns):
        # By position: parameters of a user's method may have other names.
        return krylov.read(operator, state, steps, function, lower_bound, columns)

    @jax.checkpoint
    def add(sums, step):
        total, total_left, value, left = sums
        form = read(step, 1)
        weight = jnp.where(step <= steps, ratio ** (start - step), 0)
        size = _ROUNDOFFS * jnp.finfo(form.magnitude.dtype).eps * form.magnitude
        difference = form.value - value
        difference = jnp.where(jnp.abs(difference) > size, difference, 0)
        total = total + weight.astype(total.dtype) * difference
        total_left = total_left + weight.astype(left.dtype) * (form.left - left)
        return total, total_left, form.value, form.left

    def add_if_made(sums, step):
        # The condition is the same for a whole block, so steps that none has made cost
        # nothing. A loop up to `longest` would have no derivative in the parameters of f.
        sums = jax.lax.cond(step <= longest, add, lambda sums, _: sums, sums, step)
        return sums, None

    # The first term is q_s0 itself, so the sums begin with zeros.
    one = jax.eval_shape(lambda: read(start, 1))
    zeros = tuple(jnp.zeros(x.shape, x.dtype) for x in (one.value, one.left))
    sums, _ = jax.lax.scan(add_if_made, zeros + zeros, jnp.arange(start, most + 1))
    total, left, *_ = sums
    last, one = read(steps, max(1, columns - 1)), read(steps, 1)
    right = one.right
    if columns > 1:
        left = jnp.concatenate([last.left, left - one.left])
        right = jnp.concatenate([last.right, right])
    return dataclasses.replace(
        last,
        value=total,
        left=left,
        right=right,
        bracket=jnp.stack([total.real, total.real]),
        changes=None,
        spread=None,
    )
