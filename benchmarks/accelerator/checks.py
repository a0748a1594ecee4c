"""Checks on a GPU: factorisations, estimates, gradients, precision, errors.

    PYTHONPATH=benchmarks python benchmarks/accelerator/checks.py

On whatever `jax.devices()` gives: dense factorisations alone and in batches, estimates
and gradients, reduced precision of products, also of ill-conditioned matrices, errors and
callbacks from inside a compiled program, random signs, and the same on a mesh of one and
of all devices. The exit status is not 0 if a check fails. On a CPU, which stands in as
four devices, this checks the script.
"""

import functools
import os
import statistics
import sys
import time
import traceback


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import conditions
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.sharding import AxisType

import traceax as tx
from traceax._numerics import dense


jax.config.update("jax_enable_x64", True)

DTYPES = (jnp.float32, jnp.float64)
N, K, STEPS, RANK = 2048, 32, 20, 8
SPECTRUM = 0.5 + 20 * 0.8 ** np.arange(N)
VECTORS, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((N, N)))
KEY = jax.random.key(0)
PSD = lx.positive_semidefinite_tag
FAILED = []
FIRST_CALLS = {}


def row(*cells):
    print(f"| {' | '.join(cells)} |", flush=True)


def table(title, *heads):
    print(f"\n**{title}**\n")
    row(*heads)
    row(*["---"] * len(heads))


def check(name, found, allowed):
    """One row: whether an error is finite and as small as it has to be."""
    found = float(found)
    passed = found <= allowed
    if not passed:
        FAILED.append(name)
    row(name, f"{found:.1e}", f"{allowed:.1e}", "yes" if passed else "**NO**")


def milliseconds(fn, *args, calls=5):
    """The median of a few calls after one that compiles."""
    seconds = []
    for _ in range(calls + 1):
        start = time.perf_counter()
        jax.block_until_ready(fn(*args))
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds[1:])


def compare(name, other_name, fn, other, *args):
    ours, others = milliseconds(fn, *args), milliseconds(other, *args)
    row(name, f"{ours:.2f}", other_name, f"{others:.2f}", f"{ours / others:.2f}")


def relative(x, y):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return np.max(np.abs(x - y)) / np.max(np.abs(y))


def difference(found, expected):
    """The largest relative difference of value, error bar and derivative."""
    return max(map(relative, found, expected))


def positive_definite(dtype):
    return jnp.asarray((VECTORS * SPECTRUM) @ VECTORS.T, dtype)


def low_rank(dtype):
    """Its trace is its rank, and sketches of it are exact but for rounding."""
    return jnp.asarray(VECTORS[:, :RANK] @ VECTORS[:, :RANK].T, dtype)


# Factorisations


def factorise(fn, *, by_rows=False, batched=False):
    def run(x):
        with dense.factorising(by_rows=by_rows):
            return (jax.vmap(fn) if batched else fn)(x)

    return jax.jit(run)


def matrices(name, dtype):
    shape = (8, 4096, 64) if name == "QR" else (8, 256, 256)
    x = jax.random.normal(KEY, shape, dtype)
    return x + x.mT if name == "eigh" else x


# Each with what the factors multiply to, and those that are orthonormal.
FACTORISATIONS = {
    "QR": (dense.qr, lambda q, r: (q @ r, q)),
    "eigh": (dense.eigh, lambda s, q: ((q * s[..., None, :]) @ q.mT, q)),
    "SVD": (dense.svd, lambda u, s, vh: ((u * s[..., None, :]) @ vh, u)),
}
WAYS = {"": {}, ", batch of 8": {"batched": True}}


def factorisations():
    table("Factorisations", "check, error", "found", "allowed", "passed")
    for dtype in DTYPES:
        for name, (fn, multiply) in FACTORISATIONS.items():
            ways = WAYS | ({", by rows": {"by_rows": True}} if name == "QR" else {})
            for way, options in ways.items():
                x = matrices(name, dtype)
                x = x if "batched" in options else x[0]
                factors = factorise(fn, **options)(x)
                made, q = multiply(*(np.asarray(f, np.float64) for f in factors))
                gram = q.mT @ q
                identity = np.broadcast_to(np.eye(gram.shape[-1]), gram.shape)
                error = max(relative(made, x), relative(gram, identity))
                allowed = 20 * len(gram.T) ** 0.5 * jnp.finfo(dtype).eps
                check(f"{name}{way}, {dtype.__name__}", error, allowed)


# Estimates


def trace(estimator):
    def call(operator, **settings):
        return tx.trace(operator, estimator, k=K, **settings)

    return call


def logdet(operator, **settings):
    return tx.logdet(operator, k=K, num_steps=STEPS, **settings)


CALLS = {
    "Hutchinson": trace(tx.HutchinsonEstimator()),
    "Hutch++": trace(tx.HutchPlusPlusEstimator()),
    "XTrace": trace(tx.XTraceEstimator()),
    "XNysTrace": trace(tx.XNysTraceEstimator()),
    "log-determinant": logdet,
}
SKETCHES = ("Hutch++", "XTrace", "XNysTrace")
LOCAL = tx.Local()


@functools.cache
def value(name, execution=LOCAL, precision="highest"):
    """Compiled: value, error bar, and the derivative along the matrix itself."""

    def run(matrix):
        def of(scale):
            # `lineax.MatrixLinearOperator` always asks for full precision.
            product = lambda v: scale * (matrix @ v)  # noqa: E731
            operator = lx.FunctionLinearOperator(product, matrix[0], PSD)
            found = CALLS[name](operator, key=KEY, execution=execution, throw=False)
            return found.value, found.std_err

        with jax.default_matmul_precision(precision):
            one = jnp.ones((), matrix.dtype)
            (found, bar), slope = jax.value_and_grad(of, has_aux=True)(one)
        return found, bar, slope

    return jax.jit(run)


@jax.jit
def of_diagonal(d):
    """Estimates at the lowest precision. Products with the operator are elementwise, so
    this is the precision of our own."""

    def one(call):
        operator = lx.FunctionLinearOperator(lambda v: d * v, d, PSD)
        return call(operator, key=KEY, execution=LOCAL, throw=False).value

    with jax.default_matmul_precision("default"):
        return [one(CALLS[name]) for name in SKETCHES]


def precision():
    table("Precision of products", "check, relative error", "found", "allowed", "passed")
    ones = jnp.zeros(4096, jnp.float32).at[jnp.arange(8) * 500].set(1)
    for name, found in zip(SKETCHES, of_diagonal(ones), strict=True):
        check(f"{name} of a diagonal of rank {RANK}", relative(found, RANK), 1e-5)
    cases = [(name, low_rank) for name in SKETCHES]
    cases += [(name, positive_definite) for name in ("Hutchinson", "log-determinant")]
    for name, make in cases:
        # Those that are not exact have the same signs in both dtypes.
        exact = RANK if make is low_rank else value(name)(make(jnp.float64))[0]
        for asked, allowed in (("default", 2e-2), ("highest", 1e-5)):
            found = value(name, precision=asked)(make(jnp.float32))[0]
            check(
                f"{name}, float32 at {asked} precision", relative(found, exact), allowed
            )


def ill_conditioned():
    """Functions of matrices whose products are at the lowest precision."""
    heads = "function, condition", "intervals that missed, no flag", "allowed", "passed"
    table("Ill conditioned matrices at default precision", *heads)
    for name, (function, reference) in conditions.FUNCTIONS.items():
        run = conditions.estimates(function, STEPS)
        for condition in (1e1, 1e3, 1e5):
            missed = []
            for matrix, known in conditions.matrices(condition, jnp.float32):
                inside, flagged = run(matrix, reference(known))
                missed.append(~inside & ~flagged)
            check(f"{name}, {condition:.0e}", np.mean(missed), 0.08)


def estimates():
    table("Estimates and gradients", "check", "found", "allowed", "passed")
    for dtype in DTYPES:
        matrix = positive_definite(dtype)
        for name in CALLS:
            start = time.perf_counter()
            found, bar, slope = map(float, value(name)(matrix))
            FIRST_CALLS[f"{name}, {dtype.__name__}"] = time.perf_counter() - start
            logarithm = name == "log-determinant"
            exact = np.sum(np.log(SPECTRUM) if logarithm else SPECTRUM)
            title = f"{name}, {dtype.__name__}"
            check(f"{title}: error in error bars", abs(found - exact) / bar, 5)
            # Along A itself that of log det A is n, and a trace is linear.
            slope_error = relative(slope, N if logarithm else exact)
            check(f"{title}: relative error of a derivative", slope_error, 0.05)


def control():
    """What goes back to the host from a compiled program."""
    table("Callbacks, loops and errors", "check", "found", "allowed", "passed")
    told = []
    budget = tx.Adaptive(
        rtol=1e-2, max_k=256, round_size=16, callback=lambda *x: told.append(x)
    )
    matrix = positive_definite(jnp.float32)

    def total(scale):
        operator = lx.MatrixLinearOperator(scale * matrix, PSD)
        estimator = tx.XTraceEstimator()
        found = tx.trace(operator, estimator, k=budget, key=KEY, throw=False)
        return found.value, found.stats["num_matvecs"]

    (found, made), slope = jax.jit(jax.value_and_grad(total, has_aux=True))(1.0)
    jax.effects_barrier()
    exact = np.sum(SPECTRUM)
    check("adaptive XTrace: error over tolerance", relative(found, exact) / 1e-2, 1)
    check("adaptive XTrace: derivative", relative(slope, exact), 1e-2)
    check("rounds without a callback", abs(int(made) / 16 - len(told)), 0)
    wrong = lx.MatrixLinearOperator(matrix.at[3, 3].set(jnp.nan))
    try:
        tx.trace(wrong, k=8, key=KEY)
    except Exception as error:
        missed = "NaN" not in str(error) and "finite" not in str(error)
    else:
        missed = True
    check("a NaN that was not raised", missed, 0)


def signs():
    table("Random signs", "check", "found", "allowed", "passed")
    n, k = 2**20, 16
    sampler = tx.RademacherSampler(jnp.float32)
    drawn = jax.jit(lambda key: sampler(key, n, k))
    found = np.asarray(drawn(KEY))
    check("entries that are not +1 or -1", np.sum(np.abs(found) != 1), 0)
    check("mean, in standard errors", abs(np.mean(found)) * found.size**0.5, 5)
    with jax.default_device(jax.devices("cpu")[0]):
        expected = np.asarray(drawn(jax.device_put(KEY, jax.devices("cpu")[0])))
    check("entries that differ from those of the CPU", np.sum(found != expected), 0)


def sign_times():
    n, k = 2**20, 64

    @jax.jit
    def ours(d):
        def one(i):
            probe = tx.RademacherSampler(jnp.float32).sample(
                jax.random.fold_in(KEY, i), n, jnp.float32
            )
            return jnp.vdot(probe, d * probe)

        return jnp.mean(jax.lax.map(one, jnp.arange(k)))

    @jax.jit
    def plain(d):
        probes = jax.random.rademacher(KEY, (k, n), jnp.float32)
        return jnp.mean(jnp.sum(probes * d * probes, axis=1))

    diagonal = jnp.ones(n, jnp.float32)
    name = f"{k} probes of {n} signs, packed"
    compare(name, "`jax.random.rademacher`", ours, plain, diagonal)


# Meshes


@functools.cache
def meshes():
    """One device, and all, split by probes or by rows."""
    devices, names, axes = jax.devices(), ("probes", "rows"), (AxisType.Auto,) * 2
    by_rows = jax.make_mesh((1, len(devices)), names, devices=devices, axis_types=axes)
    return {
        "`Sharded` on 1": tx.Sharded(tx.probe_mesh(devices[:1])),
        f"`Sharded` on {len(devices)}": tx.Sharded(tx.probe_mesh(devices)),
        f"by rows on {len(devices)}": tx.Sharded(by_rows, rows="rows"),
    }


def sharded():
    table("Meshes", "check, relative difference", "found", "allowed", "passed")
    matrix = positive_definite(jnp.float32)
    for name in CALLS:
        for where, execution in meshes().items():
            error = difference(value(name, execution)(matrix), value(name)(matrix))
            check(f"{name}, {where} over `Local`", error, 1e-3)


def estimate_times():
    """Value and derivative."""
    matrix = positive_definite(jnp.float32)
    for name in CALLS:
        others = {"at default precision": value(name, precision="default")}
        others |= {where: value(name, each) for where, each in meshes().items()}
        for other_name, other in others.items():
            compare(name, other_name, value(name), other, matrix)


def first_calls():
    table("First calls of value and derivative", "what", "s")
    for name, seconds in FIRST_CALLS.items():
        row(name, f"{seconds:.1f}")


def main():
    devices = jax.devices()
    kind, platform = devices[0].device_kind, devices[0].platform
    print(f"**{len(devices)} x {kind} ({platform}), jax {jax.__version__}.**", end=" ")
    if platform == "cpu":
        print("No accelerator was at hand: this says that the script runs, no more.")
    timed = [sign_times, estimate_times]
    for section in (
        factorisations,
        estimates,
        precision,
        ill_conditioned,
        control,
        signs,
        sharded,
        first_calls,
        *timed,
    ):
        if section is timed[0]:
            table("Times, ms", "what", "time", "beside", "its time", "ratio")
        try:
            section()
        except Exception:
            traceback.print_exc()
            FAILED.append(section.__name__)
    print(f"\n{len(FAILED)} checks failed. {'; '.join(FAILED)}")
    sys.exit(bool(FAILED))


if __name__ == "__main__":
    main()
