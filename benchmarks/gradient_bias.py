"""Bias of the gradient of a log-determinant, by number of steps.

    python benchmarks/gradient_bias.py

Relative bias of the derivatives in the length scale and the noise, and of the value, for
an RBF kernel matrix of size 1000. The same probes run at each depth and at one where
Lanczos has converged, so that sampling errors cancel; their remainder follows the "+-".
"""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx

import traceax as tx


jax.config.update("jax_enable_x64", True)
N, KEYS, PROBES, CONVERGED = 1000, 20, 10, 300


def kernel(theta, x):
    square = jnp.sum((x[:, None] - x) ** 2, axis=-1)
    return jnp.exp(-square / (2 * theta[0] ** 2)) + theta[1] * jnp.eye(N)


def main():
    x = jr.uniform(jr.key(0), (N, 2))
    keys = jr.split(jr.key(1), KEYS)
    print("| noise | preconditioner | steps | value | length scale | noise | residual |")
    print("|---|---|---|---|---|---|---|")
    for noise in (1e-2, 1e-4):
        theta = jnp.array([0.2, noise])
        exact = jax.value_and_grad(lambda t: jnp.linalg.slogdet(kernel(t, x))[1])(theta)
        exact = jnp.append(*exact)

        def run(num_steps, rank, theta=theta):
            def value(theta, key):
                operator = lx.MatrixLinearOperator(
                    kernel(theta, x), lx.positive_semidefinite_tag
                )
                preconditioner = None
                if rank:
                    preconditioner = tx.nystrom_preconditioner(
                        operator, rank, key=jr.fold_in(key, 1), shift=theta[1]
                    )
                solution = tx.logdet(
                    operator,
                    k=PROBES,
                    num_steps=num_steps,
                    key=key,
                    preconditioner=preconditioner,
                )
                return solution.value, solution.stats["gradient_residual"]

            def one(key):
                both = jax.value_and_grad(value, has_aux=True)(theta, key)
                (found, residual), slopes = both
                return jnp.append(found, slopes), jnp.max(residual)

            return jax.jit(lambda keys: jax.lax.map(one, keys))(keys)

        for rank, depths in ((0, (10, 20, 40, 80, 160)), (40, (5, 10, 20, 40))):
            converged, _ = run(CONVERGED, rank)
            for num_steps in depths:
                found, residual = run(num_steps, rank)
                bias = (found - converged) / jnp.abs(exact)
                mean, spread = jnp.mean(bias, axis=0), jnp.std(bias, axis=0) / KEYS**0.5
                cells = [
                    f"{m:+.1e} +- {s:.0e}" for m, s in zip(mean, spread, strict=True)
                ]
                name = f"Nystrom, rank {rank}" if rank else "none"
                row = [f"{noise:.0e}", name, str(num_steps), *cells]
                print(f"| {' | '.join(row)} | {jnp.max(residual):.0e} |", flush=True)


if __name__ == "__main__":
    main()
