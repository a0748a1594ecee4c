"""Laplacians of a network in collapsed Taylor mode: Dangel et al. (arXiv 2505.13644).

    PYTHONPATH=benchmarks python benchmarks/published/laplacian.py

A network of layers 50-768-768-512-512-1 with tanh, float64. The cost of one more point in
the batch (exact), or of one more random direction for each point, against Hessian-vector
products by nested derivatives. Theirs are the slopes in their stored results, measured on
a GPU: repository f-dangel/torch-jet, `exp04_jax_benchmark/performance` for JAX, and
`exp01_benchmark_laplacian/performance`, compiled, for PyTorch, where there is none for
JAX. Ours are CPU seconds, medians of alternating runs, and the temporaries of the
compiled program. So compare the ratios to nested derivatives and not the seconds.
"""

import functools as ft
import itertools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from tables import beside, head, row
from timing import alternate

import traceax as tx


jax.config.update("jax_enable_x64", True)
SIZES = (50, 768, 768, 512, 512, 1)
FEW, MANY = 8, 24  # points, or directions
# Nested derivatives and collapsed Taylor mode.
THEIRS = {
    "time of a point, ms": (0.5752, 0.2866),
    "memory of a point, MiB": (1.403, 1.419),
    "memory of a point that can be differentiated, MiB": (6.021, 1.936),
    "time of a direction for each of 2048 points, ms (PyTorch)": (23.11, 11.65),
}


def network(params, x):
    for weight, bias in params[:-1]:
        x = jnp.tanh(weight @ x + bias)
    weight, bias = params[-1]
    return (weight @ x + bias)[0]


def nested(fn, x, k):
    directions = jnp.eye(len(x))
    if k < len(x):
        directions = jr.rademacher(jr.key(2), (k, len(x)), x.dtype)

    def product(v):
        return jax.jvp(jax.grad(fn), (x,), (v,))[1]

    return jnp.sum(jax.vmap(product)(directions) * directions)


def ours(fn, x, k):
    return tx.laplacian(fn, x, k=k, key=jr.key(2))[2].value


def values(way, k, params, points):
    return jax.vmap(lambda x: way(ft.partial(network, params), x, k))(points)


def gradient(way, k, params, points):
    return jax.grad(lambda p: jnp.mean(values(way, k, p, points) ** 2))(params)


def costs(what, params, batch, k):
    """Milliseconds and MiB of temporaries, each of nested derivatives and of ours."""
    points = jr.normal(jr.key(1), (batch, SIZES[0]))
    ways = {way.__name__: jax.jit(ft.partial(what, way, k)) for way in (nested, ours)}
    seconds, _ = alternate(ways, params, points, first_calls=1)
    compiled = [way.lower(params, points).compile() for way in ways.values()]
    memory = [x.memory_analysis().temp_size_in_bytes / 2**20 for x in compiled]
    return np.array([[1e3 * x for x in seconds.values()], memory])


def main() -> None:
    params = [
        (jr.normal(jr.fold_in(jr.key(0), i), (b, a)) / a**0.5, jnp.zeros(b))
        for i, (a, b) in enumerate(itertools.pairwise(SIZES))
    ]

    def slope(what, batches, ks):
        few, many = (costs(what, params, *case) for case in zip(batches, ks, strict=True))
        return (many - few) / (MANY - FEW)

    everywhere = SIZES[0], SIZES[0]
    time, memory = slope(values, (FEW, MANY), everywhere)
    of_gradient, kept = slope(gradient, (FEW, MANY), everywhere)
    of_direction, _ = slope(values, (FEW, FEW), (FEW, MANY))
    measured = time, memory, kept, of_direction
    names = "nested", "collapsed", "ratio"
    head("one more", *(f"{who}: {x}" for who in ("theirs", "ours") for x in names), "")
    for (name, theirs), here in zip(THEIRS.items(), measured, strict=True):
        first, second = beside(*theirs, ".3g"), beside(*here, ".3g")
        row(name, *first, *second, f"{here[1] / here[0] * theirs[0] / theirs[1]:.2f}")
    name = "time of a point for the gradient, ms"
    row(name, "-", "-", "-", *beside(*of_gradient, ".3g"), "-")
    print(
        f"\nThe last column is our ratio over theirs. Ours have {FEW} points, not 2048."
    )
    print(f"\nWhole calls, {MANY} points, ms:\n")
    head("", *names)
    for k, way in itertools.product((SIZES[0], 16), (values, gradient)):
        of_what = "exact" if k == SIZES[0] else f"{k} directions"
        time, _ = costs(way, params, MANY, k)
        row(f"{of_what}, {way.__name__}", *beside(*time, ".3g"))


if __name__ == "__main__":
    main()
