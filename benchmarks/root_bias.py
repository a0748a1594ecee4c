"""Bias of gradients of norms and logarithms.

    python benchmarks/run.py root_bias

Relative to the gradient, from 20,000 keys; the number after "+-" is the standard error of
the bias. The gradient of a row norm is in the scale of the row, or in a small entry
beside a large one; of a Frobenius norm and of `log_trace_exp` it is in the scale.
"""

import jax
import jax.random as jr
import lineax as lx
import numpy as np

import traceax as tx


jax.config.update("jax_enable_x64", True)
N, KEYS, BUDGETS = 50, 20_000, (6, 10, 20, 40)
INDICES = np.arange(1, N + 1)
RNG = np.random.default_rng(0)
NORMAL = RNG.standard_normal((N, N))
BASIS = np.linalg.qr(NORMAL)[0]
DECAYING = (BASIS * INDICES**-2.0) @ BASIS.T
ENERGIES = np.append(np.linspace(0, 2, N - 1), 6)
HAMILTONIAN = (BASIS * ENERGIES) @ BASIS.T


def row_norm(matrix, k, key):
    return tx.row_norms(lx.MatrixLinearOperator(matrix), k=k, key=key).value[0]


def frobenius_norm(matrix, k, key):
    return tx.frobenius_norm(lx.MatrixLinearOperator(matrix), k=k, key=key).value


def beside(large):
    """A row with a large entry and three ones, and the direction of one of these."""
    row = np.zeros((N, N))
    row[0, :4] = large, 1, 1, 1
    return row, np.zeros((N, N)) + (row == 1) * (np.arange(N) == 1)


def log_trace_exp(matrix, k, key, scale):
    operator = lx.MatrixLinearOperator(matrix, lx.symmetric_tag)
    return tx.log_trace_exp(operator, scale, k=k, num_steps=15, key=key).value


def along(call, matrix, direction):
    def slope(k, key):
        moved = lambda t: call(matrix + t * direction, k, key)  # noqa: E731
        return jax.grad(moved)(0.0)

    return slope


def in_scale(k, key):
    value = lambda scale: log_trace_exp(HAMILTONIAN, k, key, scale)  # noqa: E731
    return jax.grad(value)(1.0)


WEIGHTS = np.exp(ENERGIES) / np.sum(np.exp(ENERGIES))
CASES = {
    "`row_norms`, in the scale": (
        along(row_norm, NORMAL, NORMAL),
        np.linalg.norm(NORMAL[0]),
    ),
    "`row_norms`, in an entry beside one 3 times as large": (
        along(row_norm, *beside(3)),
        12**-0.5,
    ),
    "`row_norms`, beside one 10 times as large": (
        along(row_norm, *beside(10)),
        103**-0.5,
    ),
    "`frobenius_norm`, normal": (
        along(frobenius_norm, NORMAL, NORMAL),
        np.linalg.norm(NORMAL),
    ),
    "`frobenius_norm`, singular values $i^{-2}$": (
        along(frobenius_norm, DECAYING, DECAYING),
        np.linalg.norm(DECAYING),
    ),
    "`log_trace_exp`, one large eigenvalue": (in_scale, np.sum(WEIGHTS * ENERGIES)),
}


def main() -> None:
    keys = jr.split(jr.key(0), KEYS)
    print("| k |" + "".join(f" {k} |" for k in BUDGETS))
    print("|---|" + "---|" * len(BUDGETS))
    for name, (slope, exact) in CASES.items():
        cells = []
        for k in BUDGETS:

            @jax.jit
            def slopes(keys, k=k, slope=slope):
                return jax.lax.map(lambda key: slope(k, key), keys, batch_size=100)

            found = np.asarray(slopes(keys)) / exact - 1
            spread = np.std(found) / KEYS**0.5
            cells.append(f"{100 * np.mean(found):.1f}% +- {100 * spread:.1f}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
