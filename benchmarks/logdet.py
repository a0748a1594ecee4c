"""Error, time and memory of log-determinants and their gradients.

    pip install matfree linear_operator
    python benchmarks/logdet.py

Beside matfree and, if installed, GPyTorch's linear_operator, in one run, in float64.
Ratios are to the time of the products alone, as blocks of `k` vectors, `num_steps` times:
medians, and in brackets the spread. Gradient errors are relative, for the derivatives in
the length scale and the noise.
"""

import importlib.util
import time

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.experimental import sparse
from matfree import decomp, funm, stochtrace
from timing import spread

import traceax as tx


jax.config.update("jax_enable_x64", True)
PSD = lx.positive_semidefinite_tag
NOISE, LENGTH = 1e-2, 0.2
# Kind, rank, shift, probes and steps.
PRECONDITIONERS = [
    ("Nystrom", 15, NOISE, 10, 20),
    ("Cholesky", 15, NOISE, 10, 20),
    ("Nystrom", 15, None, 10, 20),
    ("Nystrom", 100, NOISE, 10, 20),
    ("Nystrom", 130, NOISE, 40, 5),
    ("Cholesky", 130, NOISE, 40, 5),
    ("Nystrom", 130, None, 20, 10),
]


def measure(function, *args, rounds=3):
    """Median, smallest and largest seconds, those to compile, temporary megabytes and the
    result."""
    start = time.perf_counter()
    compiled = jax.jit(function).lower(*args).compile()
    compile_seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    megabytes = memory.temp_size_in_bytes / 1e6 if memory else float("nan")
    out, seconds = jax.block_until_ready(compiled(*args)), []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        seconds.append(time.perf_counter() - start)
    times = float(np.median(seconds)), min(seconds), max(seconds)
    return times, compile_seconds, megabytes, out


def matfree_logdet(matvec, n, k, num_steps, reortho):
    integrand = funm.monte_carlo_funm_sym_logdet(
        decomp.tridiag_sym(num_steps, reortho=reortho)
    )
    sampler = stochtrace.sampler_signs(jnp.ones(n), num=k)
    estimate = stochtrace.estimator_monte_carlo_mean_and_sem(integrand, sampler)
    return lambda data, key: estimate(matvec, key, data)[0]


def traceax_logdet(make_operator, k, num_steps, window):
    estimator = tx.SLQEstimator(krylov=tx.Lanczos(window))

    def logdet(data, key):
        operator = make_operator(data)
        return tx.logdet(operator, estimator, k=k, num_steps=num_steps, key=key).value

    return logdet


def compare(make_operator, matvec, data, n, sizes, exact, gradient_errors):
    """A table of values and one of values with gradients, for each `(k, num_steps)`."""
    key = jax.random.key(0)
    for k, num_steps in sizes:
        block = jax.random.rademacher(key, (k, n), jnp.float64)

        def products(data, block, num_steps=num_steps):
            def step(_, x):
                return 0.1 * jax.vmap(lambda v: matvec(v, data))(x)

            return jax.lax.fori_loop(0, num_steps, step, block)

        alone = measure(products, data, block)[0][0]
        print(f"\n{k} probes x {num_steps} steps; products alone {alone:.3f} s:\n")
        print(
            "| | time over products | compile | temporaries | error | gradient errors |"
        )
        print("|---|---|---|---|---|---|")
        functions = {
            "traceax, full": traceax_logdet(make_operator, k, num_steps, None),
            "traceax, window=0": traceax_logdet(make_operator, k, num_steps, 0),
            "matfree, full": matfree_logdet(matvec, n, k, num_steps, "full"),
            "matfree, none": matfree_logdet(matvec, n, k, num_steps, "none"),
        }
        with_gradient = [name for name in functions if name != "matfree, none"]
        runs = [(name, functions[name], 3) for name in functions]
        for name in with_gradient:
            rounds = 1 if "matfree" in name else 3
            function = jax.value_and_grad(functions[name])
            runs.append((f"{name}, gradient", function, rounds))
        for name, function, rounds in runs:
            seconds, compiling, memory, out = measure(function, data, key, rounds=rounds)
            value = out[0] if isinstance(out, tuple) else out
            slopes = gradient_errors(out[1]) if isinstance(out, tuple) else ""
            error = abs(float(value) / exact - 1)
            print(
                f"| {name} | {spread(seconds, alone)} | {compiling:.1f} s | "
                f"{memory:.0f} MB | {error:.1e} | {slopes} |",
                flush=True,
            )


def rbf(n):
    x = np.random.default_rng(0).uniform(size=(n, 2))
    square = np.sum((x[:, None] - x) ** 2, axis=-1)
    kernel = np.exp(-square / (2 * LENGTH**2))
    return kernel * square / LENGTH**3, kernel + NOISE * np.eye(n)


def dense(n, sizes, preconditioners):
    slope, matrix = rbf(n)
    inverse = np.linalg.inv(matrix)
    exact = np.linalg.slogdet(matrix)[1]
    directions = slope, np.eye(n)
    slopes = [np.sum(inverse * each) for each in directions]

    def gradient_errors(gradient):
        found = [np.sum(np.asarray(gradient) * each) for each in directions]
        return ", ".join(
            f"{abs(a / b - 1):.1e}" for a, b in zip(found, slopes, strict=True)
        )

    matrix = jnp.asarray(matrix)
    cholesky = measure(lambda a: jnp.linalg.cholesky(a), matrix)[0][0]
    print(f"**Dense RBF kernel matrix**, n = {n}, of points in the unit square, length")
    print(f"scale {LENGTH}, noise {NOISE}. Cholesky takes {cholesky:.2f} s.")
    compare(
        lambda a: lx.MatrixLinearOperator(a, PSD),
        lambda v, a: a @ v,
        matrix,
        n,
        sizes,
        exact,
        gradient_errors,
    )
    preconditioned(matrix, exact, gradient_errors, preconditioners)


def preconditioned(matrix, exact, gradient_errors, preconditioners, num_keys=7):
    """Mean relative error over keys, and seconds with and without the gradient."""
    print("\nPreconditioned; mean relative error and bar of 7 keys, seconds without and")
    print("with the gradient, whose errors are those of the first key:\n")
    print("| preconditioner | shift | probes x steps | products | error | bar |", end="")
    print(" gradient errors | seconds |\n" + "|---" * 8 + "|")

    def make(kind, rank, shift):
        def logdet(a, key, k, num_steps):
            operator = lx.MatrixLinearOperator(a, PSD)
            key1, key2 = jax.random.split(key)
            if kind == "Nystrom":
                outer = tx.nystrom_preconditioner(operator, rank, key=key1, shift=shift)
            else:
                outer = tx.pivoted_cholesky_preconditioner(operator, rank, shift=shift)
            solution = tx.logdet(
                operator, k=k, num_steps=num_steps, key=key2, preconditioner=outer
            )
            return solution.value, (solution.std_err, solution.stats["num_matvecs"])

        return logdet

    keys = jax.random.split(jax.random.key(1), num_keys)
    for kind, rank, shift, k, steps in preconditioners:
        plain = make(kind, rank, shift)
        value = jax.jit(lambda a, key, f=plain, k=k, s=steps: f(a, key, k, s))
        outs = [value(matrix, key) for key in keys]
        error = np.mean([abs(float(v) / exact - 1) for v, _ in outs])
        bar = np.mean([float(s) / abs(exact) for _, (s, _) in outs])
        both = jax.value_and_grad(plain, has_aux=True)
        (seconds, *_), *_ = measure(value, matrix, keys[0])
        (both_seconds, *_), *_, out = measure(
            lambda a, key, f=both, k=k, s=steps: f(a, key, k, s), matrix, keys[0]
        )
        known = "known" if shift else "estimated"
        products, slopes = int(outs[0][1][1]), gradient_errors(out[1])
        print(
            f"| {kind}, rank {rank} | {known} | {k} x {steps} | {products} | {error:.1e} "
            f"| {bar:.1e} | {slopes} | {seconds:.2f}, {both_seconds:.2f} |",
            flush=True,
        )
    if importlib.util.find_spec("linear_operator") is not None:
        linear_operator(np.asarray(matrix), exact, gradient_errors)


def linear_operator(matrix, exact, gradient_errors, num_keys=7):
    torch = importlib.import_module("torch")
    lo = importlib.import_module("linear_operator")
    torch.set_num_threads(2)
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    kernel = torch.tensor(matrix - NOISE * np.eye(len(matrix)))
    noise = torch.full((len(matrix),), NOISE, dtype=torch.float64)
    settings = lo.settings
    for rank in (15, 100):
        errors, seconds, gradient = [], [], ""
        for seed in range(num_keys):
            torch.manual_seed(seed)
            leaf = kernel.clone().requires_grad_()
            operator = lo.operators.AddedDiagLinearOperator(
                lo.to_linear_operator(leaf), lo.operators.DiagLinearOperator(noise)
            )
            with (
                settings.max_preconditioner_size(rank),
                settings.max_cholesky_size(1),
                settings.fast_computations(log_prob=True),
            ):
                start = time.perf_counter()
                right = torch.ones(len(matrix), 1, dtype=torch.float64)
                _, value = operator.inv_quad_logdet(right, logdet=True)
                value.backward()
                leaf.grad[0, 0].item()  # when a device has done its work
                seconds.append(time.perf_counter() - start)
            errors.append(abs(value.item() / exact - 1))
            gradient = gradient or gradient_errors(leaf.grad.cpu().numpy())
        print(
            f"| linear_operator, rank {rank} | known | 10 x 20 | | {np.mean(errors):.1e} "
            f"| none | {gradient} | , {np.median(seconds):.2f} |"
        )


def grid(side=500, shift=0.05):
    n = side * side
    line = 2 - 2 * np.cos(np.pi * np.arange(1, side + 1) / (side + 1))
    eigenvalues = (line[:, None] + line).reshape(-1) + shift
    exact, slope = np.sum(np.log(eigenvalues)), np.sum(1 / eigenvalues)
    index = np.arange(n).reshape(side, side)
    pairs = [(index[1:], index[:-1]), (index[:, 1:], index[:, :-1])]
    rows = np.concatenate([x.reshape(-1) for a, b in pairs for x in (a, b)])
    columns = np.concatenate([x.reshape(-1) for a, b in pairs for x in (b, a)])
    indices = jnp.stack([jnp.asarray(rows), jnp.asarray(columns)], axis=1)
    adjacency = sparse.BCOO((jnp.ones(len(rows)), indices), shape=(n, n))

    def matvec(v, shift):
        return (4 + shift) * v - adjacency @ v

    def make_operator(shift):
        structure = jax.ShapeDtypeStruct((n,), jnp.float64)
        return lx.FunctionLinearOperator(lambda v: matvec(v, shift), structure, PSD)

    print(f"\n**Grid Laplacian** in two dimensions plus {shift}, n = {n}, sparse.")
    compare(
        make_operator,
        matvec,
        jnp.asarray(shift),
        n,
        [(10, 30)],
        exact,
        lambda found: f"{abs(float(found) / slope - 1):.1e}",
    )


if __name__ == "__main__":
    dense(4000, [(10, 20), (30, 30), (30, 100)], PRECONDITIONERS)
    grid()
