import dataclasses
from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Inexact, Int, Real

from .._core.moments import Moments
from .._core.sampler import (
    AbstractSampler,
    check_resphering,
    is_resphered,
    SphereSampler,
)
from .._numerics.dense import normalise, qr
from .._numerics.expansion import Independent
from .._numerics.growth import put, put_rows, remove
from .._numerics.leave_one_out import resphering
from .._numerics.nystrom import GrowingNystrom, nystrom, orthonormalise
from .._run.budget import Budget
from .growing import AbstractGrowingEstimator
from .sketch import Sketch


class NystromPlusPlusEstimator(AbstractGrowingEstimator):
    r"""Nystrom++: the trace of a Nystrom approximation, the rest by Hutchinson.

    Half of the products make a Nystrom approximation $\hat A$, the other
    $g = k - \lfloor k/2 \rfloor$ estimate the trace of $A - \hat A$:
    $\mathrm{tr}(\hat A) + \frac{1}{g} \sum_j \omega_j^* (A - \hat A) \omega_j$, each
    probe scaled so that its part outside the span of the approximation's has the length
    that it has in the mean. Positive
    or negative semidefinite operators only. Its samples are independent given
    $\hat A$, and all products can be made in one pass over the operator. With
    [`traceax.Adaptive`][] the approximation grows in blocks as long as that saves
    products, for at most half of `max_k`; memory is that of `max_k`.

    Cost: `k` products, $O(n k^2)$ operations, about four arrays of `k` vectors of
    length n. Needs `k >= 2`; for an error bar, `k >= 3`.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jax.random.normal(jax.random.key(0), (300, 10))
        operator = lx.MatrixLinearOperator(x @ x.T, lx.positive_semidefinite_tag)
        key = jax.random.key(1)
        solution = tx.trace(operator, tx.NystromPlusPlusEstimator(), k=40, key=key)
        # Exact up to rounding: the rank, 10, is below k / 2.
        print(f"{solution.value / jnp.sum(x**2):.4f}")  # 1.0000
        ```


    ??? cite

        ```bibtex
        @article{persson2022improved,
            author  = {Persson, David and Cortinovis, Alice and Kressner, Daniel},
            title   = {Improved Variants of the {Hutch++} Algorithm for Trace Estimation},
            journal = {SIAM Journal on Matrix Analysis and Applications},
            volume  = {43},
            number  = {3},
            pages   = {1162--1185},
            year    = {2022},
        }
        ```
    """

    sampler: AbstractSampler = SphereSampler()
    improved: bool | None = eqx.field(static=True, default=None)
    min_matvecs: ClassVar[int] = 2
    semidefinite: ClassVar[bool] = True

    def __check_init__(self):
        check_resphering(self.sampler, self.improved)

    def num_probes(self, k: int) -> int:
        return k

    def sketch(
        self,
        matmat: Callable[[Array], Array],
        probes: Inexact[Array, "n m"],
        k: int,
        eps: float,
    ) -> Sketch:
        n, m = probes.shape[0], k // 2
        g = k - m
        resphered = is_resphered(self.sampler, self.improved)
        basis, _, _ = orthonormalise(probes[:, :m])
        rest = probes[:, m:]
        products, scale = normalise(matmat(jnp.concatenate([basis, rest], axis=1)))
        approximation = nystrom(basis, products[:, :m], eps)
        inside = jnp.sum(jnp.abs(approximation.factor.conj().T @ rest) ** 2, axis=0)
        forms = jnp.sum(rest.conj() * products[:, m:], axis=0)
        norms = jnp.sum(jnp.abs(rest) ** 2, axis=0)
        # The approximation is one of A + shift I, and exact on the basis.
        shift, unseen = approximation.shift, rest - basis @ (basis.conj().T @ rest)
        remainder = forms - inside + shift * norms
        factor = resphering(rest, unseen, m, resphered)
        remainder = factor * remainder
        samples = jnp.sum(jnp.abs(approximation.factor) ** 2) - shift * n + remainder

        def expansion():
            b = approximation.factor
            image = products[:, m:] + shift * rest - b @ (b.conj().T @ rest)
            return Independent(
                shared=(b.T, b.T),
                own_pair=((factor * rest).T, image.T),
                products=products[:, :m].T,
                shift=-shift,
                probes=rest.T,
            )

        # The frame is that of Hutch++ on the same products.
        span, _ = qr(products[:, :m])
        outside = rest - span @ (span.conj().T @ rest)
        rank = jnp.sum(jnp.abs(span) ** 2)
        outside = outside * resphering(rest, outside, rank, resphered) ** 0.5
        left = jnp.concatenate([span, outside / g], axis=1)
        right = jnp.concatenate([span, outside], axis=1)
        return Sketch(
            samples,
            Moments.of(samples).std_err(),
            (left, right),
            num_matvecs=k,
            scale=scale,
            semidefinite=approximation.semidefinite,
            expansion=expansion,
        )

    def probes_in_round(self, k: int) -> int:
        return k

    def start(self, n: int, dtype: DTypeLike, k: Budget) -> "_State":
        real = jnp.finfo(dtype).dtype
        m = k.num_rounds * k.round_size
        return _State(
            nystrom=GrowingNystrom.empty(n, m, dtype),
            whitener=jnp.zeros((m, m), dtype),
            shift=jnp.zeros((), real),
            trace=jnp.zeros((), real),
            squares=jnp.zeros((), real),
            samples=jnp.zeros(m, dtype),
            semidefinite=jnp.ones((), bool),
            blocks=jnp.zeros((), jnp.int32),
            deflating=jnp.full((), k.num_rounds > 1),
        )

    def grow(
        self,
        matmat: Callable[[Array], Array],
        probes: Inexact[Array, "n b"],
        state: "_State",
        rounds: Int[Array, ""],
        eps: float,
        k: Budget,
    ) -> "_State":
        n, b = probes.shape
        resphered = is_resphered(self.sampler, self.improved)

        def deflate(state):
            nystrom, _ = state.nystrom.grow(matmat, probes, rounds, eps)
            whitener, shift, semidefinite, gram = nystrom.whiten(eps)
            # How much ||A - A_hat||_F^2 falls by this block, if they are orthogonal.
            squares = jnp.sum(jnp.abs(gram) ** 2)
            seen = jnp.trace(nystrom.core @ nystrom.r) / ((rounds + 1) * b)
            # Compared with the products of one more block.
            saved = k.rule.samples_saved(squares - state.squares, n * seen, nystrom.scale)
            return dataclasses.replace(
                state,
                nystrom=nystrom,
                whitener=whitener,
                shift=shift,
                trace=jnp.trace(gram).real,
                squares=squares,
                semidefinite=semidefinite,
                blocks=state.blocks + 1,
                deflating=(saved > b) & ((rounds + 2) * 2 <= k.num_rounds),
            )

        def sample(state):
            # B = (q r + shift Q) W*
            nystrom, shift = state.nystrom, state.shift
            outside, image = remove(nystrom.q, probes, state.blocks, b)
            unseen, inside = remove(nystrom.basis, probes, state.blocks, b)
            rank = jnp.sum(jnp.abs(nystrom.basis) ** 2)
            factor = resphering(probes, unseen, rank, resphered)
            inside = nystrom.r.conj().T @ image + shift * inside
            inside = jnp.sum(jnp.abs(state.whitener @ inside) ** 2, axis=0)
            forms = jnp.sum(probes.conj() * matmat(probes), axis=0) / nystrom.scale
            norms = jnp.sum(jnp.abs(probes) ** 2, axis=0)
            samples = state.trace - shift * n + factor * (forms - inside + shift * norms)
            used = jnp.arange(nystrom.q.shape[1]) < state.blocks * b
            rank = jnp.sum(jnp.abs(nystrom.q) ** 2, axis=0) @ used.astype(norms.dtype)
            outside = outside * resphering(probes, outside, rank, resphered) ** 0.5
            nystrom = dataclasses.replace(nystrom, q=put(nystrom.q, outside, rounds))
            samples = put_rows(state.samples[:, None], samples[:, None], rounds)[:, 0]
            return dataclasses.replace(state, nystrom=nystrom, samples=samples)

        return jax.lax.cond(state.deflating, deflate, sample, state)

    def assess(
        self, state: "_State", rounds: Int[Array, ""] | int, eps: float, k: Budget
    ) -> Sketch:
        index = jnp.arange(state.samples.shape[0])
        sampled = index >= state.blocks * k.round_size
        valid = sampled & (index < rounds * k.round_size)
        count = jnp.maximum((rounds - state.blocks) * k.round_size, 1)
        right = state.nystrom.q
        left = jnp.where(sampled, right / count, right)
        return Sketch(
            state.samples,
            Moments.of(state.samples, valid).std_err(),
            (left, right),
            num_matvecs=rounds * k.round_size,
            scale=state.nystrom.scale,
            semidefinite=state.semidefinite,
            valid=valid,
        )


class _State(eqx.Module):
    """`blocks` blocks of the approximation B B*, whose range is that of as many blocks of
    `nystrom.q`. The others are, in order of the rounds, the parts of the later probes
    outside of it. `trace` is ||B||_F^2 and `squares` is ||B* B||_F^2."""

    nystrom: GrowingNystrom
    whitener: Inexact[Array, "m m"]
    shift: Real[Array, ""]
    trace: Real[Array, ""]
    squares: Real[Array, ""]
    samples: Inexact[Array, " m"]
    semidefinite: Bool[Array, ""]
    blocks: Int[Array, ""]
    deflating: Bool[Array, ""]


NystromPlusPlusEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: distribution of the probes. Default is [`traceax.SphereSampler`][]. Where the
    diagonal outweighs the rest, [`traceax.RademacherSampler`][] is better.
- `improved`: whether to rescale the part of each probe outside the basis to the length
    that it has in the mean ("resphering"), as [`traceax.XTraceEstimator`][] does. Default
    is `None`: if the sampler is rotation invariant, as it has to be.

**Raises:**

`TypeError` for a `sampler` that is no [`traceax.AbstractSampler`][], and `ValueError`
for `improved=True` with one that is not rotation invariant.
"""
