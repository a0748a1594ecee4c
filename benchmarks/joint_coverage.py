"""Coverage of intervals of ratios, controls, solves and random steps.

    python benchmarks/run.py joint_coverage

The share of 95% intervals that cover the exact number: of functions of several estimates,
estimates with a control, traces of solves, and traces with a random number of steps. In
brackets the root mean square of the standard error over the root-mean-square error, and
the percentage of keys whose call was flagged, which are left out.
"""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

import traceax as tx


jax.config.update("jax_enable_x64", True)
N, PSD = 100, lx.positive_semidefinite_tag
GENERATOR = np.random.default_rng(0)


def matrix_of(eigenvalues):
    basis, _ = np.linalg.qr(GENERATOR.standard_normal((len(eigenvalues),) * 2))
    return (basis * eigenvalues) @ basis.T


EIGENVALUES = np.linspace(0.2, 4, N)
A = matrix_of(EIGENVALUES)
B = matrix_of(1 / np.arange(1, N + 1))
NEAR = A + 0.1 * matrix_of(np.linspace(-1, 1, N))


def operator(matrix):
    return lx.MatrixLinearOperator(jnp.asarray(matrix), PSD)


def by_products(matrix):
    """Without a diagonal that is known."""
    structure, matrix = jax.ShapeDtypeStruct((N,), float), jnp.asarray(matrix)
    return lx.FunctionLinearOperator(lambda v: matrix @ v, structure, PSD)


def on_leaves(matrix):
    """The matrix as an operator on two leaves."""
    blocks = {
        i: {
            j: jnp.asarray(matrix[i * 50 : i * 50 + 50, j * 50 : j * 50 + 50])
            for j in (0, 1)
        }
        for i in (0, 1)
    }
    structure = {i: jax.ShapeDtypeStruct((50,), float) for i in (0, 1)}
    return lx.PyTreeLinearOperator(blocks, structure, PSD)


def share(traces):
    return traces[0] / (traces[0] + traces[1])


def first_over_second(values):
    return values[0] / values[1]


def of_minibatches(k, key):
    """The Gauss-Newton matrix of ten batches of eight examples."""
    examples, probes = jax.random.split(key)
    batches = jax.random.normal(examples, (10, 8, N))
    model, loss = lambda w, x: x @ w, lambda z, _: jnp.mean(z**2) / 2
    operator = tx.ggn(model, loss, jnp.zeros(N), batches)
    return tx.minibatch_trace(operator, k=k, key=probes, throw=False)


def leaf_traces(estimator, k, key):
    return tx.leaf_traces(on_leaves(A), estimator, k=k, key=key, throw=False)


HALVES = {i: np.trace(A[i * 50 : i * 50 + 50, i * 50 : i * 50 + 50]) for i in (0, 1)}
INVERSE = np.linalg.inv(A)
INFORMATION = np.trace(INVERSE @ B @ INVERSE @ B)
ENERGY = np.sum(EIGENVALUES * np.exp(-EIGENVALUES)) / np.sum(np.exp(-EIGENVALUES))
FUNCTIONS = [lambda x: x * jnp.exp(-x), tx.Exp(-1.0)]
CG = lx.CG(1e-4, 1e-4)
# What is estimated, its exact value, and numbers of probes or samples.
ROWS = {
    "share of a leaf trace, Hutchinson": (
        lambda k, key: leaf_traces(tx.HutchinsonEstimator(), k, key).transform(share),
        share(HALVES),
        (5, 10, 40),
    ),
    "share of a leaf trace, XTrace": (
        lambda k, key: leaf_traces(tx.XTraceEstimator(), k, key).transform(share),
        share(HALVES),
        (10, 20, 40),
    ),
    "tr(B A) / tr A": (
        lambda k, key: tx.estimate(
            operator(A),
            [tx.TraceOfProduct(jnp.asarray(B)), tx.Trace()],
            tx.HutchinsonEstimator(),
            k=k,
            key=key,
            throw=False,
        ).transform(first_over_second),
        np.trace(B @ A) / np.trace(A),
        (5, 10, 40),
    ),
    "tr(A exp(-A)) / tr exp(-A)": (
        lambda k, key: tx.trace_of_function(
            operator(A), FUNCTIONS, k=k, num_steps=20, key=key, throw=False
        ).transform(first_over_second),
        ENERGY,
        (5, 10, 40),
    ),
    "trace, with a control": (
        lambda k, key: tx.trace(
            by_products(A),
            k=k,
            key=key,
            control=(by_products(NEAR), np.trace(NEAR)),
            throw=False,
        ),
        np.trace(A),
        (5, 10, 40),
    ),
    "entries of a diagonal, with a control": (
        lambda k, key: tx.diagonal(
            by_products(A),
            k=k,
            key=key,
            control=(by_products(NEAR), np.diag(NEAR)),
            throw=False,
        ),
        np.diag(A),
        (5, 10, 40),
    ),
    "trace for all data, from minibatches": (of_minibatches, float(N), (5, 10, 40)),
    "log-determinant, with a control": (
        lambda k, key: tx.logdet(
            operator(A),
            k=k,
            num_steps=20,
            key=key,
            control=(operator(NEAR), np.linalg.slogdet(NEAR)[1]),
            throw=False,
        ),
        np.linalg.slogdet(A)[1],
        (5, 10, 40),
    ),
    "log-determinant, a random number of steps": (
        lambda k, key: tx.logdet(
            operator(A), k=k, num_steps=tx.RandomSteps(5), key=key, throw=False
        ),
        np.linalg.slogdet(A)[1],
        (5, 10, 40),
    ),
    "tr(A^-1 B)": (
        lambda k, key: tx.trace_of_solves(
            operator(A), (jnp.asarray(B),), CG, k=k, key=key, throw=False
        ),
        np.trace(INVERSE @ B),
        (5, 10, 40),
    ),
    "1 / tr(A^-1 B A^-1 B)": (
        lambda k, key: tx.trace_of_solves(
            operator(A), (jnp.asarray(B),) * 2, CG, k=k, key=key, throw=False
        ).transform(lambda t: 1 / t),
        1 / INFORMATION,
        (5, 10, 40),
    ),
}


@eqx.filter_jit
def measure(call, exact, k, keys):
    def one(key):
        solution = call(k, key)
        low, high = solution.interval()
        covers = jnp.mean((low <= exact + 1e-12) & (exact - 1e-12 <= high))
        squares = jnp.mean(solution.std_err**2), jnp.mean((solution.value - exact) ** 2)
        return covers, *squares, solution.successful

    return jax.lax.map(one, keys, batch_size=20)


def main(num_keys: int) -> None:
    keys = jax.random.split(jax.random.key(7), num_keys)
    print(f"\n{num_keys} keys, matrices of {N} rows:\n")
    print("| | few | more | many |\n|---|---|---|---|")
    for name, (call, exact, numbers) in ROWS.items():
        cells = []
        for k in numbers:
            covers, bar, error, successful = map(
                np.asarray, measure(call, jnp.asarray(exact), k, keys)
            )
            held, bar, error = (x[successful] for x in (covers, bar, error))
            ratio = np.sqrt(np.mean(bar) / np.mean(error))
            flagged = 100 * np.mean(~successful)
            cells.append(f"k = {k}: {np.mean(held):.2f} ({ratio:.2f}, {flagged:.0f}%)")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
