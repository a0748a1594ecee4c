"""Error of Frobenius and row norms of nonsymmetric matrices.

    python benchmarks/run.py norms

Relative root-mean-square errors, of the norm and of single rows: n = 400, 200 keys.
"""

import jax
import jax.numpy as jnp
import lineax as lx

import traceax as tx


jax.config.update("jax_enable_x64", True)
N, KEYS, BUDGETS = 400, 200, (20, 60)
CALLS = {
    "norm: Hutchinson": (tx.frobenius_norm, tx.HutchinsonEstimator()),
    "XTrace": (tx.frobenius_norm, tx.XTraceEstimator()),
    "XNysTrace": (tx.frobenius_norm, tx.XNysTraceEstimator()),
    "rows: Hutchinson": (tx.row_norms, tx.HutchinsonEstimator()),
    "XDiag": (tx.row_norms, tx.XDiagEstimator()),
    "XNysDiag": (tx.row_norms, tx.XNysDiagEstimator()),
}


def singular_values() -> dict[str, jax.Array]:
    i = jnp.arange(1.0, N + 1)
    return {
        "1 to 3, evenly": jnp.linspace(3.0, 1.0, N),
        "$i^{-1}$": 1 / i,
        "$i^{-2}$": i**-2,
        "$0.7^{i-1}$": 0.7 ** (i - 1),
    }


def matrix_with(values: jax.Array) -> jax.Array:
    keys = jax.random.split(jax.random.key(7))
    left, right = (jnp.linalg.qr(jax.random.normal(key, (N, N)))[0] for key in keys)
    return (left * values) @ right


def errors(call, estimator, k):
    def one(matrix, key):
        structure = jax.ShapeDtypeStruct((N,), matrix.dtype)
        operator = lx.FunctionLinearOperator(lambda v: matrix @ v, structure)
        return call(operator, estimator, k=k, key=key, throw=False).value

    @jax.jit
    def run(matrix, keys):
        found = jax.lax.map(lambda key: one(matrix, key), keys)
        exact = jnp.linalg.norm(matrix, axis=1 if found.ndim > 1 else None)
        return jnp.sqrt(jnp.mean((found / exact - 1) ** 2))

    return run


def main() -> None:
    keys = jax.random.split(jax.random.key(3), KEYS)
    matrices = {name: matrix_with(each) for name, each in singular_values().items()}
    rows = {(name, k): [] for name in matrices for k in BUDGETS}
    for call, estimator in CALLS.values():
        for k in BUDGETS:
            run = errors(call, estimator, k)
            for name, matrix in matrices.items():
                rows[name, k].append(f"{run(matrix, keys):.1e}")
    print("| singular values, products | " + " | ".join(CALLS) + " |")
    print("|---" * (1 + len(CALLS)) + "|")
    for (name, k), cells in rows.items():
        print(f"| {name}, {k} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
