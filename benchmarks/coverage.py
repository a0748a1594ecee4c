"""Coverage of 95% intervals, for every quantity.

    python benchmarks/coverage.py [keys]

`solution.interval()` against dense linear algebra in float64, for matrices of 100 rows
with eigenvalues that are flat, `i^-2` and `0.7^i` (plus one, for log-determinants and
inverses), in float32, float64 and complex128. Quantities with several entries show the
mean over entries. The exact value may miss an interval by 1e-12 of the largest entry: it
has rounding errors too, and calls that end in an exact answer have no other error. Calls
that reported a failure are left out; a number in brackets is their percentage.
"""

import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np

import traceax as tx


jax.config.update("jax_enable_x64", True)
N = 100
i = np.arange(1, N + 1)
SPECTRA = {"flat": np.linspace(3, 1, N), "i^-2": i**-2.0, "0.7^i": 0.7**i}
PSD = lx.positive_semidefinite_tag


def hermitian(eigenvalues, dtype):
    generator = np.random.default_rng(7)
    normal = generator.standard_normal((N, N))
    if np.issubdtype(dtype, np.complexfloating):
        normal = normal + 1j * generator.standard_normal((N, N))
    basis, _ = np.linalg.qr(normal)
    return ((basis * eigenvalues) @ basis.conj().T).astype(dtype)


def operator_of(matrix, tags=PSD):
    structure = jax.ShapeDtypeStruct((N,), matrix.dtype)
    return lx.FunctionLinearOperator(lambda v: matrix @ v, structure, tags)


class Row(NamedTuple):
    """A call of a matrix, a budget and a key, and what it should give."""

    call: Any
    exact: Any
    fixed: int
    adaptive: tx.Adaptive | None = None
    shift: float = 0.0


def quantity(function, estimator, **settings):
    return lambda a, k, key: function(
        operator_of(a), estimator, k=k, key=key, throw=False, **settings
    )


def of_function(function, spectral, *args, tags=PSD, **settings):
    return lambda a, k, key: function(
        operator_of(a, tags), *spectral, *args, k=k, key=key, throw=False, **settings
    )


def sum_of(fn):
    return lambda a: np.sum(fn(np.linalg.eigvalsh(a)))


def diagonal_of(fn):
    def exact(a):
        values, vectors = np.linalg.eigh(a)
        return np.real((np.abs(vectors) ** 2) @ fn(values))

    return exact


def difference(a, k, key):
    pair = operator_of(a), operator_of(a + jnp.eye(N, dtype=a.dtype) / 10)
    settings = {"k": k, "num_steps": 12, "key": key, "throw": False}
    return tx.trace_difference(*pair, tx.Log(), **settings)


def frobenius_products(a, k, key):
    pair = [operator_of(a), operator_of(a @ a)]
    return tx.frobenius_products(pair, k=k, key=key, throw=False)


def exact_products(a):
    second, third, fourth = (np.trace(np.linalg.matrix_power(a, p)) for p in (2, 3, 4))
    return np.real([[second, third], [third, fourth]])


TRACES = {
    "Hutchinson": tx.HutchinsonEstimator(),
    "Hutch++": tx.HutchPlusPlusEstimator(),
    "Nystrom++": tx.NystromPlusPlusEstimator(),
    "XTrace": tx.XTraceEstimator(),
    "XNysTrace": tx.XNysTraceEstimator(),
}
DIAGONALS = {
    "Hutchinson": tx.HutchinsonEstimator(),
    "Diag++": tx.DiagPlusPlusEstimator(),
    "XDiag": tx.XDiagEstimator(),
    "XNysDiag": tx.XNysDiagEstimator(),
    "default": tx.AutoDiagonalEstimator(),
}


def until(**tolerance):
    return tx.Adaptive(max_k=90, round_size=12, **tolerance)


# That the budget may reach.
RTOL = {"Hutchinson": 0.4}
RTOL_OF_DIAGONALS = {"Hutchinson": 1.0}
STEPS = {"num_steps": 12}
SLQ, KRYLOV = tx.SLQEstimator(), tx.KrylovAwareEstimator()


def diagonal(a):
    return np.real(np.diag(a))


ROWS = {
    f"trace, {name}": Row(
        quantity(tx.trace, each),
        lambda a: np.trace(a).real,
        30,
        until(rtol=RTOL.get(name, 0.03)),
    )
    for name, each in TRACES.items()
}
ROWS |= {
    f"diagonal, {name}": Row(
        quantity(tx.diagonal, each),
        diagonal,
        30,
        None if name == "Diag++" else until(rtol=RTOL_OF_DIAGONALS.get(name, 0.2)),
    )
    for name, each in DIAGONALS.items()
}
ROWS |= {
    "row norms": Row(
        quantity(tx.row_norms, TRACES["Hutchinson"]),
        lambda a: np.linalg.norm(a, axis=1),
        30,
        until(rtol=0.2),
    ),
    "Frobenius norm, Hutchinson": Row(
        quantity(tx.frobenius_norm, TRACES["Hutchinson"]),
        np.linalg.norm,
        30,
        until(rtol=0.2),
    ),
    "Frobenius norm, XTrace": Row(
        quantity(tx.frobenius_norm, TRACES["XTrace"]), np.linalg.norm, 40
    ),
    "products of matrices": Row(frobenius_products, exact_products, 30),
    "nuclear norm": Row(
        of_function(tx.schatten_norm, (1,), **STEPS), sum_of(np.abs), 12, until(rtol=0.3)
    ),
    "log-determinant, SLQ": Row(
        of_function(tx.logdet, (), SLQ, **STEPS),
        sum_of(np.log),
        12,
        until(rtol=0.3),
        1.0,
    ),
    "log-determinant, SLQ, steps left out": Row(
        of_function(tx.logdet, (), SLQ), sum_of(np.log), 12, until(rtol=0.3), 1.0
    ),
    "log-determinant, Krylov-aware": Row(
        of_function(tx.logdet, (), KRYLOV, **STEPS),
        sum_of(np.log),
        12,
        until(rtol=0.02),
        1.0,
    ),
    "trace of the square root": Row(
        of_function(tx.trace_of_function, (tx.Power(0.5),), SLQ, **STEPS),
        sum_of(lambda x: np.sqrt(np.maximum(x, 0))),
        12,
        until(rtol=0.3),
    ),
    "trace of the exponential, Arnoldi": Row(
        of_function(tx.trace_of_function, (tx.Exp(),), SLQ, tags=(), **STEPS),
        sum_of(np.exp),
        12,
        until(rtol=0.02),
    ),
    "log tr exp": Row(
        of_function(tx.log_trace_exp, (3.0,), **STEPS),
        lambda a: np.log(np.sum(np.exp(3 * np.linalg.eigvalsh(a)))),
        12,
        until(atol=0.1),
    ),
    "difference of log-determinants": Row(
        difference, sum_of(lambda x: np.log(x / (x + 0.1))), 12, None, 1.0
    ),
    "diagonal of the inverse": Row(
        of_function(tx.diagonal_of_function, (tx.Inverse(),), **STEPS),
        diagonal_of(lambda x: 1 / x),
        30,
        None,
        1.0,
    ),
}


def cell(row, k, dtype, keys):
    @jax.jit
    def run(matrix, exact, keys):
        def one(key):
            solution = row.call(matrix, k, key)
            low, high = solution.interval(0.95)
            rounding = 1e-12 * jnp.max(jnp.abs(exact))
            inside = (low - rounding <= exact) & (exact <= high + rounding)
            return jnp.mean(inside), solution.result == tx.RESULTS.successful

        return jax.lax.map(one, keys)

    shown = []
    for eigenvalues in SPECTRA.values():
        matrix = hermitian(eigenvalues + row.shift, dtype)
        wide = matrix.astype(np.promote_types(dtype, np.float64))
        inside, good = map(np.asarray, run(matrix, jnp.asarray(row.exact(wide)), keys))
        failed = 100 * np.mean(~good)
        text = f"{np.mean(inside[good]):.2f}" if np.any(good) else "-"
        shown.append(text + (f" ({failed:.0f})" if failed >= 0.5 else ""))
    return " / ".join(shown)


def main(num_keys: int) -> None:
    keys = jr.split(jr.key(3), num_keys)
    dtypes = np.float32, np.float64, np.complex128
    print(f"{num_keys} keys, n = {N}, eigenvalues " + " / ".join(SPECTRA) + "\n")
    print("| | budget | " + " | ".join(dtype.__name__ for dtype in dtypes) + " |")
    print("|---" * 5 + "|")
    for name, row in ROWS.items():
        for kind, k in (("fixed", row.fixed), ("adaptive", row.adaptive)):
            if k is not None:
                cells = [cell(row, k, dtype, keys) for dtype in dtypes]
                print(f"| {name} | {kind} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main(*[int(each) for each in sys.argv[1:]] or [1000])
