"""Hutch++: exact on a sketched range, plus Hutchinson for the remainder.

With Q an orthonormal basis of `A Omega` for m probes, and g other probes `omega_j`,

    tr A ~ tr(Q* A Q) + (1/g) sum_j c_j v_j* A v_j,    v_j = (I - Q Q*) omega_j,

with `c_j = 1`, or with resphering the factor that gives `v_j` the length that it has in
the mean.

In the code: Q is `basis`, the vectors `sqrt(c_j) v_j` are `projected`, and their
quadratic forms with A are `forms`.

In rounds, blocks of probes enlarge Q as long as that is expected to save more matvecs
than it costs, and later blocks give samples (Persson et al.).

References: Meyer, Musco, Musco and Woodruff, Hutch++: optimal stochastic trace
estimation, SOSA (2021), Algorithm 1. Persson, Cortinovis and Kressner, Improved variants
of the Hutch++ algorithm for trace estimation, SIMAX 43 (2022).
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
from .._numerics.dense import diagonal, inner_product, normalise, qr, two_norm
from .._numerics.expansion import Independent
from .._numerics.growth import extend, put, put_rows, remove, rescale
from .._numerics.leave_one_out import resphering
from .._run.budget import Budget
from .growing import AbstractGrowingEstimator, by_round
from .sketch import Sketch


class HutchPlusPlusEstimator(AbstractGrowingEstimator):
    r"""Hutch++: the trace of $A$ on a sketched range, and Hutchinson on the remainder.

    With $Q$ an orthonormal basis of $A \Omega$ for $m = \lfloor k/3 \rfloor$ probes and
    $G$ the other $g = k - 2m$ probes with their part in $Q$ removed, and scaled to the
    length $\sqrt{n - m}$ that is left in the mean, the estimate is
    $\mathrm{tr}(Q^* A Q) + \frac{1}{g} \sum_j g_j^* A g_j$. It works for any square
    operator. The samples are independent given $Q$, so the standard error is that of a
    mean of `g` samples. With [`traceax.Adaptive`][] $Q$ grows in blocks as long as that
    saves matvecs (Persson et al., 2022), for at most half of `max_k`; the memory is that
    of `max_k`.

    Cost: `k` matvecs, $O(n k^2)$ operations, about `2.6 k` vectors of length n. It needs
    `k >= 3`; for an error bar, `k >= 4`.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jax.random.normal(jax.random.key(0), (300, 10))
        operator = lx.MatrixLinearOperator(x @ x.T)
        key = jax.random.key(1)
        solution = tx.trace(operator, tx.HutchPlusPlusEstimator(), k=60, key=key)
        # Exact up to rounding: the rank, 10, is below k / 3.
        print(f"{solution.value / jnp.sum(x**2):.4f}")  # 1.0000
        ```


    ??? cite

        ```bibtex
        @inproceedings{meyer2021hutch,
            author    = {Meyer, Raphael A. and Musco, Cameron and Musco, Christopher and
                         Woodruff, David P.},
            title     = {Hutch++: Optimal Stochastic Trace Estimation},
            booktitle = {Symposium on Simplicity in Algorithms (SOSA)},
            pages     = {142--155},
            year      = {2021},
        }

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
    min_matvecs: ClassVar[int] = 3
    semidefinite: ClassVar[bool] = False

    def __check_init__(self):
        check_resphering(self.sampler, self.improved)

    def num_probes(self, k: int) -> int:
        return k - k // 3

    def sketch(
        self,
        matmat: Callable[[Array], Array],
        probes: Inexact[Array, "n m"],
        k: int,
        eps: float,
    ) -> Sketch:
        m = k // 3
        g = k - 2 * m
        resphered = is_resphered(self.sampler, self.improved)
        products, scale = normalise(matmat(probes[:, :m]))
        basis, _ = qr(products)
        sample_probes = probes[:, m:]
        projected = sample_probes - basis @ (basis.conj().T @ sample_probes)
        # Not m: `qr` may return zero columns for rows that are split between devices.
        rank = jnp.sum(jnp.abs(basis) ** 2)
        c = resphering(sample_probes, projected, rank, resphered)
        projected = projected * jnp.sqrt(c)
        # One product for both traces, so that one pass over the operator makes it.
        directions = jnp.concatenate([basis, projected], axis=1)
        images = matmat(directions) / scale
        forms = jnp.sum(directions.conj() * images, axis=0)
        samples = jnp.sum(forms[:m]) + forms[m:]
        left = jnp.concatenate([basis, projected / g], axis=1)
        return Sketch(
            samples=samples,
            std_err=Moments.of(samples).std_err(),
            frame=(left, directions),
            num_matvecs=k,
            scale=scale,
            magnitude=jnp.linalg.norm(products) / m**0.5,
            expansion=lambda: Independent(
                shared=(basis.T, images[:, :m].T),
                own_pair=(projected.T, images[:, m:].T),
                products=products.T / m**0.5,
            ),
        )

    def probes_in_round(self, k: int) -> int:
        return k // 2 * 2

    def start(self, n: int, dtype: DTypeLike, k: Budget) -> "HutchPlusPlusBuffers":
        size = self.probes_in_round(k.round_size)
        real = jnp.finfo(dtype).dtype
        m = k.num_rounds * size
        return HutchPlusPlusBuffers(
            basis=jnp.zeros((n, m // 2), dtype),
            projected=jnp.zeros((n, m), dtype),
            forms=jnp.zeros(m, dtype),
            trace=jnp.zeros((), dtype),
            rank=jnp.zeros((), real),
            size=jnp.zeros((), real),
            scale=jnp.ones((), real),
            pilot=jnp.zeros((), dtype),
            blocks=jnp.zeros((), jnp.int32),
            deflating=jnp.full((), k.num_rounds > 1),
        )

    def grow(
        self,
        matmat: Callable[[Array], Array],
        probes: Inexact[Array, "n b"],
        state: "HutchPlusPlusBuffers",
        rounds: Int[Array, ""],
        eps: float,
        k: Budget,
    ) -> "HutchPlusPlusBuffers":
        b = probes.shape[1] // 2
        resphered = is_resphered(self.sampler, self.improved)

        def deflate(state):
            chosen = probes[:, :b]
            products, scale = rescale(matmat(chosen), state.scale, state.blocks)
            length = jnp.sqrt(inner_product(products, products).real)
            size = jnp.maximum(state.size, length)
            block = extend(state.basis, products, state.blocks, eps, size).block
            images = matmat(block) / scale
            basis = put(state.basis, block, state.blocks)
            outside, _ = remove(basis, images, state.blocks + 1, b)
            inner = block.conj().T @ images
            # How much ||(I - QQ*) A (I - QQ*)||_F^2 falls by this block, for Hermitian A.
            coupling = inner_product(outside, outside).real
            gain = 2 * coupling + jnp.sum(jnp.abs(inner) ** 2)
            # Hutchinson's estimate, as the tolerance may be relative to the trace.
            pilot = state.pilot + inner_product(chosen, products) / b
            # Another block pays off if the last one saved more samples than it cost.
            saved = k.rule.samples_saved(gain, pilot / (state.blocks + 1), scale)
            room = (state.blocks + 1) * 2 < k.num_rounds
            return dataclasses.replace(
                state,
                basis=basis,
                trace=state.trace + jnp.sum(diagonal(inner)),
                rank=state.rank + inner_product(block, block).real,
                size=size,
                scale=scale,
                pilot=pilot,
                blocks=state.blocks + 1,
                deflating=(saved > 2 * b) & room,
            )

        def sample(state):
            projected, _ = remove(state.basis, probes, state.blocks, b)
            c = resphering(probes, projected, state.rank, resphered)
            projected = projected * jnp.sqrt(c)
            images = matmat(projected) / state.scale
            forms = jnp.sum(projected.conj() * images, axis=0)
            # A single round has no block of the basis, whose products would give the
            # size.
            size = two_norm(images) if k.num_rounds == 1 else state.size
            return dataclasses.replace(
                state,
                size=size,
                projected=put(state.projected, projected, rounds),
                forms=put_rows(state.forms[:, None], forms[:, None], rounds)[:, 0],
            )

        return jax.lax.cond(state.deflating, deflate, sample, state)

    def assess(
        self,
        state: "HutchPlusPlusBuffers",
        rounds: Int[Array, ""] | int,
        eps: float,
        k: Budget,
    ) -> Sketch:
        size = self.probes_in_round(k.round_size)
        index = jnp.arange(state.forms.shape[0])
        valid = (index >= state.blocks * size) & (index < rounds * size)
        samples = state.trace + state.forms
        count = jnp.maximum((rounds - state.blocks) * size, 1)
        left = state.basis, state.projected / count
        right = state.basis, state.projected
        return Sketch(
            samples=samples,
            std_err=Moments.of(samples, valid).std_err(),
            frame=by_round(left, right, k.num_rounds),
            num_matvecs=rounds * size,
            scale=state.scale,
            magnitude=state.size / (size // 2) ** 0.5,
            valid=valid,
        )


class HutchPlusPlusBuffers(eqx.Module):
    """The orthonormal basis Q from `blocks` blocks of probes, and the projected probes of
    later blocks with their forms, in the order of the rounds. `rank` is the rank of Q,
    and `trace` is `tr(Q* A Q)`. Products with A are in units of `scale`."""

    basis: Inexact[Array, "n p"]
    projected: Inexact[Array, "n m"]
    forms: Inexact[Array, " m"]
    trace: Inexact[Array, ""]
    rank: Real[Array, ""]
    size: Real[Array, ""]  # norm of the products, for the numerical rank
    scale: Real[Array, ""]
    pilot: Inexact[Array, ""]  # sum over blocks of Hutchinson's estimates
    blocks: Int[Array, ""]
    deflating: Bool[Array, ""]


HutchPlusPlusEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: distribution of the probes. Default is [`traceax.SphereSampler`][]. Where the
    diagonal outweighs the other entries, [`traceax.RademacherSampler`][] is better.
- `improved`: whether to rescale the part of each probe outside the basis to the length
    that it has in the mean ("resphering"), as [`traceax.XTraceEstimator`][] does. The
    default, `None`, does so if the sampler is rotation invariant, which resphering needs.

**Raises:**

`TypeError` for a `sampler` that is not a [`traceax.AbstractSampler`][], and `ValueError`
for `improved=True` with one that is not rotation invariant.
"""
