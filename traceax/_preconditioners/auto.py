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
from .base import AbstractPreconditioning, Preconditioner
from .make import assemble, FIRST_PROBE


_BLOCK = 8


class AutoPreconditioner(AbstractPreconditioning):
    r"""A Nystrom preconditioner whose rank the data choose: pass it as `preconditioner`
    to [`traceax.logdet`][], [`traceax.trace_difference`][] or
    [`traceax.gaussian_log_prob`][].

    The approximation grows by 8 products at a time. Each block of products makes the
    approximation larger, and tests the one before it: products with the probes
    $P^{-1/2} z$ give $(M - I) z$ for $M = P^{-1/2} A P^{-1/2}$, and so estimates of the
    variance of $z^* \log(M) z$ and of the number of steps. Growth ends when another block
    is not expected to save as many products as it costs, for the tolerance of an adaptive
    `k`, or for the error that `k` probes would have; but not before a fifth of all
    expected products have been spent on it. `stats["num_matvecs"]` counts them.

    One compiled program serves all ranks up to `max_rank`. It holds `2 max_rank` vectors
    of length n while the rank grows, several arrays of `max_rank` when the preconditioner
    is assembled, and computes eigenvalues of matrices of that size for each block. A
    derivative takes `max_rank` products with the derivative of the operator.

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

    - `shift`: a positive number that is not above the smallest eigenvalue: the noise
        variance of a Gaussian process, a ridge, a jitter. A larger one costs steps and
        accuracy. `Solution.interval` is wider then, if the mean eigenvalue of $P^{-1} A$
        is below 1; it does not show if only a few eigenvalues are below the shift, or if
        `max_rank` leaves others far above it. It may be traced, and is constant to
        derivatives. Where none is known, [`traceax.nystrom_preconditioner`][] estimates
        one for a given rank.
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

        `TypeError` or `ValueError` for a `max_rank` that is not a Python integer of 1 or
        more, and a `shift` that is not a positive, finite number.
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
        block = min(_BLOCK, rank)
        real = jnp.finfo(flat.dtype).dtype
        shift = jax.lax.stop_gradient(jnp.asarray(self.shift, real))

        def unfinished(carry):
            return carry[-1]

        def one_block(carry):
            grown, blocks, before, *_ = carry
            indices = FIRST_PROBE + blocks * block + jnp.arange(block)
            z = draw_for(flat, NormalSampler(), key, indices)
            half, log_ratio = _inverse_root(grown, shift, eps)
            x = half(z)
            grown, coordinates = grown.grow(shifted, x, blocks, eps)
            product = grown.q @ (grown.r @ coordinates)
            rest = half(product) / _relative(shift, grown, eps) + (half(x) - z)
            first = jnp.sum((z.conj() * rest).real) / block
            second = jnp.sum(jnp.abs(rest) ** 2) / block
            now = jnp.stack([jnp.abs(first), second])
            # This block tests the approximation without it. So its own effect is taken to
            # be a fall by the root of the last rate, and that of the next by the rate.
            rate = jnp.where(now < before, now / before, 1)
            expected = now * jnp.sqrt(rate)
            known = n * jnp.log(shift) + log_ratio
            settings = k, num_steps, known
            following, variance = _forecast(expected, *settings)
            later, _ = _forecast(expected * rate, *settings, variance)
            blocks = blocks + 1
            pays = (following - later > block) | (following > 4 * block * blocks)
            room = blocks < rank // block
            # The mean eigenvalue of M is at least 1, unless the shift is above
            # eigenvalues of A.
            above = first > -n * eps**0.5
            return grown, blocks, now, above, room & (pays | (blocks == 1))

        with full_precision(lambda x: execution.matmat(flat, x)) as matmat:

            def shifted(x):
                return matmat(x) - shift.astype(x.dtype) * x

            grown = GrowingNystrom.empty(n, rank // block * block, flat.dtype)
            true = jnp.ones((), bool)
            start = grown, jnp.zeros((), jnp.int32), jnp.ones(2, real), true, true
            end = jax.lax.while_loop(unfinished, one_block, start)
            grown, blocks, _, above, _ = end
            products = grown.scale.astype(flat.dtype) * (grown.q @ grown.r)
            products = products + shift.astype(flat.dtype) * grown.basis
            made = blocks * block
            structure = jax.ShapeDtypeStruct((n,), flat.dtype)
            parts = flat, grown.basis, products, self.shift, structure, made
            # 1, up to rounding.
            least = jnp.where(above, jnp.asarray(0.5, real), 0)
            return assemble(*parts, least)


def _relative(shift: Array, grown: GrowingNystrom, eps: float) -> Real[Array, ""]:
    """The shift in units of the products, beyond their rounding."""
    return jnp.maximum(shift / grown.scale, eps)


def _inverse_root(
    grown: GrowingNystrom, shift: Real[Array, ""], eps: float
) -> tuple[Callable[[Array], Array], Real[Array, ""]]:
    """`shift^(1/2) P^(-1/2)` as a map of columns, and `log det P - n log shift`."""
    whitener, ridge, _, gram = grown.whiten(eps, indefinite=True)
    shift = _relative(shift, grown, eps)
    values, vectors = eigh(gram)
    values = jnp.maximum(values, 0)
    root = jnp.sqrt(values + shift)
    scaled = vectors / (root * (root + jnp.sqrt(shift)))
    q, r, basis = grown.q, grown.r, grown.basis

    def half(x: Inexact[Array, "n b"]) -> Inexact[Array, "n b"]:
        part = r.conj().T @ (q.conj().T @ x) + ridge * (basis.conj().T @ x)
        # Applied one after the other: the whitener may be large, and a product of the two
        # would then have no correct digit.
        part = whitener.conj().T @ (scaled @ (vectors.conj().T @ (whitener @ part)))
        return x - q @ (r @ part) - ridge * (basis @ part)

    return half, jnp.sum(jnp.log1p(values / shift))


def _forecast(
    moments: Real[Array, "2"],
    k: int | Budget,
    num_steps: int | AdaptiveSteps,
    known: Real[Array, ""],
    reference: Real[Array, ""] | None = None,
) -> tuple[Real[Array, ""], Real[Array, ""]]:
    """How many products the probes will take, and the variance of one.

    `moments` are `tr(M - I)` and `||M - I||_F^2`, and `known` is `log det P`. For a fixed
    number k, it is the number of probes that reaches the accuracy which k probes have
    with the variance `reference`.
    As P is below A, M is above I, and to these moments the Gauss-Radau rule
    for the spectrum of M has `weight` eigenvalues `1 + t`, the others 1.
    """
    first, second = moments
    t = second / jnp.where(first > 0, first, 1)
    weight = first / jnp.where(t > 0, t, 1)
    trace, variance = weight * jnp.log1p(t), 2 * weight * jnp.log1p(t) ** 2
    probes: Any = k
    if isinstance(k, Budget):
        least = k.round_size * -(-k.rule.min_samples // k.round_size)
        aim = k.rule.tolerance(known + trace)
        std_err = jnp.sqrt(variance / least)
        excess = k.rule.excess(known + trace, std_err, jnp.full_like(std_err, least))
        probes = least * jnp.maximum(excess**2, 1)
    else:
        aim = jnp.sqrt(variance / k)
        if reference is not None:
            probes = k * variance / jnp.where(reference > 0, reference, 1)
    if not isinstance(num_steps, AdaptiveSteps):
        return probes * num_steps, variance
    # The bracket narrows as for eigenvalues from 1 to 1 + t.
    root = jnp.sqrt(1 + t)
    contraction = ((root - 1) / (root + 1)) ** 2
    ratio = 4 * weight / jnp.where(aim > 0, num_steps.share * aim, 1)
    steps = jnp.ceil(jnp.log(jnp.maximum(ratio, 1)) / -jnp.log(contraction))
    return probes * jnp.clip(steps, 1, num_steps.most), variance
