"""Temporary memory of calls, in vectors.

    pip install -e '.[examples]'
    python benchmarks/memory.py

What compiled programs take on a CPU besides their arguments, in vectors of length n, for
the value and for the gradient in the operator, a stencil. Nothing is run.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
from tables import head, row

import traceax as tx


N, K, STEPS = 200_000, 64, 20
PSD = lx.positive_semidefinite_tag
KEY = jr.key(0)


def stencil(diagonal, tags=PSD):
    def mv(v):
        return diagonal * v + 0.1 * (jnp.roll(v, 1) + jnp.roll(v, -1))

    return lx.FunctionLinearOperator(mv, jax.ShapeDtypeStruct((N,), jnp.float32), tags)


def vectors(value: Callable[[jax.Array], jax.Array]) -> tuple[str, str]:
    """The number of vectors that the value and its gradient take."""
    found = []
    for function in (value, jax.grad(lambda diagonal: jnp.sum(value(diagonal)))):
        compiled = jax.jit(function).lower(jnp.linspace(1.0, 2.0, N)).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        found.append(f"{memory.temp_size_in_bytes / (4 * N):.0f}")
    return found[0], found[1]


def traces():
    for estimator, grows in (
        (tx.HutchinsonEstimator(), "b"),
        (tx.HutchPlusPlusEstimator(), "k"),
        (tx.NystromPlusPlusEstimator(), "k"),
        (tx.XTraceEstimator(), "k"),
        (tx.XNysTraceEstimator(), "k"),
    ):
        settings = {"k": K, "key": KEY, "throw": False}
        value = lambda d: tx.trace(stencil(d), estimator, **settings).value  # noqa: B023, E731
        name = estimator.name.removesuffix("Estimator").replace("PlusPlus", "++")
        row(f"`trace`, {name}", f"`{grows}`", *vectors(value))


def diagonals():
    for estimator, tags, grows in (
        (tx.HutchinsonEstimator(), (), "b"),
        (tx.DiagPlusPlusEstimator(), (), "k"),
        (tx.XDiagEstimator(), (), "k"),
        (tx.XNysDiagEstimator(), PSD, "k"),
        (tx.AutoDiagonalEstimator(), (), "k"),
        (tx.AutoDiagonalEstimator(), PSD, "k"),
    ):
        settings = {"k": K, "key": KEY, "throw": False}
        value = lambda d: tx.diagonal(stencil(d, tags), estimator, **settings).value  # noqa: B023, E731
        name = estimator.name.removesuffix("Estimator").replace("PlusPlus", "++")
        if name == "AutoDiagonal":
            name = "by default, with the tag" if tags else "by default, without a tag"
        row(f"`diagonal`, {name}", f"`{grows}`", *vectors(value))


def functions():
    settings = {"k": K, "num_steps": STEPS, "key": KEY, "throw": False}
    windowed = tx.SLQEstimator(krylov=tx.Lanczos(window=0))
    for name, estimator, grows in (
        (f"`logdet`, SLQ, {STEPS} steps", tx.SLQEstimator(), "`b s`"),
        ("the same, `krylov=tx.Lanczos(window=0)`", windowed, "`b`"),
    ):
        value = lambda d: tx.logdet(stencil(d), estimator, **settings).value  # noqa: B023, E731
        row(name, f"{grows}; with a gradient `b s + 8 k`", *vectors(value))

    def exponential(d):
        estimator = tx.KrylovAwareEstimator()
        solution = tx.trace_of_function(stencil(d), tx.Exp(-1.0), estimator, **settings)
        return solution.value

    name = f"`trace_of_function`, `KrylovAwareEstimator`, {STEPS} steps"
    row(name, "`k s`", *vectors(exponential))


if __name__ == "__main__":
    head("call", "grows as", "value", "gradient")
    traces()
    diagonals()
    functions()
