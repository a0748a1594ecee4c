"""`log z* exp(s A) z` of a Hermitian operator by Lanczos, and logarithms of means.

With the Ritz values t_j of a run from z and the weights w_j of its Gauss rule (the
squared first entries of the eigenvectors of T),

    log z* exp(s A) z ~ 2 log ||z|| + log sum_j w_j exp(s t_j),

which does not overflow where the exponentials do. The derivative in A is
`Re(l* dA z)`, l = s exp(s A) z / (z* exp(s A) z), from the same run. In the code `scale`
is s, `nodes` are the t_j, `shares` are `exp(s t_j) / sum_i w_i exp(s t_i)`, and `left` is
l. The error estimate is explained in docs/devdocs/quadrature.md, "Without a bracket".
"""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jaxtyping import Array, Inexact, Int, PyTree, Real

from .._krylov.lanczos_recurrence import lanczos_run
from .._numerics.gram_schmidt import unit
from .._quadrature.tridiagonal import apply_to_first, ritz


class LogExponentialForm(eqx.Module):
    """The logarithm of one quadratic form, from a Lanczos run.

    - `value`: the logarithm of the Gauss rule for `z* exp(s A) z`.
    - `left`: l, shape `(n,)`, such that `Re(l* dA z)` is the derivative of `value`.
    - `error`: an estimate of the error of `value`: twice the change when the run is
        shortened by one step, or doubled by steps that repeat its last coefficients,
        whichever is larger. One step changes little where many are needed.
    - `deviation`: `QuadraticForm.deviation` over the exponential of `value`.
    - `residual`, `extremes`: as in `QuadraticForm`.
    """

    value: Real[Array, ""]
    left: Inexact[Array, " n"]
    error: Real[Array, ""]
    deviation: Real[Array, ""]
    residual: Real[Array, ""]
    extremes: Real[Array, 2]

    @classmethod
    def read(
        cls, state: PyTree[Array], steps: Int[Array, ""] | int, scale: Real[Array, ""]
    ) -> LogExponentialForm:
        """The form from a run of `steps` steps."""
        run = lanczos_run(state, steps)
        alpha, beta, coupling = run.alpha, run.beta.at[-1].set(0), run.beta[-1]

        def gauss(alpha, beta):
            """The logarithm of the rule, its nodes, and the eigenvectors of T."""
            nodes, vectors = ritz(alpha, beta)
            return logsumexp(scale * nodes, b=vectors[0] ** 2), nodes, vectors

        log, nodes, vectors = gauss(alpha, beta)
        # The doubled run. Entries beyond it are decoupled, and repeat the first
        # coefficient, at which the exponential is finite.
        index, num_steps = jnp.arange(2 * len(alpha)), run.last + 1
        repeated = (index >= num_steps) & (index < 2 * num_steps)
        alphas = jnp.where(repeated, alpha[run.last], jnp.pad(alpha, (0, len(alpha))))
        coupled = (index >= run.last) & (index < 2 * num_steps - 1)
        betas = jnp.where(coupled, coupling, jnp.pad(beta, (0, len(beta))))
        doubled, *_ = gauss(jnp.where(index < 2 * num_steps, alphas, alpha[0]), betas)
        # One step fewer: its coupling is cut.
        betas = jnp.where(index[: len(beta)] == run.last - 1, 0, beta)
        shortened, *_ = gauss(alpha, betas)
        # Twice the change by one step missed the error in 25 of 48 cases, with the
        # doubled run in none.
        error = 2 * jnp.maximum(jnp.abs(doubled - log), jnp.abs(shortened - log))
        # Not `exp(s t_j - log)`: where exponents are large, that difference is roundoff.
        # So they are shifted by the largest and normalised by their sum.
        weights = vectors[0] ** 2
        exponents = jnp.where(weights > 0, scale * nodes, -jnp.inf)
        shares = jnp.exp(exponents - jnp.max(exponents))
        shares = shares / jnp.sum(weights * shares)
        slope = apply_to_first(nodes, vectors, scale * shares)
        size = unit(apply_to_first(nodes, vectors, shares * nodes))[1] * jnp.abs(scale)
        residual = coupling * jnp.abs(slope[run.last]) / jnp.where(size > 0, size, 1)
        return cls(
            value=2 * jnp.log(run.norm) + log,
            left=jnp.matmul(slope, run.basis, precision="highest") / run.norm,
            error=jnp.where(coupling > 0, error, 0),
            deviation=jnp.sqrt(jnp.sum(weights * (shares - 1) ** 2)) / run.norm,
            residual=residual,
            extremes=nodes[jnp.array([0, -1])],
        )


def first_two_moments(log: Real[Array, ""]) -> Real[Array, 2]:
    """A positive number and its square, from its logarithm."""
    return jnp.exp(jnp.stack([log, 2 * log]))


def unbiased_log(
    mean: Real[Array, ""], square: Real[Array, ""], count: Int[Array, ""] | int
) -> Real[Array, ""]:
    """The logarithm of the `mean` of `count` samples with the mean square `square`,
    corrected for its bias of first order.

    For the mean x of samples with the expectation m, to second order,
    `E log(x) = log(m) - Var(x) / (2 m^2)`. Only derivatives are corrected. Their bias is
    relative, up to 6% with 10 samples, while the bias of the value is far below the error
    bar."""
    variance = (square / mean**2 - 1) / jnp.maximum(count - 1, 1)
    return jnp.log(mean) + variance / 2


def log_magnitude(scale: Real[Array, ""], extremes: Real[Array, 2]) -> Real[Array, ""]:
    """The size that rounding errors of the logarithm are relative to: the largest
    exponent, or 1, since a relative error of a sum is an absolute error of its logarithm.
    """
    return jnp.maximum(1, jnp.max(jnp.abs(scale * extremes)))


def sum_of_shares(
    errors: Real[Array, " m"], samples: Real[Array, " m"], value: Real[Array, ""]
) -> Real[Array, ""]:
    """m times the error of the value: the sum of the errors of samples, each times the
    derivative of the value in that sample."""
    # A sample of -inf has no share, and no error that is a number.
    shares = jnp.where(jnp.isfinite(samples), jnp.exp(samples - value), 0)
    return jnp.sum(shares * jnp.where(shares > 0, errors, 0))
