"""The partition function of a spin chain: Chen and Hallman (arXiv 2205.01736).

    PYTHONPATH=benchmarks python benchmarks/published/spin_chain.py [runs of each row ...]

An open XX chain of 20 spins in a field of 0.3, n = 2**20, float64, whose partition
function `tr exp(-H / T)` is known. Its relative error, at all temperatures from the same
products, by stochastic Lanczos quadrature and by Krylov-aware deflation. Theirs are 100
stored runs in their repository, tchen-research/krylov_aware_trace, `fig_spin_data.npy`:
the 90% quantile, which their figure shows, and the mean. A run of ours takes up to
minutes, so there are few, and their mean error says little. Beside it is the mean error
implied by the spread of all samples: a mean of m samples with the standard deviation s is
off by `s sqrt(2 / (pi m))` on average.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from tables import beside, head, row

import traceax as tx


jax.config.update("jax_enable_x64", True)
SPINS, FIELD = 20, 0.3
# Those of their grid that are closest to 0.01, 0.1, 0.3, 1 and 10.
TEMPERATURES = np.logspace(-2.5, 3, 200)[[18, 54, 72, 90, 127]]
SLQ = tx.SLQEstimator(krylov=tx.Lanczos(window=0))
DEFLATED = tx.KrylovAwareEstimator()
# The products of theirs, their quantiles and means; ours: estimator, k, steps and runs.
EXPERIMENTS = (
    (
        650,
        (0.557, 0.374, 0.186, 9.21e-3, 1.73e-4),
        (0.294, 0.220, 0.0859, 4.31e-3, 9.09e-5),
        (SLQ, 13, 50, 8),
    ),
    (
        620,
        (2.24e-4, 3.69e-3, 0.0474, 0.0121, 3.56e-4),
        (1.69e-4, 2.04e-3, 0.0249, 5.43e-3, 1.66e-4),
        (DEFLATED, 16, 39, 5),
    ),
    (
        1290,
        (2.63e-6, 2.34e-4, 0.0162, 8.19e-3, 2.09e-4),
        (1.48e-6, 1.12e-4, 8.84e-3, 4.06e-3, 9.66e-5),
        (DEFLATED, 32, 40, 2),
    ),
)


def energies_of_modes():
    """The chain is one of free fermions."""
    momenta = np.arange(1, SPINS + 1) * np.pi / (SPINS + 1)
    return FIELD - 2 * np.cos(momenta)


def ground_state() -> float:
    return float(np.sum(np.minimum(energies_of_modes(), 0)) - SPINS * FIELD / 2)


def exact(temperatures):
    """`tr exp(-(H - E) / T)` with E the energy of the ground state."""
    modes = energies_of_modes() / temperatures[:, None]
    logs = SPINS * FIELD / (2 * temperatures) + np.sum(np.logaddexp(0, -modes), axis=1)
    return np.exp(logs + ground_state() / temperatures)


def hamiltonian() -> lx.AbstractLinearOperator:
    """Less the energy of the ground state, so that nothing overflows."""
    index = np.arange(2**SPINS)
    ups = sum((index >> i) & 1 for i in range(SPINS))
    diagonal = jnp.asarray(FIELD / 2 * (2 * ups - SPINS) - ground_state())

    def product(v):
        """Neighbours that differ are swapped."""
        out = diagonal * v
        for i in range(SPINS - 1):
            pairs = v.reshape(2**i, 4, -1)
            same = jnp.zeros_like(pairs[:, 0])
            swapped = jnp.stack([same, pairs[:, 2], pairs[:, 1], same], axis=1)
            out = out + swapped.reshape(-1)
        return out

    structure = jax.ShapeDtypeStruct(diagonal.shape, diagonal.dtype)
    return lx.FunctionLinearOperator(product, structure, lx.symmetric_tag)


def partition_functions(estimator, k, num_steps, operator, key):
    """At all temperatures, from the same products."""

    def one(temperature):
        function, settings = tx.Exp(-1 / temperature), {"k": k, "num_steps": num_steps}
        found = tx.trace_of_function(
            operator, function, estimator, key=key, throw=False, **settings
        )
        return found.value, found.stats["samples"], found.stats["num_matvecs"]

    return jax.vmap(one, out_axes=(0, 0, None))(jnp.asarray(TEMPERATURES))


def main(asked) -> None:
    operator, expected = hamiltonian(), exact(TEMPERATURES)
    head(
        *("products", "T", "theirs, 90%", "ours, mean"),
        *("theirs, mean", "ours, expected", "ratio"),
    )
    runs = asked or [settings[-1] for *_, settings in EXPERIMENTS]
    for (products, quantiles, means, settings), count in zip(
        EXPERIMENTS, runs, strict=True
    ):
        if count == 0:
            continue
        estimator, k, num_steps, _ = settings
        run = jax.jit(partial(partition_functions, estimator, k, num_steps, operator))
        keys = jax.random.split(jax.random.key(0), count)
        outs = zip(*(jax.device_get(run(key)) for key in keys), strict=True)
        found, samples, (spent, *_) = map(np.array, outs)
        errors = np.mean(np.abs(found / expected - 1), axis=0)
        variances = np.mean(np.var(samples, axis=-1, ddof=1), axis=0)
        likely = np.sqrt(2 / np.pi * variances / samples.shape[-1]) / expected
        label = f"{products}, ours {spent} ({count} runs)"
        for temperature, quantile, error, *pair in zip(
            TEMPERATURES, quantiles, errors, means, likely, strict=True
        ):
            plain = (f"{x:.2g}" for x in (temperature, quantile, error))
            row(label, *plain, *beside(*pair))


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]])
