"""The partition function of an Ising ring: Camano, Epperly, Meyer and Tropp, figure 10.

    PYTHONPATH=benchmarks python benchmarks/published/ising_ring.py [runs]

arXiv 2508.21189: a ring of 16 spins in a transverse field h = 10, n = 65,536, float64,
`tr exp(-b (H + (1 + h) 16))`. Theirs are the medians of 30 stored runs of XNysTrace in
their repository, chriscamano/OSI-and-Structured-Random-Matrices,
`trace_data_multiple_beta.mat`, with k probes that are Kronecker products of vectors for
the single spins. They multiply by the exponential with the Taylor method of Al-Mohy and
Higham, whose products with H were counted by their rule with a random vector. Ours is the
median of the relative errors of XNysTrace on `tx.function_of`, with the same k and
unstructured probes, and of Krylov-aware deflation, which needs no products with the
exponential, with the steps below.
"""

import sys

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from tables import beside, head, row

import traceax as tx


jax.config.update("jax_enable_x64", True)
SPINS, FIELD = 16, 10.0
SHIFT = (1 + FIELD) * SPINS
# By b: products with H for one with the exponential, and errors by k.
THEIRS = {
    0.5: (402, {10: 4.3e-4, 20: 8.0e-6, 40: 7.6e-7, 80: 1.9e-7}),
    0.75: (614, {10: 3.0e-6, 20: 1.1e-9, 40: 5.6e-11, 80: 1.4e-11}),
    1.0: (807, {10: 2.0e-8, 20: 1.3e-10, 40: 8.0e-13, 80: 1.5e-13}),
}
# Lanczos steps for a product with the exponential, the largest k for which ours makes
# such products, and k and steps of Krylov-aware runs.
STEPS, MOST = 56, 40
DEFLATED = ((8, 40), (16, 40), (16, 80))


def energies():
    """All eigenvalues of H, by free fermions: an even number of them for antiperiodic
    momenta, and an odd number for periodic ones."""
    bits = (np.arange(2**SPINS)[:, None] >> np.arange(SPINS)) & 1
    odd = np.sum(bits, axis=1) % 2 == 1

    def of_sector(momenta, chosen, signs):
        modes = 2 * np.sqrt(1 + FIELD**2 + 2 * FIELD * np.cos(momenta)) * signs
        return chosen @ modes - np.sum(modes) / 2

    whole = np.arange(SPINS) - SPINS // 2
    # The modes of momentum -pi and 0, whose pairs are themselves.
    signs = np.where((whole == 0) | (whole == -SPINS // 2), -1, 1)
    even = of_sector((2 * whole + 1) * np.pi / SPINS, bits[~odd], 1)
    return np.append(even, of_sector(2 * np.pi * whole / SPINS, bits[odd], signs))


def hamiltonian() -> lx.AbstractLinearOperator:
    """`H + (1 + h) L`, with H the sum over the ring of `-Z_i Z_(i+1) - h X_i`."""
    spins = 1 - 2 * ((np.arange(2**SPINS)[:, None] >> np.arange(SPINS)) & 1)
    couplings = np.sum(spins * np.roll(spins, 1, axis=1), axis=1)
    diagonal = jnp.asarray(SHIFT - couplings, float)

    def product(v):
        flips = sum(
            jnp.flip(v.reshape(2**i, 2, -1), axis=1).reshape(-1) for i in range(SPINS)
        )
        return diagonal * v - FIELD * flips

    structure = jax.ShapeDtypeStruct(diagonal.shape, diagonal.dtype)
    return lx.FunctionLinearOperator(product, structure, lx.positive_semidefinite_tag)


def errors(estimate, b, exact, runs):
    """Median relative error, and products with H or with the exponential."""
    keys = jax.random.split(jax.random.key(0), runs)
    compiled = jax.jit(estimate)
    values, products = np.array([compiled(b, key) for key in keys]).T
    return np.median(np.abs(values / exact - 1)), int(products[0])


def main(runs: int) -> None:
    operator, levels = hamiltonian(), energies() + SHIFT

    def xnystrace(k):
        def estimate(b, key):
            exponential = tx.function_of(operator, tx.Exp(-b), num_steps=STEPS)
            found = tx.trace(exponential, tx.XNysTraceEstimator(), k=k, key=key)
            return found.value, found.matvecs

        return estimate

    def deflated(k, steps):
        def estimate(b, key):
            found = tx.trace_of_function(
                operator,
                tx.Exp(-b),
                tx.KrylovAwareEstimator(),
                k=k,
                num_steps=steps,
                key=key,
                throw=False,
            )
            return found.value, found.matvecs

        return estimate

    print(f"Medians of {runs} runs.\n")
    head(
        *("b", "k", "products with H: theirs", "ours"),
        *("error: theirs", "ours", "ratio", "products with H, Krylov-aware", "error"),
    )
    for b, (each, published) in THEIRS.items():
        exact = np.sum(np.exp(-b * levels))
        others = [errors(deflated(*sizes), b, exact, runs) for sizes in DEFLATED]
        for i, (k, theirs) in enumerate(published.items()):
            spent, pair = "-", (f"{theirs:.1e}", "-", "-")
            if k <= MOST:
                ours, products = errors(xnystrace(k), b, exact, runs)
                spent, pair = str(products * STEPS), beside(theirs, ours, ".1e")
            last = "-", "-"
            if i < len(others):
                last = str(others[i][1]), f"{others[i][0]:.1e}"
            row(f"{b:g}", str(k), str(each * k), spent, *pair, *last)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
