"""What four devices tell each other, counted in the compiled programs."""

import math

import jax
import jax.numpy as jnp
import lineax as lx
from common import collectives, general, positive_definite, PSD, say, some_key

import traceax as tx


SHARDED, LOCAL = tx.Sharded(tx.probe_mesh()), tx.Local()


def trace(estimator, k, execution=SHARDED, tags=PSD):
    def call(matrix):
        operator = lx.MatrixLinearOperator(matrix, tags)
        return tx.trace(
            operator, estimator, k=k, key=some_key(), execution=execution, throw=False
        )

    return call


def logdet(k, execution=SHARDED, tags=PSD):
    def call(matrix):
        operator = lx.MatrixLinearOperator(matrix, tags)
        return tx.logdet(
            operator, k=k, num_steps=5, key=some_key(), execution=execution, throw=False
        )

    return call


def of(fn, *args):
    return collectives(jax.jit(fn).lower(*args).compile())


def values():
    """One all-reduce of a few numbers, however many probes, and however long."""
    hutchinson = tx.HutchinsonEstimator()
    for name, make, matrices in (
        ("Hutchinson", lambda *a: trace(hutchinson, *a), positive_definite),
        ("SLQ", logdet, positive_definite),
        ("Golub-Kahan", lambda *a: logdet(*a, tags=()), general),
    ):
        sizes = set()
        for k, n in ((8, 32), (64, 128)):
            call = make(k)

            def everything(x, call=call):
                out = call(x)
                return out.value, out.std_err, out.stats

            found = of(everything, matrices(n))
            kinds = [kind for kind, _ in found]
            assert kinds == ["all-reduce"], f"{name}, k={k}, n={n}: {found}"
            sizes.add(math.prod(found[0][1]))
        assert len(sizes) == 1, f"{name}: {sizes} numbers"
        assert max(sizes) < 100, f"{name}: {sizes} numbers"
        found = of(lambda x, c=make(8, LOCAL): c(x).value, matrices(32))
        assert found == [], f"{name} on one device: {found}"
        say(f"{name}: {sizes}")


def gradients():
    """One all-reduce for each array of the operator, of its shape, in a loop too."""
    n = 32
    x = positive_definite(n), jnp.linspace(1.0, 2.0, n)

    def make(x):
        total = lx.MatrixLinearOperator(x[0]) + lx.DiagonalLinearOperator(x[1])
        return lx.TaggedLinearOperator(total, PSD)

    def hutchinson(x, execution):
        return tx.trace(
            make(x),
            tx.HutchinsonEstimator(),
            k=16,
            key=some_key(),
            execution=execution,
            throw=False,
        ).value

    def slq(x, execution):
        solution = tx.logdet(
            make(x), k=16, num_steps=5, key=some_key(), execution=execution, throw=False
        )
        return solution.value

    for call in (hutchinson, slq):
        for block_size in (None, 1):
            execution = tx.Sharded(tx.probe_mesh(), block_size=block_size)
            found = of(jax.grad(lambda x, c=call, e=execution: c(x, e)), x)
            expected = [("all-reduce", (n,)), ("all-reduce", (n, n))]
            at = f"gradient of {call.__name__}, block_size={block_size}"
            assert sorted(found) == expected, f"{at}: {found}"
            say(at)
        found = of(jax.grad(lambda x, c=call: c(x, LOCAL)), x)
        assert found == [], f"{call.__name__} on one device: {found}"


def sketches():
    """All-gathers of the products, n m numbers, and nothing else."""
    n, matrix = 64, positive_definite(64)
    cases = [
        (tx.HutchPlusPlusEstimator(), 24, {(n, 8), (n, 16)}),
        (tx.NystromPlusPlusEstimator(), 16, {(n, 16)}),
        (tx.XTraceEstimator(), 16, {(n, 8)}),
        (tx.XNysTraceEstimator(), 8, {(n, 8)}),
    ]
    for estimator, k, shapes in cases:
        found = of(lambda x, c=trace(estimator, k): c(x).value, matrix)
        assert found, f"{estimator.name}: nothing gathered"
        for kind, shape in found:
            assert kind == "all-gather", f"{estimator.name}: {found}"
            assert tuple(sorted(shape, reverse=True)) in shapes, (
                f"{estimator.name}: {found}"
            )
        found = of(lambda x, c=trace(estimator, k, LOCAL): c(x).value, matrix)
        assert found == [], f"{estimator.name} on one device: {found}"
        say(estimator.name)


values()
gradients()
sketches()
