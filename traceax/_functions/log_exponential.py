"""`log z* exp(s A) z` of a Hermitian operator by Lanczos, and means of logarithms."""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jaxtyping import Array, Inexact, Int, PyTree, Real

from .._krylov.lanczos_recurrence import lanczos_run
from .._numerics.gram_schmidt import unit
from .._quadrature.tridiagonal import apply_to_first, ritz


class LogExponentialForm(eqx.Module):
    """What Lanczos from one probe tells.

    - `value`: the logarithm of the Gauss rule for `z* exp(s A) z`.
    - `left`: the derivative of that in A is `Re(left* dA z)`.
    - `error`: an estimate of that of the rule, in log units: twice the change by a step
        less, or by as many steps again that repeat the last coefficients, whichever is
        larger. The change by a single one is small where all steps gain little.
    - `deviation`: that of `QuadraticForm`, over the exponential of `value`.
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
        run = lanczos_run(state, steps)
        alpha, (beta, rest) = run.alpha, (run.beta.at[-1].set(0), run.beta[-1])

        def gauss(alpha, beta):
            nodes, vectors = ritz(alpha, beta)
            return logsumexp(scale * nodes, b=vectors[0] ** 2), nodes, vectors

        log, nodes, vectors = gauss(alpha, beta)
        index, made = jnp.arange(2 * len(alpha)), run.last + 1
        again = (index >= made) & (index < 2 * made)
        alphas = jnp.where(again, alpha[run.last], jnp.pad(alpha, (0, len(alpha))))
        coupled = (index >= run.last) & (index < 2 * made - 1)
        betas = jnp.where(coupled, rest, jnp.pad(beta, (0, len(beta))))
        after, *_ = gauss(jnp.where(index < 2 * made, alphas, alpha[0]), betas)
        before, *_ = gauss(alpha, jnp.where(index[: len(beta)] == run.last - 1, 0, beta))
        error = 2 * jnp.maximum(jnp.abs(after - log), jnp.abs(before - log))
        # Shifted again, since the difference from the largest exponent may be below its
        # roundoff.
        weights = vectors[0] ** 2
        exponents = jnp.where(weights > 0, scale * nodes, -jnp.inf)
        shares = jnp.exp(exponents - jnp.max(exponents))
        shares = shares / jnp.sum(weights * shares)
        slope = apply_to_first(nodes, vectors, scale * shares)
        size = unit(apply_to_first(nodes, vectors, shares * nodes))[1] * jnp.abs(scale)
        residual = rest * jnp.abs(slope[run.last]) / jnp.where(size > 0, size, 1)
        return cls(
            value=2 * jnp.log(run.norm) + log,
            left=jnp.matmul(slope, run.basis, precision="highest") / run.norm,
            error=jnp.where(rest > 0, error, 0),
            deviation=jnp.sqrt(jnp.sum(weights * (shares - 1) ** 2)) / run.norm,
            residual=residual,
            extremes=nodes[jnp.array([0, -1])],
        )


def first_two_moments(log: Real[Array, ""]) -> Real[Array, 2]:
    return jnp.exp(jnp.stack([log, 2 * log]))


def unbiased_log(
    mean: Real[Array, ""], square: Real[Array, ""], count: Int[Array, ""] | int
) -> Real[Array, ""]:
    """The logarithm of a mean of samples, whose mean square is `square`, without its bias
    of first order: `E log(x) = log(m) - Var(x) / (2 m^2)` for the mean m of x. It is used
    for derivatives alone. There the bias is a relative one, of up to 6% with 10 samples,
    and not, as that of the value, much below the error bar."""
    variance = (square / mean**2 - 1) / jnp.maximum(count - 1, 1)
    return jnp.log(mean) + variance / 2


def log_magnitude(scale: Real[Array, ""], extremes: Real[Array, 2]) -> Real[Array, ""]:
    """What rounding is relative to: exponents, and their sum, a relative error of which
    is an absolute one of its logarithm."""
    return jnp.maximum(1, jnp.max(jnp.abs(scale * extremes)))
