"""Nystrom++: the trace of a Nystrom approximation, plus Hutchinson for the remainder.

With the approximation `A_hat = B B*` of `A + nu I` from the first m probes, and g other
probes `omega_j`,

    tr A ~ tr(A_hat) - nu n + (1/g) sum_j c_j omega_j* (A + nu I - A_hat) omega_j,

with `c_j = 1`, or with resphering the factor that gives the part of `omega_j` outside the
span of the first probes the length that it has in the mean.

In the code: B is `approximation.factor`, nu is `shift`, the `omega_j` are
`sample_probes`, `c_j` is `factor`, `omega_j* A omega_j` is `forms`, and `omega_j* A_hat
omega_j` is `approximate_forms`.

In rounds, blocks of probes enlarge the approximation as long as that is expected to save
more matvecs than it costs, and later blocks give samples.

Reference: Persson, Cortinovis and Kressner, Improved variants of the Hutch++ algorithm
for trace estimation, SIMAX 43 (2022).
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Inexact, Int, Real

from .._core.moments import Moments
from .._core.sampler import AbstractSampler, check_resphering, is_resphered
from .._core.samplers import SphereSampler
from .._numerics.dense import normalise, qr
from .._numerics.expansion import Independent
from .._numerics.growth import put, put_rows, remove
from .._numerics.leave_one_out import resphering
from .._numerics.nystrom import GrowingNystrom, nystrom, orthonormalise
from .._run.budget import Budget
from .growing import AbstractGrowingEstimator
from .sketch import Sketch


class NystromPlusPlusEstimator(AbstractGrowingEstimator):
    r"""Nystrom++: the trace of a Nystrom approximation, and Hutchinson on the remainder.

    Half of the matvecs make a Nystrom approximation $\hat A$, the other
    $g = k - \lfloor k/2 \rfloor$ estimate the trace of $A - \hat A$:
    $\mathrm{tr}(\hat A) + \frac{1}{g} \sum_j \omega_j^* (A - \hat A) \omega_j$. Each
    probe is scaled so that its part outside the span of the approximation's probes has
    the length that it has in the mean. It is for positive or negative semidefinite
    operators only. Its samples are independent given $\hat A$, and all matvecs can be
    made in one pass over the operator. With [`traceax.Adaptive`][] the approximation
    grows in blocks as long as that saves matvecs, for at most half of `max_k`; the memory
    is that of `max_k`.

    Cost: `k` matvecs, $O(n k^2)$ operations, about four arrays of `k` vectors of
    length n. It needs `k >= 2`; for an error bar, `k >= 3`.

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
        sample_probes = probes[:, m:]
        columns = jnp.concatenate([basis, sample_probes], axis=1)
        products, scale = normalise(matmat(columns))
        approximation = nystrom(basis, products[:, :m], eps)
        b, shift = approximation.factor, approximation.shift
        approximate_forms = jnp.sum(jnp.abs(b.conj().T @ sample_probes) ** 2, axis=0)
        forms = jnp.sum(sample_probes.conj() * products[:, m:], axis=0)
        norms = jnp.sum(jnp.abs(sample_probes) ** 2, axis=0)
        # The approximation of A + shift I is exact on the basis, so the form of the
        # remainder depends only on the part of a probe outside of it.
        projected = sample_probes - basis @ (basis.conj().T @ sample_probes)
        remainder = forms - approximate_forms + shift * norms
        factor = resphering(sample_probes, projected, m, resphered)
        remainder = factor * remainder
        samples = jnp.sum(jnp.abs(b) ** 2) - shift * n + remainder

        def expansion():
            shifted = products[:, m:] + shift * sample_probes
            images = shifted - b @ (b.conj().T @ sample_probes)
            return Independent(
                shared=(b.T, b.T),
                own_pair=((factor * sample_probes).T, images.T),
                products=products[:, :m].T,
                shift=-shift,
                probes=sample_probes.T,
            )

        # The samples are not linear in A. So the derivative is taken from the frame of
        # Hutch++ for the same products.
        q, _ = qr(products[:, :m])
        outside = sample_probes - q @ (q.conj().T @ sample_probes)
        rank = jnp.sum(jnp.abs(q) ** 2)
        outside = outside * resphering(sample_probes, outside, rank, resphered) ** 0.5
        left = jnp.concatenate([q, outside / g], axis=1)
        right = jnp.concatenate([q, outside], axis=1)
        return Sketch(
            samples=samples,
            std_err=Moments.of(samples).std_err(),
            frame=(left, right),
            num_matvecs=k,
            scale=scale,
            semidefinite=approximation.semidefinite,
            expansion=expansion,
        )

    def probes_in_round(self, k: int) -> int:
        return k

    def start(self, n: int, dtype: DTypeLike, k: Budget) -> "NystromPlusPlusBuffers":
        real = jnp.finfo(dtype).dtype
        m = k.num_rounds * k.round_size
        return NystromPlusPlusBuffers(
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
        state: "NystromPlusPlusBuffers",
        rounds: Int[Array, ""],
        eps: float,
        k: Budget,
    ) -> "NystromPlusPlusBuffers":
        n, b = probes.shape
        resphered = is_resphered(self.sampler, self.improved)

        def deflate(state):
            nystrom, _ = state.nystrom.grow(matmat, probes, rounds, eps)
            whitener, shift, semidefinite, gram = nystrom.whiten(eps)
            # How much ||A - A_hat||_F^2 falls by this block, if the changes of A_hat by
            # all blocks are orthogonal.
            squares = jnp.sum(jnp.abs(gram) ** 2)
            # tr A, whose size the tolerance may be relative to, from the mean of w* A w
            # over the orthonormal basis of the probes.
            mean = jnp.trace(nystrom.core @ nystrom.r) / ((rounds + 1) * b)
            # Another block pays off if the last one saved more samples than it cost.
            saved = k.rule.samples_saved(squares - state.squares, n * mean, nystrom.scale)
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
            nystrom, shift = state.nystrom, state.shift
            outside, in_range = remove(nystrom.q, probes, state.blocks, b)
            projected, in_basis = remove(nystrom.basis, probes, state.blocks, b)
            rank = jnp.sum(jnp.abs(nystrom.basis) ** 2)
            factor = resphering(probes, projected, rank, resphered)
            # B* omega, without the tall B = (q r + shift Q) T*.
            coordinates = nystrom.r.conj().T @ in_range + shift * in_basis
            coordinates = state.whitener @ coordinates
            approximate_forms = jnp.sum(jnp.abs(coordinates) ** 2, axis=0)
            forms = jnp.sum(probes.conj() * matmat(probes), axis=0) / nystrom.scale
            norms = jnp.sum(jnp.abs(probes) ** 2, axis=0)
            remainder = forms - approximate_forms + shift * norms
            samples = state.trace - shift * n + factor * remainder
            # Blocks of `q` beyond those of the approximation hold parts of probes.
            used = jnp.arange(nystrom.q.shape[1]) < state.blocks * b
            rank = jnp.sum(jnp.abs(nystrom.q) ** 2, axis=0) @ used.astype(norms.dtype)
            outside = outside * resphering(probes, outside, rank, resphered) ** 0.5
            nystrom = dataclasses.replace(nystrom, q=put(nystrom.q, outside, rounds))
            samples = put_rows(state.samples[:, None], samples[:, None], rounds)[:, 0]
            return dataclasses.replace(state, nystrom=nystrom, samples=samples)

        return jax.lax.cond(state.deflating, deflate, sample, state)

    def assess(
        self,
        state: "NystromPlusPlusBuffers",
        rounds: Int[Array, ""] | int,
        eps: float,
        k: Budget,
    ) -> Sketch:
        index = jnp.arange(state.samples.shape[0])
        sampled = index >= state.blocks * k.round_size
        valid = sampled & (index < rounds * k.round_size)
        count = jnp.maximum((rounds - state.blocks) * k.round_size, 1)
        right = state.nystrom.q
        left = jnp.where(sampled, right / count, right)
        return Sketch(
            samples=state.samples,
            std_err=Moments.of(state.samples, valid).std_err(),
            frame=(left, right),
            num_matvecs=rounds * k.round_size,
            scale=state.nystrom.scale,
            semidefinite=state.semidefinite,
            valid=valid,
        )


class NystromPlusPlusBuffers(eqx.Module):
    """The approximation `B B*` from `blocks` blocks of probes, and samples of the later
    ones. The first `blocks` blocks of `nystrom.q` span the range of the products; its
    later blocks are the parts of the later probes outside that range, in the order of the
    rounds. `trace` is `||B||_F^2`, and `squares` is `||B* B||_F^2`."""

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
    diagonal outweighs the other entries, [`traceax.RademacherSampler`][] is better.
- `improved`: whether to rescale the part of each probe outside the basis to the length
    that it has in the mean ("resphering"), as [`traceax.XTraceEstimator`][] does. The
    default, `None`, does so if the sampler is rotation invariant, which resphering needs.

**Raises:**

`TypeError` for a `sampler` that is not a [`traceax.AbstractSampler`][], and `ValueError`
for `improved=True` with one that is not rotation invariant.
"""
