"""Log-likelihood of a Gaussian process with its gradient.

    python benchmarks/gaussian.py

Beside a Cholesky factorisation and, if installed, GPyTorch's linear_operator: n = 4000
points in the unit square, float64, RBF kernel, in one process, in turn. Times include the
kernel matrix, the value, and the gradient in the logarithms of length scale, amplitude
and noise, whose error is relative to the norm of the exact gradient.
"""

import importlib
import importlib.util

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
from timing import interleaved, spread

import traceax as tx


jax.config.update("jax_enable_x64", True)
N, KEYS = 4000, 5
PARAMS = np.log([0.2, 1.0, 0.1])


def data():
    generator = np.random.default_rng(0)
    x = generator.uniform(size=(N, 2))
    y = np.sin(8 * x[:, 0]) * np.cos(5 * x[:, 1]) + 0.1 * generator.standard_normal(N)
    return x, y


def kernel(params, squares):
    length, amplitude, _ = jnp.exp(params)
    return amplitude**2 * jnp.exp(-squares / (2 * length**2))


@jax.jit
@jax.value_and_grad
def by_cholesky(params, squares, y):
    matrix = kernel(params, squares) + jnp.exp(2 * params[2]) * jnp.eye(N)
    factor = jnp.linalg.cholesky(matrix)
    half = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
    log_det = 2 * jnp.sum(jnp.log(jnp.diag(factor)))
    return -(half @ half + log_det + N * np.log(2 * np.pi)) / 2


def ours(rank, num_steps, tolerance):
    def log_prob(params, squares, y, key):
        matrix, noise = kernel(params, squares), jnp.exp(2 * params[2])
        tag = lx.positive_semidefinite_tag
        operator = lx.MatrixLinearOperator(matrix + noise * jnp.eye(N), tag)
        key1, key2 = jr.split(key)
        near = tx.nystrom_preconditioner(operator, rank, key=key1, shift=noise)
        settings = {"k": 10, "num_steps": num_steps, "key": key2}
        settings["solver"] = lx.CG(tolerance, tolerance, stabilise_every=None)
        found = tx.gaussian_log_prob(operator, y, preconditioner=near, **settings)
        return found.value, (found.std_err, found.stats["num_matvecs"])

    return jax.jit(jax.value_and_grad(log_prob, has_aux=True))


def theirs(rank, num_steps, tolerance):
    """By linear_operator, whose value has no error bar."""
    torch = importlib.import_module("torch")
    lo = importlib.import_module("linear_operator")
    torch.set_num_threads(2)

    def run(params, squares, y, seed):
        torch.manual_seed(seed)
        leaf = torch.tensor(params, requires_grad=True)
        length, amplitude, noise = torch.exp(leaf)
        matrix = amplitude**2 * torch.exp(-squares / (2 * length**2))
        noises = lo.operators.ConstantDiagLinearOperator(noise[None] ** 2, N)
        operator = lo.operators.AddedDiagLinearOperator(
            lo.to_linear_operator(matrix), noises
        )
        with (
            lo.settings.max_preconditioner_size(rank),
            lo.settings.max_cholesky_size(1),
            lo.settings.num_trace_samples(10),
            lo.settings.max_lanczos_quadrature_iterations(num_steps),
            lo.settings.cg_tolerance(tolerance),
        ):
            form, log_det = operator.inv_quad_logdet(y[:, None], logdet=True)
            value = -(form + log_det + N * np.log(2 * np.pi)) / 2
            value.backward()
        return value.item(), leaf.grad.numpy()

    return run


def main():
    x, y = data()
    squares = np.sum((x[:, None] - x) ** 2, axis=-1)
    arrays = jnp.asarray(squares), jnp.asarray(y)
    exact, slope = by_cholesky(PARAMS, *arrays)
    cases = {"Cholesky": lambda seed: (*by_cholesky(PARAMS, *arrays), 0.0, "")}
    for rank, num_steps, tolerance in ((100, 10, 1e-3), (200, 5, 1e-4)):

        def one(seed, run=ours(rank, num_steps, tolerance)):
            (value, (bar, products)), slopes = run(PARAMS, *arrays, jr.key(seed))
            return value, slopes, bar, int(products)

        cases[f"traceax, rank {rank}"] = one
    if importlib.util.find_spec("linear_operator") is not None:
        torch = importlib.import_module("torch")
        tensors = torch.tensor(squares), torch.tensor(y)
        for rank, num_steps, tolerance in ((100, 20, 1e-2), (200, 20, 1e-3)):

            def other(seed, run=theirs(rank, num_steps, tolerance)):
                return *run(PARAMS, *tensors, seed), np.nan, ""

            cases[f"linear_operator, rank {rank}"] = other
    calls = {name: lambda run=run: run(0)[:2] for name, run in cases.items()}
    times = interleaved(calls, rounds=3)
    base = times["Cholesky"][0]
    print(
        f"Cholesky takes {base:.1f} s; errors and bars are root mean squares of {KEYS}:\n"
    )
    print(
        "| | time over Cholesky | products | error of the value | bar | of the gradient |"
    )
    print("|---|---|---|---|---|---|")
    for name, run in cases.items():
        values, slopes, bars, products = zip(*map(run, range(KEYS)), strict=True)
        error = np.sqrt(np.mean((np.asarray(values) - exact) ** 2))
        bar = np.sqrt(np.mean(np.asarray(bars) ** 2))
        cells = [f"{error:.1e}", "none" if np.isnan(bar) else f"{bar:.1e}"]
        off = np.linalg.norm(np.asarray(slopes) - slope, axis=1) / np.linalg.norm(slope)
        print(
            f"| {name} | {spread(times[name], base)} | {products[0]} "
            f"| {' | '.join(cells)} | {np.sqrt(np.mean(off**2)):.1e} |"
        )


if __name__ == "__main__":
    main()
