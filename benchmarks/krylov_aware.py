"""Krylov-aware deflation beside stochastic Lanczos quadrature.

    python benchmarks/run.py krylov_aware

Relative root-mean-square errors at the same budget: k = 20, 20 steps, n = 1000, 40 keys.
"""

import jax
import jax.numpy as jnp
import lineax as lx

import traceax as tx


jax.config.update("jax_enable_x64", True)
N, K, STEPS, KEYS = 1000, 20, 20, 40
i = jnp.arange(1.0, N + 1)
EVEN = jnp.linspace(1.0, 3.0, N)
CASES = {
    "$j^{-2}$, $e^{10x}$": (i**-2, tx.Exp(), lambda x: jnp.exp(10 * x), 10.0),
    r"$j^{-2}$, $\sqrt x$": (i**-2, tx.Power(0.5), jnp.sqrt, 1.0),
    r"$j^{-2} + 10^{-3}$, $\log x$": (i**-2 + 1e-3, tx.Log(), jnp.log, 1.0),
    "1 to 3 evenly, $e^{10x}$": (EVEN, tx.Exp(), lambda x: jnp.exp(10 * x), 10.0),
    r"1 to 3 evenly, $\log x$": (EVEN, tx.Log(), jnp.log, 1.0),
}


def error(estimator, eigenvalues, function, reference, scale):
    """Probes on a sphere do not see eigenvectors, so the matrix is diagonal."""
    operator = lx.FunctionLinearOperator(
        lambda v: scale * eigenvalues * v,
        jax.ShapeDtypeStruct((N,), jnp.float64),
        lx.positive_semidefinite_tag,
    )
    settings = {"k": K, "num_steps": STEPS}

    def one(key):
        return tx.trace_of_function(
            operator, function, estimator, key=key, **settings
        ).value

    keys = jax.random.split(jax.random.key(0), KEYS)
    exact = jnp.sum(reference(eigenvalues))
    values = jax.jit(lambda keys: jax.lax.map(one, keys))(keys)
    return jnp.sqrt(jnp.mean((values / exact - 1) ** 2))


def main() -> None:
    sphere = tx.SphereSampler()
    estimators = tx.SLQEstimator(sphere), tx.KrylovAwareEstimator(sphere)
    print("| eigenvalues, $f$ | SLQ | Krylov-aware |\n|---|---|---|")
    for name, case in CASES.items():
        cells = [f"{error(estimator, *case):.1e}" for estimator in estimators]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
