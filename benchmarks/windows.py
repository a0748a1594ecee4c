"""Quadrature error without full reorthogonalisation.

    python benchmarks/run.py windows

The log-determinant of a Gaussian kernel matrix of 1000 points on a line, noise 1e-3, 10
probes: the difference from 300 steps with full reorthogonalisation, for the same probes.
"""

import jax
import jax.numpy as jnp
import lineax as lx

import traceax as tx


jax.config.update("jax_enable_x64", True)
N, STEPS, WINDOWS = 1000, (20, 40, 60, 80), (None, 10, 0)


def main() -> None:
    x = jnp.sort(jax.random.uniform(jax.random.key(0), (N,)))
    kernel = jnp.exp(-0.5 * ((x[:, None] - x) / 0.05) ** 2) + 1e-3 * jnp.eye(N)
    operator = lx.MatrixLinearOperator(kernel, lx.positive_semidefinite_tag)

    def value(window, num_steps):
        estimator = tx.SLQEstimator(krylov=tx.Lanczos(window=window))
        settings = {"k": 10, "num_steps": num_steps, "key": jax.random.key(1)}
        return tx.logdet(operator, estimator, throw=False, **settings).value

    converged = value(None, 300)
    print("| `num_steps` |" + "".join(f" {s} |" for s in STEPS))
    print("|---|" + "---|" * len(STEPS))
    for window in WINDOWS:
        errors = [abs(value(window, num_steps) - converged) for num_steps in STEPS]
        cells = [f"{error:.0e}" for error in errors]
        print(f"| `window={window}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
