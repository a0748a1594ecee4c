"""What the tests on meshes share, and the programs that they run in processes of their
own."""

import re
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np


jax.config.update("jax_enable_x64", True)

PSD = lx.positive_semidefinite_tag

_COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|collective-permute|all-to-all|reduce-scatter)"
    r"(?:-start)?\("
)
_start = time.perf_counter()


def say(text):
    print(f"{time.perf_counter() - _start:6.1f} s  {text}", flush=True)


def some_key():
    """Not made on import, before which `two_processes.py` could not set JAX up."""
    return jr.key(7)


def positive_definite(n, dtype=jnp.float64):
    """Hermitian, with the eigenvalues 0.5 + 1 / i."""
    generator = np.random.default_rng(1)
    normal = generator.standard_normal((n, n))
    if jnp.issubdtype(dtype, jnp.complexfloating):
        normal = normal + 1j * generator.standard_normal((n, n))
    q, _ = np.linalg.qr(normal)
    matrix = (q * (0.5 + 1 / np.arange(1, n + 1))) @ q.conj().T
    return jnp.asarray((matrix + matrix.conj().T) / 2, dtype)


def general(n, dtype=jnp.float64):
    noise = np.random.default_rng(2).standard_normal((n, n)) / (4 * n**0.5)
    return jnp.asarray(noise + 2 * np.eye(n), dtype)


def matrix_free(matrix, tags=()):
    structure = jax.ShapeDtypeStruct((matrix.shape[1],), matrix.dtype)
    return lx.FunctionLinearOperator(lambda v: matrix @ v, structure, tags)


def value_and_grad(call):
    """Of `call(x)`, a solution, compiled: the solution and the gradient of its value, or
    of a sum of its entries with different weights."""

    def both(x):
        solution = call(x)
        value = solution.value.real.reshape(-1)
        return jnp.vdot(jnp.cos(jnp.arange(value.size)), value), solution

    def run(x):
        (_, solution), slope = compiled(x)
        return solution, slope

    compiled = eqx.filter_jit(eqx.filter_value_and_grad(both, has_aux=True))
    return run


def close(name, found, expected, rtol):
    """Trees agree, each leaf relative to its largest entry; relative residuals, which
    are small beside one, to `rtol`."""
    leaves = jax.tree.leaves_with_path(eqx.filter(expected, eqx.is_array))
    others = jax.tree.leaves(eqx.filter(found, eqx.is_array))
    assert len(leaves) == len(others) > 0, f"{name}: other leaves"
    for (path, a), b in zip(leaves, others, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        at = f"{name}{jax.tree_util.keystr(path)}"
        assert a.shape == b.shape, f"{at}: shape {b.shape}, expected {a.shape}"
        assert a.dtype == b.dtype, f"{at}: dtype {b.dtype}, expected {a.dtype}"
        if a.size == 0:
            continue
        assert np.array_equal(np.isfinite(a), np.isfinite(b)), f"{at}: {b}, not {a}"
        a, b = np.where(np.isfinite(a), a, 0), np.where(np.isfinite(b), b, 0)
        error, size = np.max(np.abs(a - b)), np.max(np.abs(a))
        size = 1 if "residual" in at else size
        assert error <= rtol * size, f"{at}: {error:.1e} of {size:.1e}, allowed {rtol}"


def collectives(compiled):
    """Of a compiled program: the kind and shape of every collective's operands."""
    found = []
    for line in compiled.as_text().splitlines():
        if match := _COLLECTIVE.search(line):
            for shape in re.findall(r"[a-z]+\d*\[([\d,]*)\]", match[1]):
                dims = tuple(int(d) for d in shape.split(",") if d)
                found.append((match[2], dims))
    return found
