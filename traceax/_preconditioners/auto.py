"""A Nystrom preconditioner that chooses its own rank.

With `P = A_hat + sigma I`, `A_hat` the Nystrom approximation of `A - sigma I`, let
`M = P^(-1/2) A P^(-1/2)`. A block of b normal probes Z has two uses. The matvecs with
`X = sigma^(1/2) P^(-1/2) Z` extend the approximation, and they give

    (M - I) Z = (1 / sigma) sigma^(1/2) P^(-1/2) (A - sigma I) X
                + (sigma^(1/2) P^(-1/2) X - Z),

from which follow the two moments that predict the cost of the remaining call,

    tr(M - I) ~ Re tr(Z* (M - I) Z) / b,    ||M - I||_F^2 ~ ||(M - I) Z||_F^2 / b.

In the code: sigma is `shift`, Z is `z`, X is `x`, `sigma^(1/2) P^(-1/2)` is `half`,
`(A - sigma I) X` is `image`, `(M - I) Z` is `residual`, and the moments are `first` and
`second`. `image` is in units of `grown.scale`, and so is the shift that divides it.

Reference: Cortinovis and Toni, Preconditioned log-determinant approximation: one Gaussian
probe vector is almost always enough, arXiv:2601.05778, 2026, for the test of an
approximation by the matvecs that extend it.
"""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, PRNGKeyArray, Real, Scalar

from .._core.arithmetic import full_precision
from .._core.checks import check_positive, concrete_number, real_scalar
from .._core.flat import FlatOperator
from .._core.sampler import draw_for, NormalSampler
from .._numerics.dense import eigh
from .._numerics.nystrom import GrowingNystrom
from .._run.budget import Budget
from .._run.execution import AbstractExecution
from .._run.steps import AdaptiveSteps
from .base import AbstractPreconditioning
from .low_rank import Preconditioner
from .make import assemble, FIRST_PROBE


# The rank grows by this many columns at a time. Larger blocks overshoot the best rank by
# more; smaller ones have noisier moments, and solve eigenvalue problems more often.
_BLOCK_SIZE = 8
# Growth goes on while the probes are expected to need more than this many times the
# matvecs spent on the rank, so that at least a fifth of all expected matvecs is spent on
# it. Otherwise a single noisy forecast could end the growth much too early.
_PROBES_TO_RANK = 4


class AutoPreconditioner(AbstractPreconditioning):
    r"""A Nystrom preconditioner whose rank is chosen automatically: pass it as
    `preconditioner` to [`traceax.logdet`][], [`traceax.trace_difference`][] or
    [`traceax.gaussian_log_prob`][].

    The approximation grows by 8 matvecs at a time. Each block of matvecs enlarges the
    approximation and tests the previous one: matvecs with the probes $P^{-1/2} z$ give
    $(M - I) z$ for $M = P^{-1/2} A P^{-1/2}$, and hence estimates of the variance of
    $z^* \log(M) z$ and of the number of steps. Growth ends when another block is not
    expected to save as many matvecs as it costs, for the tolerance of an adaptive `k`, or
    for the error that `k` probes would have; but not before a fifth of all expected
    matvecs have been spent on it. `stats["num_matvecs"]` counts them.

    One compiled program serves all ranks up to `max_rank`. It holds `2 max_rank` vectors
    of length n while the rank grows, and several arrays of `max_rank` such vectors when
    the preconditioner is assembled. For each block it computes eigenvalues of matrices of
    `max_rank` rows. A derivative takes `max_rank` matvecs with the derivative of the
    operator.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jnp.linspace(0.0, 1.0, 500)
        kernel = jnp.exp(-50 * (x[:, None] - x) ** 2) + 0.1 * jnp.eye(500)
        operator = lx.MatrixLinearOperator(kernel, lx.positive_semidefinite_tag)
        solution = tx.logdet(
            operator,
            k=tx.Adaptive(rtol=1e-5, max_k=320),
            preconditioner=tx.AutoPreconditioner(0.1),
            key=jax.random.key(0),
        )
        print(solution.value, "+-", solution.std_err, solution.stats["num_matvecs"])
        ```

    **Attributes:**

    - `shift`: a positive scalar, at most the smallest eigenvalue of A: the noise variance
        of a Gaussian process, a ridge, a jitter. A shift above that eigenvalue costs
        steps and accuracy. Then `Solution.interval` is wider, if the mean eigenvalue of
        $P^{-1} A$ is below 1; but the mistake goes unnoticed if only a few eigenvalues
        are below the shift, or if `max_rank` leaves others far above it. The shift may be
        traced, and is constant to derivatives. If no such number is known,
        [`traceax.nystrom_preconditioner`][] estimates one for a given rank.
    - `max_rank`: the largest rank, a Python integer; more than n counts as n.

    ??? cite

        ```bibtex
        @article{cortinovis2026nystrom,
            author  = {Cortinovis, Alice and Toni, Daniele},
            title   = {Preconditioned log-determinant approximation: one {Gaussian} probe
                       vector is almost always enough},
            journal = {arXiv:2601.05778},
            year    = {2026},
        }
        ```
    """

    shift: Scalar
    max_rank: int = eqx.field(static=True)

    def __init__(self, shift: Scalar | float, max_rank: int = 256):
        """**Arguments:**

        - `shift`: as above.
        - `max_rank`: default is 256.

        **Raises:**

        `TypeError` or `ValueError` if `max_rank` is not a Python integer of 1 or more,
        or if `shift` is not a positive, finite number.
        """
        self.shift = real_scalar("shift", shift)
        number = concrete_number(shift)
        if number is not None and not 0 < number < math.inf:
            raise ValueError(
                f"`shift` must be positive and finite. Found {number}. If nothing is "
                "known of the smallest eigenvalue, use `traceax.nystrom_preconditioner`."
            )
        self.max_rank = check_positive("max_rank", max_rank)

    def prepare(
        self,
        operator: FlatOperator,
        *,
        k: int | Budget,
        num_steps: int | AdaptiveSteps,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Preconditioner:
        flat, eps = operator.frozen, operator.eps
        n, rank = flat.size, min(self.max_rank, flat.size)
        block = min(_BLOCK_SIZE, rank)
        real = jnp.finfo(flat.dtype).dtype
        shift = jax.lax.stop_gradient(jnp.asarray(self.shift, real))

        def unfinished(carry):
            return carry[-1]

        def add_block(carry):
            grown, blocks, previous_moments, *_ = carry
            indices = FIRST_PROBE + blocks * block + jnp.arange(block)
            z = draw_for(flat, NormalSampler(), key, indices)
            half, log_ratio = _inverse_root(grown, shift, eps)
            x = half(z)
            grown, coordinates = grown.grow(shifted_matmat, x, blocks, eps)
            # The matvecs were made with an orthonormal basis of X, not with X itself.
            image = grown.q @ (grown.r @ coordinates)
            # Off the range of A_hat, `half(x)` equals z. They are subtracted first, since
            # a small residual would drown in the rounding errors of z.
            residual = half(image) / _relative_shift(shift, grown, eps) + (half(x) - z)
            first = jnp.sum((z.conj() * residual).real) / block
            second = jnp.sum(jnp.abs(residual) ** 2) / block
            moments = jnp.stack([jnp.abs(first), second])
            # These moments describe the approximation before this block. The block itself
            # is assumed to reduce them by the square root of the last rate, and the next
            # block by the whole rate.
            is_smaller = moments < previous_moments
            rate = jnp.where(is_smaller, moments / previous_moments, 1)
            expected = moments * jnp.sqrt(rate)
            log_det = n * jnp.log(shift) + log_ratio
            cost, variance = _forecast(
                expected, k=k, num_steps=num_steps, log_det=log_det
            )
            next_cost, _ = _forecast(
                expected * rate,
                k=k,
                num_steps=num_steps,
                log_det=log_det,
                reference=variance,
            )
            blocks = blocks + 1
            pays = (cost - next_cost > block) | (cost > _PROBES_TO_RANK * block * blocks)
            has_room = blocks < rank // block
            # The mean eigenvalue of M is at least 1, unless the shift is above
            # eigenvalues of A.
            above = first > -n * eps**0.5
            # One block alone has no rate, so there are two where there is room.
            return grown, blocks, moments, above, has_room & (pays | (blocks == 1))

        with full_precision(lambda x: execution.matmat(flat, x)) as matmat:

            def shifted_matmat(x):
                return matmat(x) - shift.astype(x.dtype) * x

            grown = GrowingNystrom.empty(n, rank // block * block, flat.dtype)
            true = jnp.ones((), bool)
            start = grown, jnp.zeros((), jnp.int32), jnp.ones(2, real), true, true
            end = jax.lax.while_loop(unfinished, add_block, start)
            grown, blocks, _, above, _ = end
            # `A Q` from the buffers of `(A - sigma I) Q`.
            products = grown.scale.astype(flat.dtype) * (grown.q @ grown.r)
            products = products + shift.astype(flat.dtype) * grown.basis
            return assemble(
                flat,
                basis=grown.basis,
                products=products,
                shift=self.shift,
                structure=jax.ShapeDtypeStruct((n,), flat.dtype),
                num_matvecs=blocks * block,
                # As P <= A, no eigenvalue of M is below 1, up to rounding.
                lower_bound=jnp.where(above, jnp.asarray(0.5, real), 0),
            )


def _relative_shift(shift: Array, grown: GrowingNystrom, eps: float) -> Real[Array, ""]:
    """The shift in units of `grown.scale`, and at least the rounding error of matvecs."""
    return jnp.maximum(shift / grown.scale, eps)


def _inverse_root(
    grown: GrowingNystrom, shift: Real[Array, ""], eps: float
) -> tuple[Callable[[Array], Array], Real[Array, ""]]:
    """`shift^(1/2) P^(-1/2)` as a map of columns, and `log det P - n log shift`.

    With `A_hat = B B*`, `B* B = V diag(l) V*` and `P = B B* + sigma I`,

        sigma^(1/2) P^(-1/2) = I - B V diag(c) V* B*,
        c = (1 - (sigma / (l + sigma))^(1/2)) / l = 1 / (root (root + sigma^(1/2))),

    with `root = (l + sigma)^(1/2)`. The last form has no cancellation for a small l. The
    tall `B = (q r + ridge Q) T*` is never formed.
    """
    whitener, ridge, _, gram = grown.whiten(eps, indefinite=True)
    shift = _relative_shift(shift, grown, eps)
    values, vectors = eigh(gram)
    # Rounding makes zero eigenvalues of a Gram matrix slightly negative.
    values = jnp.maximum(values, 0)
    root = jnp.sqrt(values + shift)
    scaled = vectors / (root * (root + jnp.sqrt(shift)))
    q, r, basis = grown.q, grown.r, grown.basis

    def half(x: Inexact[Array, "n b"]) -> Inexact[Array, "n b"]:
        part = r.conj().T @ (q.conj().T @ x) + ridge * (basis.conj().T @ x)
        # The factors are applied one after another. The whitener may be large, and then
        # its product with the eigenvectors would have no correct digit.
        part = whitener.conj().T @ (scaled @ (vectors.conj().T @ (whitener @ part)))
        return x - q @ (r @ part) - ridge * (basis @ part)

    return half, jnp.sum(jnp.log1p(values / shift))


def _forecast(
    moments: Real[Array, "2"],
    *,
    k: int | Budget,
    num_steps: int | AdaptiveSteps,
    log_det: Real[Array, ""],
    reference: Real[Array, ""] | None = None,
) -> tuple[Real[Array, ""], Real[Array, ""]]:
    """The number of matvecs that the probes will take, and the variance of one probe.

    `moments` are `tr(M - I)` and `||M - I||_F^2`, and `log_det` is `log det P`. For an
    adaptive k, the probes reach its tolerance. For a fixed number k, they reach the
    accuracy that k probes of the variance `reference` have.

    As `P <= A`, also `M >= I`. The Gauss-Radau rule with the fixed node 1 replaces the
    spectrum of M by `weight` eigenvalues `1 + t` and ones. It has the right moments:
    `weight t` and `weight t^2`.
    """
    first, second = moments
    t = second / jnp.where(first > 0, first, 1)
    weight = first / jnp.where(t > 0, t, 1)
    # For a real normal probe, `z* log(M) z` has the variance `2 ||log(M)||_F^2`.
    trace, variance = weight * jnp.log1p(t), 2 * weight * jnp.log1p(t) ** 2
    probes: Any = k
    if isinstance(k, Budget):
        # Whole rounds, as many as the first test needs.
        min_probes = k.round_size * -(-k.rule.min_samples // k.round_size)
        aim = k.rule.tolerance(log_det + trace)
        std_err = jnp.sqrt(variance / min_probes)
        count = jnp.full_like(std_err, min_probes)
        excess = k.rule.excess(log_det + trace, std_err, count)
        probes = min_probes * jnp.maximum(excess**2, 1)
    else:
        aim = jnp.sqrt(variance / k)
        if reference is not None:
            probes = k * variance / jnp.where(reference > 0, reference, 1)
    if not isinstance(num_steps, AdaptiveSteps):
        return probes * num_steps, variance
    # The width of the bracket is taken to be `4 weight contraction^steps`: Lanczos has
    # this rate for eigenvalues from 1 to 1 + t.
    root = jnp.sqrt(1 + t)
    contraction = ((root - 1) / (root + 1)) ** 2
    ratio = 4 * weight / jnp.where(aim > 0, num_steps.share * aim, 1)
    steps = jnp.ceil(jnp.log(jnp.maximum(ratio, 1)) / -jnp.log(contraction))
    return probes * jnp.clip(steps, 1, num_steps.most), variance
