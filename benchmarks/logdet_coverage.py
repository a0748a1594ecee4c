"""Coverage of log-determinants by error bar and bracket.

    python benchmarks/logdet_coverage.py

How often the exact value is within three standard errors and the bracket, over 200 keys:
kernels, Laplacians and random matrices of size 2000, real and complex, in float64 and
float32, each with 10 probes at a depth that is too small and at one that is not.
Errors, error bars and brackets are means. `flagged` is the share of keys whose result is
a failure: where the smallest eigenvalue is near the rounding errors of products, a call
cannot know that it is positive.
"""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx

import traceax as tx


jax.config.update("jax_enable_x64", True)
N, KEYS, PROBES = 2000, 200, 10


def rbf(noise, dtype):
    x = jr.uniform(jr.key(0), (N, 2))
    square = jnp.sum((x[:, None] - x) ** 2, axis=-1)
    return (jnp.exp(-square / (2 * 0.2**2)) + noise * jnp.eye(N)).astype(dtype)


def laplacian(side=45):
    line = 2 * jnp.eye(side) - jnp.eye(side, k=1) - jnp.eye(side, k=-1)
    return jnp.kron(line, jnp.eye(side)) + jnp.kron(jnp.eye(side), line)


def random(condition, dtype):
    basis, _ = jnp.linalg.qr(jr.normal(jr.key(1), (N, N), dtype))
    matrix = (basis * jnp.geomspace(1, condition, N)) @ basis.conj().T
    return (matrix + matrix.conj().T) / 2


def main():
    problems = {
        "RBF, noise 1e-2": rbf(1e-2, jnp.float64),
        "RBF, noise 1e-4": rbf(1e-4, jnp.float64),
        "RBF, noise 1e-2, float32": rbf(1e-2, jnp.float32),
        "RBF, noise 1e-4, float32": rbf(1e-4, jnp.float32),
        "2D Laplacian, 45 x 45": laplacian(),
        "random, condition 1e2": random(1e2, jnp.float64),
        "random, condition 1e4": random(1e4, jnp.float64),
        "random, condition 1e8": random(1e8, jnp.float64),
        "complex, condition 1e4": random(1e4, jnp.complex128),
    }
    print("| problem | steps | error | error bar | bracket | coverage | flagged |")
    print("|---|---|---|---|---|---|---|")
    for name, matrix in problems.items():
        wide = matrix.astype(jnp.promote_types(matrix.dtype, jnp.float64))
        factor = jnp.linalg.cholesky(wide)
        exact = 2 * jnp.sum(jnp.log(jnp.diagonal(factor).real))
        for num_steps in (20, 60):

            def run(key, num_steps=num_steps, matrix=matrix):
                operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
                settings = {"k": PROBES, "num_steps": num_steps, "throw": False}
                solution = tx.logdet(operator, key=key, **settings)
                found = solution.value, solution.std_err, solution.stats["bracket"]
                return *found, ~solution.successful

            keys = jr.split(jr.key(2), KEYS)
            found = jax.jit(lambda keys, run=run: jax.lax.map(run, keys))(keys)
            value, std_err, bracket, flagged = found
            low, high = bracket[:, 0] - 3 * std_err, bracket[:, 1] + 3 * std_err
            covered = jnp.mean((low <= exact) & (exact <= high))
            size = jnp.abs(exact)
            error = jnp.mean(jnp.abs(value - exact)) / size
            width = jnp.mean(bracket[:, 1] - bracket[:, 0]) / size
            print(
                f"| {name} | {num_steps} | {error:.1e} | {jnp.mean(std_err) / size:.1e} "
                f"| {width:.1e} | {covered:.3f} | {jnp.mean(flagged):.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
