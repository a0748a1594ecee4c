"""Spread of a log-determinant's derivative by the columns of its frame.

    python benchmarks/run.py columns

Relative standard deviation over 300 keys of one probe's derivative in the length scale,
for kernel matrices of 500 random points plus noise, in float64.
"""

import jax
import jax.numpy as jnp
import lineax as lx

import traceax as tx


jax.config.update("jax_enable_x64", True)
N, COLUMNS = 500, (1, 2, 3, 4, 6)
KEYS = jax.random.split(jax.random.key(1), 300)
# Dimension, length scale, noise and steps.
CASES = (3, 0.3, 0.05, 30), (2, 0.2, 1e-3, 60), (2, 0.1, 0.1, 40), (2, 0.2, 1e-5, 80)


def spread(dimension, length, noise, num_steps, columns):
    x = jax.random.uniform(jax.random.key(0), (N, dimension))
    square = jnp.sum((x[:, None] - x) ** 2, axis=-1)
    gradient = tx.LanczosGradient(columns=columns)

    def logdet(length, key):
        kernel = jnp.exp(-square / (2 * length**2)) + noise * jnp.eye(N)
        operator = lx.MatrixLinearOperator(kernel, lx.positive_semidefinite_tag)
        settings = {"k": 1, "num_steps": num_steps, "gradient": gradient, "key": key}
        return tx.logdet(operator, throw=False, **settings).value

    one = lambda key: jax.grad(logdet)(length, key)  # noqa: E731
    found = jax.jit(lambda keys: jax.lax.map(one, keys))(KEYS)
    return jnp.std(found) / abs(jnp.mean(found))


def main() -> None:
    print("| dimension, length, noise, steps | $r = 1$ |", end="")
    print("".join(f" {r} |" for r in COLUMNS[1:]))
    print("|---" * (1 + len(COLUMNS)) + "|")
    for case in CASES:
        cells = [f"{spread(*case, columns):.3f}" for columns in COLUMNS]
        print(f"| {', '.join(map(str, case))} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
