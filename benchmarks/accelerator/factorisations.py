"""Time and error of dense factorisations on a GPU.

    PYTHONPATH=benchmarks python benchmarks/accelerator/factorisations.py

Milliseconds, and in brackets the error: by JAX's choice, by QR iterations, by Jacobi's
method, and by NumPy on the host, from a callback. The error is that of the product of the
factors, relative to the largest entry, or of the orthonormality of a factor, the larger,
in units of the machine epsilon.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from timing import interleaved


jax.config.update("jax_enable_x64", True)
SHAPES = {
    "QR": [(4000, 50), (32000, 50)],
    "eigh": [(50, 50), (200, 200), (32, 20, 20)],
    "SVD": [(50, 50), (200, 200), (32, 20, 20)],
}
EIGH, SVD = jax.lax.linalg.EighImplementation, jax.lax.linalg.SvdAlgorithm


def eigh(algorithm, x):
    vectors, values = jax.lax.linalg.eigh(x, implementation=algorithm)
    return values, vectors


def svd(algorithm, x):
    return tuple(jax.lax.linalg.svd(x, full_matrices=False, algorithm=algorithm))


WAYS = {
    "QR": {"JAX's choice": lambda x: tuple(jnp.linalg.qr(x)), "host": np.linalg.qr},
    "eigh": {
        "JAX's choice": partial(eigh, None),
        "QR iterations": partial(eigh, EIGH.QR),
        "Jacobi": partial(eigh, EIGH.JACOBI),
        "host": np.linalg.eigh,
    },
    "SVD": {
        "JAX's choice": partial(svd, None),
        "QR iterations": partial(svd, SVD.QR),
        "Jacobi": partial(svd, SVD.JACOBI),
        "host": partial(np.linalg.svd, full_matrices=False),
    },
}
COLUMNS = list(WAYS["SVD"])


def on_host(fn, like, x):
    """`fn` of NumPy, from inside a compiled program."""
    run = lambda y: tuple(fn(np.asarray(y)))  # noqa: E731
    return jax.pure_callback(run, jax.eval_shape(like, x), x)


def error(name, x, factors) -> float:
    x, *factors = (np.asarray(each, np.float64) for each in (x, *factors))
    if name == "QR":
        product, orthonormal = factors[0] @ factors[1], factors[:1]
    elif name == "eigh":
        values, q = factors
        product, orthonormal = (q * values[..., None, :]) @ q.mT, [q]
    else:
        u, s, vh = factors
        product, orthonormal = (u * s[..., None, :]) @ vh, [u, vh.mT]
    errors = [np.max(np.abs(product - x)) / np.max(np.abs(x))]
    errors += [np.max(np.abs(q.mT @ q - np.eye(q.shape[-1]))) for q in orthonormal]
    return max(errors)


def cells(name, x):
    ways = dict(WAYS[name])
    ways["host"] = partial(on_host, ways["host"], ways["JAX's choice"])
    functions = {way: partial(jax.jit(fn), x) for way, fn in ways.items()}
    times, eps = interleaved(functions), float(jnp.finfo(x.dtype).eps)
    return {
        way: f"{1e3 * times[way][0]:.2f} ({error(name, x, fn()) / eps:.0f})"
        for way, fn in functions.items()
    }


def main() -> None:
    print(f"| | {' | '.join(COLUMNS)} |")
    print("|---" * (1 + len(COLUMNS)) + "|")
    for name, shapes in SHAPES.items():
        for shape in shapes:
            for dtype in (jnp.float32, jnp.float64):
                x = jax.random.normal(jax.random.key(0), shape, dtype)
                found = cells(name, x + x.mT if name == "eigh" else x)
                size = " x ".join(map(str, shape))
                row = [f"{name} of {size}, {dtype.__name__}"]
                row += [found.get(way, "-") for way in COLUMNS]
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
