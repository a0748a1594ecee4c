"""A Nystrom preconditioner that chooses its own rank, and the shift if none is known.

`growth.py` makes it a block of matvecs at a time, and says after each block, by
`forecast.py`, whether another one is expected to save as many matvecs as it costs.
"""

import functools as ft
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree, Real

from .._core.arithmetic import full_precision
from .._core.checks import check_positive, concrete_number, real_scalar
from .._core.flat import FlatOperator, to_flat
from .._quadrature.convergence import SEEN_BY_ONE
from .._run.budget import Budget
from .._run.execution import AbstractExecution
from .._run.matvecs import Matvecs, SHARE_OF_BRACKET
from .._run.random_steps import RandomSteps
from .._run.steps import AdaptiveSteps
from .base import AbstractPreconditioner, AbstractPreconditioning, check_size
from .forecast import ForecastOfError, ForecastOfMatvecs
from .growth import add_block, Growth
from .low_rank import Preconditioner
from .scaled import checked_vector, is_vector, ScaledPreconditioner, scaling_by


# The rank grows by this many columns at a time. Larger blocks overshoot the best rank by
# more; smaller ones have noisier moments, and solve eigenvalue problems more often.
_BLOCK_SIZE = 8
# Each block solves eigenvalue problems of the largest rank, so of a large total number of
# matvecs a block takes about this fraction.
_BLOCKS_OF_TOTAL = 16
# The largest rank by default, and where vectors are long, as many numbers as its buffers
# have at most: 1 GiB in float32.
_MAX_RANK, _MAX_ENTRIES = 256, 2**28


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
    matvecs have been spent on it. `stats["num_matvecs"]` counts them. Where the
    approximation does not make the remaining call at least twice as cheap, as on flat
    spectra, it is dropped.

    Nothing needs to be known of the spectrum. If a lower bound is known, such as a noise
    variance, pass it as `shift`: it saves the steps that show that no eigenvalue near
    zero is hidden.

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
            preconditioner=tx.AutoPreconditioner(),
            key=jax.random.key(0),
        )
        print(solution.value, "+-", solution.std_err, solution.stats["num_matvecs"])
        ```

    **Attributes:**

    - `shift`: a positive scalar, at most the smallest eigenvalue of A: the noise variance
        of a Gaussian process, a ridge, a jitter. Or a vector d of them, of the structure
        of A's vectors, with $A - \mathrm{diag}(d)$ semidefinite, as in
        [`traceax.nystrom_preconditioner`][]. A shift above that eigenvalue costs
        steps and accuracy. Then `Solution.interval` is wider, if the mean eigenvalue of
        $P^{-1} A$ is below 1; but the mistake goes unnoticed if only a few eigenvalues
        are below the shift, or if `max_rank` leaves others far above it. The shift may be
        traced, and is constant to derivatives. `None` estimates it from the smallest
        Ritz values after each block. An estimate changes the cost, but is not taken for a
        bound, so a poor one does no harm to brackets and intervals.
    - `max_rank`: the largest rank, a Python integer; more than n counts as n. `None` is
        256, or where vectors are long, as many as make $2^{28}$ numbers of the `2
        max_rank` vectors.

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

    shift: PyTree[Array] | None
    max_rank: int | None = eqx.field(static=True)

    def __init__(
        self, shift: PyTree[Array | float] | None = None, max_rank: int | None = None
    ):
        """**Arguments:**

        - `shift`: default is `None`, an estimate.
        - `max_rank`: default is `None`, as above.

        **Raises:**

        `TypeError` or `ValueError` if `max_rank` is not a Python integer of 1 or more,
        or if `shift` is not a positive, finite number, or a vector of them.
        """
        self.shift = None if shift is None else _checked(shift)
        if max_rank is not None:
            max_rank = check_positive("max_rank", max_rank)
        self.max_rank = max_rank

    def prepare(
        self,
        operator: FlatOperator,
        *,
        k: int | Budget | Matvecs,
        num_steps: int | AdaptiveSteps | RandomSteps,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> AbstractPreconditioner:
        call = {"k": k, "num_steps": num_steps, "key": key, "execution": execution}
        flat = operator.frozen
        real = jnp.finfo(flat.dtype).dtype
        shift = jax.lax.stop_gradient(self.shift)
        if shift is None or not is_vector(shift):
            scalar = None if shift is None else jnp.asarray(shift, real)
            return self._grow(flat, scalar, **call)
        # In the scale in which all shifts are 1.
        structure = jax.ShapeDtypeStruct((flat.size,), flat.dtype)
        scaling = scaling_by(to_flat(shift, real), structure)
        check_size(scaling, flat.size)
        scaled, one = scaling.apply_to(flat), jnp.ones((), real)
        inner = self._grow(scaled, one, offset=scaling.logdet, **call)
        return ScaledPreconditioner(inner, scaling)

    def _grow(
        self,
        flat: FlatOperator,
        known: Real[Array, ""] | None,
        *,
        k: int | Budget | Matvecs,
        num_steps: int | AdaptiveSteps | RandomSteps,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
        offset: Real[Array, ""] | float = 0.0,
    ) -> Preconditioner:
        """The preconditioner for a `known` shift, or an estimated one. `offset` is what
        the log-determinant of the call has beside that of `flat`."""
        n, real = flat.size, jnp.finfo(flat.dtype).dtype
        # Without a lower bound, steps are made until no eigenvalue can be hidden.
        hidden = n / SEEN_BY_ONE if known is None else 0.0
        if isinstance(k, Matvecs):
            assert isinstance(num_steps, int)
            share = 1.0 if known is None else SHARE_OF_BRACKET
            forecast = ForecastOfError(n, k.total, num_steps, share, hidden)
            rank = self.max_rank or _default_rank(n, k.most_for_rank)
            rank = min(rank, k.most_for_rank, n)
            size = -(-k.total // (_BLOCK_SIZE * _BLOCKS_OF_TOTAL)) * _BLOCK_SIZE
        else:
            forecast = ForecastOfMatvecs(k, num_steps, offset, hidden)
            rank, size = min(self.max_rank or _default_rank(n), n), _BLOCK_SIZE
        block = min(size, rank)
        with full_precision(lambda x: execution.matmat(flat, x)) as matmat:
            grow = ft.partial(
                add_block,
                flat=flat,
                matmat=matmat,
                key=key,
                known=known,
                max_blocks=rank // block,
                forecast=forecast,
            )
            start = Growth.empty(n, rank // block * block, flat.dtype)
            end = jax.lax.while_loop(lambda x: x.unfinished, grow, start)
            # As P <= A for a shift that is a lower bound, no eigenvalue of M is below 1,
            # up to rounding. Its mean is below 1 if the shift is above eigenvalues of A.
            lower_bound = None
            if known is not None:
                above = end.earlier[1].first > -n * flat.eps**0.5
                rounding = n * flat.eps * end.grown.scale / known
                bound = jnp.maximum(1 - rounding, 0.5).astype(real)
                lower_bound = jnp.where(above, bound, 0)
            return jax.lax.cond(
                end.pays(forecast),
                lambda: end.preconditioner(flat, known, lower_bound),
                lambda: end.without_rank(known, lower_bound),
            )


def _checked(shift: PyTree[Array | float]) -> PyTree[Array]:
    """The argument `shift`, of arrays."""
    if is_vector(shift):
        return checked_vector(shift)
    scalar = real_scalar("shift", shift)
    number = concrete_number(scalar)
    if number is not None and not 0 < number < math.inf:
        raise ValueError(
            f"`shift` must be positive and finite. Found {number}. If nothing is "
            "known of the smallest eigenvalue, leave it out."
        )
    return scalar


def _default_rank(n: int, most: int = _MAX_RANK) -> int:
    """The largest rank by default, for which there is memory."""
    return max(1, min(most, _MAX_ENTRIES // (2 * n)))
