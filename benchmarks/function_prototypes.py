"""Other estimators of the trace of a function, as prototypes.

    python benchmarks/function_prototypes.py

NumPy prototypes of estimators that traceax does not have, beside its own, on diagonal
matrices of size 1000, which no method here can tell from others; 120 products each.
Medians of the relative error over the keys; in brackets the probes x steps, the best of a
scan with the exact value at hand, for all methods alike (for Krylov-aware deflation
without a block, a scan made when it deflated half of the blocks). "Preconditioned" is
Nystrom of the rank that comes first, with a known shift, which FlexTrace knows too.

The prototypes follow the abstracts of the papers:

- FlexTrace (Madhavan, Alexanderian and Saibaba, arXiv:2603.05721), for operator monotone
  f with f(0) = 0. From the Nystrom approximation N of A by all probes, and N_i by all but
  the i-th: the mean over i of tr f(N_i) + w_i* (f(N) - f(N_i)) w_i. Here over 24 of them.
- XTrace with the whole Krylov space (Hallman, arXiv:2512.02316, for f(x) = x), here for
  tr f(A): sample i is that of XTrace, with the block Krylov space of all probes but the
  i-th in the place of the range of the products. f(A) on it, and on what is left of probe
  i, is that of the block tridiagonal matrix of the whole run.
"""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

import traceax as tx


jax.config.update("jax_enable_x64", True)
PSD = lx.positive_semidefinite_tag
SIZE, PRODUCTS, KEYS = 1000, 120, 30
SPHERE = tx.SphereSampler()
FUNCTIONS = {
    "sqrt": (tx.Power(0.5), lambda x: np.sqrt(np.maximum(x, 0))),
    "log": (tx.Log(), np.log),
    "log1p": (jnp.log1p, np.log1p),
    "exp(-x)": (lambda x: jnp.exp(-x), lambda x: np.exp(-x)),
}


def kernel_eigenvalues():
    x = np.random.default_rng(0).uniform(size=(SIZE, 3))
    square = np.sum((x[:, None] - x) ** 2, axis=-1)
    return np.maximum(np.linalg.eigvalsh(np.exp(-square / (2 * 0.3**2))), 0)


def cases():
    """Name, eigenvalues, function, shift, and settings: (k, steps) of SLQ and of
    Krylov-aware deflation, (rank, k, steps), (k, steps, deflated blocks), and (vectors,
    steps, k, steps) of Krylov-aware deflation with a block."""
    i = np.arange(1, SIZE + 1.0)
    tail, noisy = i**-2 + 0.01, kernel_eigenvalues() + 0.05
    settings = (8, 15), (6, 20), None, (15, 8, 7), (3, 36, 4, 3)
    yield "i^-1.5", i**-1.5, "sqrt", 0, *settings
    settings = (4, 30), (4, 30), None, (4, 30, 29), (1, 114, 1, 6)
    yield "0.9^i", 0.9**i, "sqrt", 0, *settings
    settings = (30, 4), (24, 5), (96, 8, 3), (15, 8, 7), (2, 54, 4, 3)
    yield "i^-2 + 0.01", tail, "log", 0.01, *settings
    settings = (30, 4), (20, 6), (96, 8, 3), (15, 8, 7), (2, 54, 4, 3)
    yield "i^-2 + 0.01", tail, "log1p", 0.01, *settings
    settings = (6, 20), (6, 20), (108, 4, 3), (15, 8, 7), (3, 37, 4, 2)
    yield "RBF + 0.05", noisy, "log", 0.05, *settings
    settings = (30, 4), (30, 4), None, (30, 4, 2), (16, 6, 8, 3)
    yield "flat", np.linspace(0, 5, SIZE), "exp(-x)", None, *settings


def spheres(seed, m):
    probes = np.random.default_rng(seed).standard_normal((SIZE, m))
    return probes * SIZE**0.5 / np.linalg.norm(probes, axis=0)


def orthogonal(block, basis):
    """An orthonormal basis of the part of the block outside of the basis."""
    for _ in range(2):
        block = np.linalg.qr(block - basis @ (basis.T @ block))[0]
    return block


def krylov(product, start, steps):
    """An orthonormal basis of the block Krylov space."""
    basis = block = np.linalg.qr(start)[0]
    for _ in range(steps - 1):
        block = orthogonal(product(block), basis)
        basis = np.hstack([basis, block])
    return basis


def whole_krylov(d, f, m, steps, deflated, seed):
    probes, p = spheres(seed, m), m * deflated
    basis = krylov(lambda x: d[:, None] * x, probes, steps)
    matrix = basis.T @ (d[:, None] * basis)
    nodes, vectors = np.linalg.eigh(matrix)
    image = (vectors[:p] * f(nodes)) @ vectors[:p].T
    start, samples = basis[:, :p].T @ probes, []
    for i in range(m):
        others = krylov(lambda x: matrix[:p, :p] @ x, np.delete(start, i, 1), deflated)
        left = np.linalg.qr(others, mode="complete")[0][:, others.shape[1] :]
        form, v = left.T @ image @ left, left.T @ start[:, i]
        factor = (SIZE - others.shape[1]) / (v @ v)
        samples.append(np.trace(image) - np.trace(form) + factor * v @ form @ v)
    return np.mean(samples)


def flextrace(d, f, m, seed):
    probes, rounding = spheres(seed, m), 1e-15 * SIZE**0.5 * d.max()
    basis, r = np.linalg.qr(probes)
    products = (d[:, None] + rounding) * basis
    values, vectors = np.linalg.eigh(basis.T @ products)
    whitener = (vectors / np.sqrt(np.maximum(values, 1e-16 * values[-1]))).T
    outer, sigma, inner = np.linalg.svd(products @ whitener.T, full_matrices=False)
    lost = whitener @ np.linalg.inv(r).T
    lost = sigma[:, None] * (inner @ (lost / np.linalg.norm(lost, axis=0)))
    coordinates, samples = outer.T @ probes, []

    def g(x):
        return f(np.maximum(x - rounding, 0))

    for i in range(0, m, m // 24):
        w, u = coordinates[:, i], lost[:, i]
        values, vectors = np.linalg.eigh(np.diag(sigma**2) - np.outer(u, u))
        form = w**2 @ g(sigma**2) - (vectors.T @ w) ** 2 @ g(values)
        samples.append(np.sum(g(values)) + form)
    return np.mean(samples)


def ours(function, estimator, k, steps, rank=None):
    @jax.jit
    def values(d, shift, keys):
        structure = jax.ShapeDtypeStruct(d.shape, d.dtype)
        operator = lx.FunctionLinearOperator(lambda v: d * v, structure, PSD)

        def one(key):
            key1, key2 = jax.random.split(key)
            settings = {"k": k, "num_steps": steps, "key": key2, "throw": False}
            if rank is None:
                call = tx.trace_of_function(operator, function, estimator, **settings)
                return call.value
            outer = tx.nystrom_preconditioner(operator, rank, key=key1, shift=shift)
            call = tx.logdet(operator, estimator, preconditioner=outer, **settings)
            return call.value

        return jax.lax.map(one, keys)

    keys = jax.random.split(jax.random.key(1), KEYS)
    return lambda d, shift: np.asarray(values(jnp.asarray(d), shift, keys))


def main():
    methods = ["SLQ", "Krylov-aware", "with a block", "preconditioned"]
    methods += ["FlexTrace", "whole Krylov"]
    print(f"| eigenvalues, f | {' | '.join(methods)} |\n" + "|---" * 7 + "|")
    for name, d, called, shift, slq, aware, nystrom, whole, more in cases():
        function, f = FUNCTIONS[called]
        exact, cells = np.sum(f(d)), []

        def show(values, *setting, exact=exact, cells=cells):
            error = np.median(np.abs(values / exact - 1))
            cells.append(f"{error:.1e} ({' x '.join(map(str, setting))})")

        plain = tx.SLQEstimator(sampler=SPHERE)
        show(ours(function, plain, *slq)(d, 0.0), *slq)
        show(ours(function, tx.KrylovAwareEstimator(), *aware)(d, 0.0), *aware)
        size, depth, k, few = more
        deeper = tx.KrylovAwareEstimator(block=(size, depth))
        show(ours(function, deeper, k, few)(d, 0.0), size, f"{depth} + {k}", few)
        if nystrom is None:
            cells.append("")
        else:
            # log1p(A) is the logarithm of I + A.
            one = 1.0 if called == "log1p" else 0.0
            rank, k, steps = nystrom
            values = ours(None, plain, k, steps, rank)(d + one, shift + one)
            show(values, f"{rank} + {k}", steps)
        if shift is None:
            cells.append("")
        else:
            # log(A) = log(s I) + log1p((A - s I) / s), and so on.
            base = {"sqrt": 0, "log": shift, "log1p": 1 + shift}[called]
            known = SIZE * np.log(base) if base else 0
            g = f if called == "sqrt" else lambda x, base=base: np.log1p(x / base)
            found = [flextrace(d - shift, g, PRODUCTS, seed) for seed in range(KEYS)]
            show(known + np.array(found), PRODUCTS, 1)
        found = [whole_krylov(d, f, *whole, seed) for seed in range(KEYS)]
        show(np.array(found), *whole[:2])
        print(f"| {name}, {called} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
