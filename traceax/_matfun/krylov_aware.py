from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from .._adaptive import Adaptive
from .._execution import AbstractExecution, full_precision
from .._flat import FlatOperator
from .._gradient import attach
from .._kernel.dense import eigh
from .._kernel.lanczos import block_lanczos
from .._kernel.quadrature import Compression
from .._moments import Moments
from .._quantity import AbstractQuantity, Trace
from .._sampler import AbstractSampler, draw_for, SphereSampler
from .._solution import Estimate, first_failure
from .base import AbstractFunctionEstimator, found
from .functions import AbstractSpectralFunction
from .gradients import AbstractFunctionGradient
from .lanczos import Lanczos
from .quadratic_form import (
    bounds_of,
    bracket_of,
    check_domain,
    check_precision,
    lower_end,
    slopes_at,
    span,
    values_at,
)
from .steps import AdaptiveSteps


_LANCZOS = Lanczos()


class KrylovAwareEstimator(AbstractFunctionEstimator):
    r"""Krylov-aware deflation: the trace of $f(A)$ on a block Krylov space, and
    stochastic Lanczos quadrature on its complement.

    With $b = \max(1, \lfloor k/4 \rfloor)$ random vectors, `2 * num_steps` steps of block
    Lanczos. The first half of the basis, $Q$ with `b * num_steps` columns, is deflated:
    $\mathrm{tr}(Q^* f(A) Q)$ comes from the whole block tridiagonal matrix at no further
    product. The other `k - 2 b` probes, less their part in $Q$, estimate the rest with
    `num_steps` steps each.

    Pays off where a few well separated eigenvalues, which a Krylov space finds quickly,
    carry most of $\|f(A)\|_F$: the exponential or a power of an operator with a
    decaying spectrum. On a dense spectrum it has half of the probes for nothing.

    Cost: at most `k * num_steps` products, $O(n (k\, \mathrm{num\_steps})^2 / 4)$
    operations. Memory: `k * num_steps / 2` vectors of length n, and those of the
    other probes. Needs `k >= 3`. The quadrature error is in `stats` as with
    [`traceax.SLQEstimator`][].

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        matrix = jnp.diag(10.0 / jnp.arange(1, 101))
        operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        estimator, key = tx.KrylovAwareEstimator(), jax.random.key(0)
        solution = tx.trace_of_function(
            operator, tx.Exp(), estimator, k=8, num_steps=5, key=key
        )
        print(solution.value, "+-", solution.std_err)
        ```

    **Attributes:**

    - `sampler`: distribution of the probes, rotation invariant. What is left of a probe
        after deflation is scaled to the length that it has in the mean.

    ??? cite

        ```bibtex
        @article{chen2023krylov,
            author  = {Chen, Tyler and Hallman, Eric},
            title   = {{Krylov}-Aware Stochastic Trace Estimation},
            journal = {SIAM Journal on Matrix Analysis and Applications},
            volume  = {44},
            number  = {3},
            pages   = {1218--1244},
            year    = {2023},
        }
        ```
    """

    sampler: AbstractSampler = SphereSampler()
    min_probes: ClassVar[int] = 3

    def __check_init__(self):
        if not self.sampler.rotation_invariant:
            raise ValueError(
                "`sampler` must be rotation invariant: probes are projected and scaled. "
                f"Found `{type(self.sampler).__name__}`. Use `traceax.SphereSampler`."
            )

    def run(
        self,
        operator: FlatOperator,
        function: AbstractSpectralFunction,
        gradient: AbstractFunctionGradient,
        *,
        k: int | Adaptive,
        num_steps: int | AdaptiveSteps,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
        quantity: AbstractQuantity = Trace(),
    ) -> Estimate:
        if not _LANCZOS.fits(operator, function):
            raise ValueError(
                "`KrylovAwareEstimator` needs an operator that is tagged Hermitian and a "
                f"function of its eigenvalues. {found(operator, function)} Tag it if it "
                "is, or use `traceax.SLQEstimator`."
            )
        num_steps = _fixed("num_steps", num_steps)
        k = _fixed("k", k)
        n, block = operator.size, max(1, k // 4)
        total = min(2 * num_steps, -(-n // block))
        width = min(num_steps, total) * block
        probes = draw_for(operator, self.sampler, key, jnp.arange(k - block))
        start, rest = probes[:, :block], probes[:, block:]

        with full_precision(lambda x: execution.matmat(operator.frozen, x)) as matmat:
            run = block_lanczos(matmat, start, total, eps=operator.eps)
            basis = run.basis[:, :width]
            for _ in range(2):
                rest = rest - basis @ (basis.conj().T @ rest)
            nodes, vectors = eigh(run.matrix)
            present = jnp.sum(jnp.abs(basis), axis=0) > 0
            # To the length that they have in the mean, as in XTrace: a constant part of
            # f then adds no variance.
            norms = jnp.linalg.norm(rest, axis=0)
            length = jnp.sqrt((n - jnp.sum(present)).astype(norms.dtype))
            rest = rest * (length / jnp.where(norms > 0, norms, 1))
            lead = vectors[:width] * present[:, None]
            values = values_at(function, nodes, operator.eps)
            deflated = jnp.sum(values * jnp.sum(jnp.abs(lead) ** 2, axis=0))
            slopes = slopes_at(function, nodes, operator.eps)
            left = run.basis @ ((vectors * slopes) @ lead.conj().T)
            border = jnp.pad(run.coupling, ((0, 0), ((total - 1) * block, 0)))
            compression = Compression(run.matrix, border, nodes, vectors)
            lower = lower_end(function, compression, None, operator.eps)
            bracket = bracket_of(function, deflated, compression, present, lower)

        def form(flat, probe):
            state = _LANCZOS.start(flat, probe, num_steps)
            state = _LANCZOS.advance(flat, state, 0, num_steps)
            settings = num_steps, function, lower, gradient.columns, nodes[-1]
            return _LANCZOS.read(flat, state, *settings)

        forms = execution.map(form, operator.frozen, rest.T, width=num_steps)
        moments = Moments.of(deflated + forms.value)
        weight = rest.shape[1] ** -0.5
        pairs = [weight * x.reshape(-1, n).T for x in (forms.left, forms.right)]
        left = jnp.concatenate([left, pairs[0]], axis=1)
        right = jnp.concatenate([basis, pairs[1]], axis=1)
        used = jnp.concatenate([basis, weight * rest], axis=1)
        frame = gradient.frame(function, left, right, used)
        ends = nodes[None, jnp.array([0, -1])]
        extremes = jnp.where(length > 0, forms.extremes, ends)
        extremes = span(jnp.append(extremes, ends, axis=0))
        in_domain = check_domain(function, operator, extremes, moments.mean)
        brackets = bracket + forms.bracket
        errors = jnp.concatenate([brackets, forms.rounding[:, None]], axis=1)
        errors = Moments.of(errors)
        low, high, rounding = errors.mean
        precise = check_precision(operator, moments, high - low, rounding)
        extra = {"gradient_residual": forms.residual, "ritz_values": extremes}
        if function.bracketed:
            extra["sample_brackets"] = brackets
            extra["bracket"] = jnp.stack([low, high])
        return Estimate(
            value=attach(operator, moments.mean, frame, execution=execution),
            std_err=moments.std_err(),
            samples=deflated + forms.value,
            num_matvecs=total * block + num_steps * rest.shape[1],
            rounding=operator.rounding,
            result=first_failure(in_domain, precise),
            extra=extra,
            probes=lambda: used.shape[1] ** 0.5 * used,
            bounds=bounds_of(errors),
        )


def _fixed(name: str, value: Any) -> int:
    if isinstance(value, int):
        return value
    raise ValueError(
        f"`KrylovAwareEstimator` needs an integer as `{name}`. Found "
        f"`{name}=traceax.{type(value).__name__}(...)`. Pass an integer, or use "
        "`traceax.SLQEstimator`."
    )


KrylovAwareEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: default is [`traceax.SphereSampler`][].

**Raises:**

`ValueError` for a sampler that is not rotation invariant.
"""
