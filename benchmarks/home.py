"""Matvecs to an error of 1%, by quantity: ours and the best of the other packages.

    python benchmarks/run.py home

Each package is told how many matvecs to make. The number shown is the smallest, of a
series in which each is about 1.4 times the one before, with which 95% of 40 keys have an
error of at most 1%: for the best of its estimators, and for matfree the best of 5, 10, 20
and 40 Lanczos steps. To choose it one must know the answer. So the other columns are of
our call with nothing but the operator and a key, which stops by itself: the mean number
of matvecs, how many of 40 keys have an error of at most 1%, and how many 95% intervals
cover the answer (of diagonals: of their entries). Seconds are of the best other call and
of ours that stops by itself. In the log-determinant linear_operator and ours, where told,
know the noise. Errors of diagonals are those of the two-norm. n = 1000, float64.
"""

import dataclasses
import importlib
import time
from collections.abc import Callable
from functools import partial
from operator import mul

import diagonals
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import torch
from accuracy import by_jax, by_torch
from matfree import decomp, funm, stochtrace
from peers import peer_functions
from spectra import matrix_with, operator_of, spectra
from tables import head, row
from torch_peers import torch_functions

import traceax as tx


jax.config.update("jax_enable_x64", True)
N, MOST, KEYS, TOLERANCE, CONFIDENCE, NOISE = 1000, 4000, 40, 0.01, 0.95, 1e-2
BUDGETS = [m * 2**i for i in range(1, 9) for m in (2, 3)]
STEPS = 5, 10, 20, 40
PSD = lx.positive_semidefinite_tag


@dataclasses.dataclass
class Peer:
    """An estimator of another package: `make(k)` is a function of the matrix and several
    keys, to the values or to a pair of values and error bars, which takes `cost(k)`
    matvecs for each key."""

    make: Callable[[int], Callable]
    cost: Callable[[int], float] = float


@dataclasses.dataclass
class Problem:
    name: str
    matrix: jax.Array
    exact: np.ndarray | float
    ours: Callable[..., tx.Solution]
    told: dict[str, Peer]
    peers: dict[str, Peer]
    tags: tuple = (PSD,)


def our_traces(tags) -> dict[str, Peer]:
    def make(estimator, k):
        return of_calls(partial(tx.trace, estimator=estimator, k=k), tags)

    semidefinite = tx.XNysTraceEstimator, tx.NystromPlusPlusEstimator
    general = tx.HutchinsonEstimator, tx.HutchPlusPlusEstimator, tx.XTraceEstimator
    estimators = [each() for each in (*general, *(semidefinite if tags else ()))]
    return {type(each).__name__: Peer(partial(make, each)) for each in estimators}


def our_functions(call) -> dict[str, Peer]:
    def make(k):
        return of_calls(partial(call, k=tx.Matvecs(max(k, 8))), (PSD,))

    return {"traceax": Peer(make, partial(max, 8))}


def of_calls(call, tags):
    def run(matrix, key):
        solution = call(operator_of(matrix, *tags), key=key, throw=False)
        return solution.value, solution.std_err

    return by_jax(run)


def of_traces(tags) -> dict[str, Peer]:
    def make(package, name, k):
        if package not in jax_packages(k):
            return by_torch(torch_functions(k)[package][name])
        return by_jax(jax_packages(k)[package][name])

    def jax_packages(k):
        def tagged(matrix):
            return operator_of(matrix, *tags)

        return {"matfree": peer_functions(tagged, product, N, k, jnp.float64)["matfree"]}

    def product(vector, matrix):
        return matrix @ vector

    packages = jax_packages(12) | torch_functions(12)
    return {
        f"{package} {name}": Peer(partial(make, package, name))
        for package, names in packages.items()
        for name in names
        if tags or name != "XNysTrace"
    }


def of_diagonals() -> tuple[dict[str, Peer], dict[str, Peer]]:
    """Ours, and those of the others."""

    def make(name, k):
        return diagonals.functions(k)[name]

    found = {name: Peer(partial(make, name)) for name in diagonals.functions(12)}
    ours = {name: peer for name, peer in found.items() if name.startswith("traceax")}
    return ours, {name: peer for name, peer in found.items() if name not in ours}


def matfree(integrand, k: int):
    estimate = stochtrace.estimator_monte_carlo(
        integrand, stochtrace.sampler_signs(jnp.ones(N), num=k)
    )
    return by_jax(lambda matrix, key: (estimate(lambda v: matrix @ v, key), 0.0))


def of_functions(function) -> dict[str, Peer]:
    dense = funm.dense_funm_sym_eigh(function)

    def make(steps, k):
        krylov = decomp.tridiag_sym(steps, reortho="full")
        return matfree(funm.monte_carlo_funm_sym(dense, krylov), k)

    return {f"matfree, {m} steps": Peer(partial(make, m), partial(mul, m)) for m in STEPS}


def of_preconditioned_logdets() -> dict[str, Peer]:
    """By linear_operator, which is told the noise. Its pivoted Cholesky factor reads
    `rank` rows of the matrix, which count as matvecs."""
    lo = importlib.import_module("linear_operator")
    columns = []

    class Counted(lo.operators.DenseLinearOperator):
        def _matmul(self, rhs):
            columns.append(rhs.shape[-1] if rhs.ndim > 1 else 1)
            return super()._matmul(rhs)

    noise = lo.operators.DiagLinearOperator(torch.full((N,), NOISE, dtype=torch.float64))

    def make(rank, k):
        columns.clear()

        def run(matrix, keys):
            kernel = torch.from_numpy(np.array(matrix) - NOISE * np.eye(N))
            values = []
            for seed in range(len(keys)):
                torch.manual_seed(seed)
                operator = lo.operators.AddedDiagLinearOperator(Counted(kernel), noise)
                with (
                    lo.settings.max_preconditioner_size(rank),
                    lo.settings.min_preconditioning_size(1),
                    lo.settings.max_cholesky_size(1),
                    lo.settings.num_trace_samples(k),
                ):
                    values.append(operator.logdet().item())
            return np.array(values)

        return run

    def cost(rank, k):
        return rank + sum(columns) / KEYS  # of the last call

    return {
        f"linear_operator, rank {r}": Peer(partial(make, r), partial(cost, r))
        for r in (15, 100)
    }


def problems():
    found = spectra(N)
    matrices = {name: matrix_with(found[name]) for name in ("flat", "poly", "i^-1/2")}
    for name, label in (("flat", "flat"), ("i^-1/2", "slow decay"), ("poly", "decay")):
        exact, packages = float(jnp.sum(found[name])), (our_traces, of_traces)
        told, peers = (each((PSD,)) for each in packages)
        yield Problem(f"trace, {label}", matrices[name], exact, tx.trace, told, peers)
    indefinite = matrix_with(jnp.linspace(-1.0, 2.0, N))
    exact, calls = float(jnp.trace(indefinite)), (tx.trace, our_traces(()), of_traces(()))
    yield Problem("trace, indefinite", indefinite, exact, *calls, ())
    matrix = matrices["poly"]
    exact = np.diag(matrix)
    yield Problem("diagonal, decay", matrix, exact, tx.diagonal, *of_diagonals())

    points = jr.uniform(jr.key(0), (N, 2))
    square = jnp.sum((points[:, None] - points) ** 2, axis=-1)
    kernel = jnp.exp(-square / (2 * 0.2**2)) + NOISE * jnp.eye(N)
    values = np.linalg.eigvalsh(kernel)
    logs = of_functions(jnp.log) | of_preconditioned_logdets()
    exact = float(np.sum(np.log(values)))
    call = partial(tx.logdet, preconditioner=tx.AutoPreconditioner(shift=NOISE))
    told = our_functions(call)
    yield Problem("log-determinant, kernel", kernel, exact, tx.logdet, told, logs)
    inverse = partial(tx.trace_of_function, function=tx.Inverse())
    exact, peers = float(np.sum(1 / values)), of_functions(lambda x: 1 / x)
    told = our_functions(inverse)
    yield Problem("trace of inverse, kernel", kernel, exact, inverse, told, peers)


def share_within(values, exact) -> float:
    axes = tuple(range(1, np.ndim(values)))
    errors = np.sqrt(np.sum((values - exact) ** 2, axis=axes))
    return np.mean(errors <= TOLERANCE * np.linalg.norm(exact))


def is_good(run, problem: Problem, keys) -> bool:
    found = run(problem.matrix, keys)
    values = np.asarray(found[0] if isinstance(found, tuple) else found)
    return share_within(values, problem.exact) >= CONFIDENCE


def fewest(
    peers: dict[str, Peer], problem: Problem, keys
) -> tuple[str, str, Callable | None]:
    """Matvecs, name and function of the best of these, if one is good with fewer than
    `MOST`, by bisection in the budgets of each."""
    best = MOST, "none", None
    for name, peer in peers.items():
        low, high = 0, len(BUDGETS)
        while low < high:
            middle = (low + high) // 2
            k = BUDGETS[middle]
            run = peer.make(k)
            if peer.cost(k) >= best[0]:
                high = middle
            elif is_good(run, problem, keys):
                high = middle
                best = min(best, (peer.cost(k), name, run), key=lambda x: x[0])
            else:
                low = middle + 1
    matvecs, name, run = best
    return f"{matvecs:.0f}" if run else f"> {MOST}", name, run


def ours(problem: Problem):
    def one(matrix, key):
        solution = problem.ours(operator_of(matrix, *problem.tags), key=key, throw=False)
        low, high = solution.interval()
        return solution.value, low, high, solution.matvecs

    return jax.jit(one)


def seconds(run, *args, rounds: int = 5) -> float:
    """The median of the seconds of a call, after one that compiles."""
    run(*args)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def main() -> None:
    keys = jr.split(jr.key(3), KEYS)
    head(
        *("quantity", "best other", "its matvecs, told", "ours, told"),
        *("ours, by itself", "within 1%", "covered"),
        *("seconds of the other", "ours, by itself"),
    )
    for problem in problems():
        matvecs, name, run = fewest(problem.peers, problem, keys)
        told, *_ = fewest(problem.told, problem, keys)
        call = ours(problem)
        value, low, high, spent = map(
            np.array, zip(*(call(problem.matrix, key) for key in keys), strict=True)
        )
        covered = np.mean((low <= problem.exact) & (problem.exact <= high))
        row(
            problem.name,
            *(name, matvecs, told),
            f"{np.mean(spent):.0f}",
            f"{share_within(value, problem.exact):.0%}",
            f"{covered:.0%}",
            f"{seconds(run, problem.matrix, keys[:1]):.3f}" if run else "-",
            f"{seconds(call, problem.matrix, keys[0]):.3f}",
        )


if __name__ == "__main__":
    main()
