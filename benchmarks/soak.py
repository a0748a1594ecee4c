"""An hour of random jobs: is each answer right, flagged or refused, and is memory given
back?

    OPENBLAS_NUM_THREADS=1 python benchmarks/soak.py [--jobs 200] [--minutes 60]
    python benchmarks/soak.py --only SEED

A job makes one public call, of a random operator with random options: plainly, compiled,
for several keys at the same time or differentiated; on one device or on several simulated
ones; with `throw` or without. The soak ends after the jobs and the minutes, whichever
takes longer. A job is wrong if

- it raises anything but the documented errors: `TypeError`, `ValueError` and
  `NotImplementedError` of traceax itself, which count as refused, and the failures of
  `traceax.RESULTS`, which count as flagged;
- an answer that is not flagged is more than eight error bars from that of NumPy in double
  precision (with few samples, as many as Student's t takes for one in 1e8), beyond
  rounding and what depends on eigenvalues of the size of rounding errors;
- such an answer, or its derivative, is not finite; or
- it takes longer than ten minutes, which ends the process with a traceback.

Each job begins with a line that has its seed. Programs that were compiled stay in caches
of JAX and Equinox, and would be most of the memory: after each job the soak clears these,
collects garbage and returns free memory to the system. What remains at the end may be at
most 1.2 times what remained after ten jobs.
"""

import argparse
import ctypes
import faulthandler
import functools
import gc
import os
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import scipy.stats
import soak_calls
import soak_functions
from soak_calls import Found, found_of, Job
from soak_operators import Draw

import traceax as tx


CALLS = (
    soak_calls.trace,
    soak_calls.controlled_trace,
    soak_calls.diagonal,
    soak_calls.leaf_traces,
    soak_calls.estimate,
    soak_calls.frobenius_norm,
    soak_calls.row_norms,
    soak_calls.frobenius_products,
    soak_calls.minibatch_trace,
    soak_calls.dynamic_trace,
    soak_calls.divergence,
    soak_calls.laplacian,
    soak_functions.trace_of_function,
    soak_functions.logdet,
    soak_functions.preconditioned_logdet,
    soak_functions.gaussian_log_prob,
    soak_functions.trace_difference,
    soak_functions.trace_of_solves,
    soak_functions.schatten_norm,
    soak_functions.log_trace_exp,
    soak_functions.diagonal_of_function,
    soak_functions.diagonal_of_product,
    soak_functions.function_of,
    soak_functions.eigsh,
    soak_functions.svds,
    soak_functions.spectral_density,
    soak_functions.check_operator,
)
LIMIT = 600  # seconds for a job
KEYS = 3
PACKAGE = str(Path(tx.__file__).parent)
MESSAGES = [text.split("\n")[0] for text in tx.RESULTS._index_to_message if text]


class Run:
    """One job: all that its seed decides. The seeds take the calls by turns."""

    def __init__(self, seed: int):
        draw = Draw(seed)
        call = CALLS[seed % len(CALLS)]
        self.job: Job = call(draw)
        self.mode = draw.one_of(*self.job.modes)
        self.key = jr.key(seed)
        blocks = tx.Local(), tx.Local(), tx.Local(block_size=3)
        meshes = [tx.Sharded(tx.probe_mesh(jax.devices()[:d])) for d in (1, 3, 4)]
        self.settings = {
            "execution": draw.one_of(*blocks, *meshes),
            "throw": draw.one_of(True, False),
        }
        options = " ".join(f"{k}={v}" for k, v in self.job.options.items())
        execution = self.settings["execution"]
        where = type(execution).__name__
        if isinstance(execution, tx.Sharded):
            where += f"({execution.mesh.size})"
        self.text = " ".join(
            f"{call.__name__}, {self.job.subject}, {self.mode}, {where}, "
            f"throw={self.settings['throw']}, {options}".split()
        )

    def __call__(self) -> tuple[Found, Any]:
        """The answers, and the derivative in a factor of the operator, if asked for."""
        job, fixed = self.job, isinstance(self.job.options.get("num_steps"), int)

        def solve(parts, key, factor=None):
            operator = job.subject.make(parts)
            if factor is not None:
                operator = factor * operator
            answer = job.call(operator, key=key, **job.options, **self.settings)
            return found_of(answer, fixed)

        def objective(factor, parts, key):
            found = solve(parts, key, factor)
            return jnp.sum(found.value.real), found

        parts, slope = job.subject.parts, None
        if self.mode == "plain":
            found = solve(parts, self.key)
        elif self.mode == "jit":
            found = jax.jit(solve)(parts, self.key)
        elif self.mode == "vmap":
            found = jax.vmap(lambda key: solve(parts, key))(jr.split(self.key, KEYS))
        else:
            one = jnp.ones((), soak_calls.real_dtype(job.subject))
            slope, found = jax.grad(objective, has_aux=True)(one, parts, self.key)
        if self.mode != "vmap":
            found = jax.tree.map(lambda x: x[None], found)
        return jax.tree.map(np.asarray, (found, slope))


def outcome(seed: int) -> tuple[str, str]:
    """Run a job: a word, and what is to be said of it."""
    print(f"--only {seed}: ", end="", flush=True)
    try:
        run = Run(seed)
        print(run.text, flush=True)
        found, slope = run()
    except (TypeError, ValueError, NotImplementedError) as error:
        *_, last = traceback.extract_tb(error.__traceback__)
        by_us = last.filename.startswith(PACKAGE) and str(error)
        if not by_us:
            traceback.print_exc()
        return "refused" if by_us else "WRONG", f"{type(error).__name__}: {error}"
    except RuntimeError as error:
        flags = [flag for flag in MESSAGES if flag in str(error)]
        return ("flagged", flags[0]) if flags else ("WRONG", str(error))
    except Exception as error:
        traceback.print_exc()
        return "WRONG", f"{type(error).__name__}: {error}"
    words = []
    for i in range(len(found.value)):
        one = jax.tree.map(lambda x, i=i: np.asarray(x[i]), found)
        derivative = None if slope is None else float(slope)
        words.append(judged(run.job, one, derivative))
    return max(words, key=lambda pair: ORDER.index(pair[0]))


ORDER = "flagged", "unknown", "few samples", "right", "WRONG"


def judged(job: Job, found: Found, slope: float | None) -> tuple[str, str]:
    if message := str(tx.RESULTS[found.result]):
        return "flagged", message.split("\n")[0]
    if not np.all(np.isfinite(found.value)) or np.any(np.isnan(found.std_err)):
        return "WRONG", f"not finite: {found}"
    if slope is not None and not np.isfinite(slope):
        return "WRONG", f"derivative {slope}"
    with np.errstate(all="ignore"):
        exact, change = exact_and_change(job, job.exact)
        rounding = change + rounding_of(job, exact)
    if not np.all(np.isfinite(rounding)):
        return "unknown", ""
    if not found.exact and found.freedom < (5 if job.linear else 10):
        return "few samples", ""
    error = found.value - exact
    quantile = max(8.0, scipy.stats.t.ppf(1 - 5e-9, found.freedom))
    bar = quantile * np.where(found.std_err > 0, found.std_err, 0)
    for part in (np.real(error), np.imag(error)):
        off = np.maximum(part - found.below, -part - found.above) - bar - rounding
        if np.any(off > 0):
            i = np.argmax(off)
            numbers = np.ravel(found.value)[i], np.ravel(exact)[i], np.ravel(bar)[i]
            return "WRONG", "value {}, exactly {}, bars {}".format(*numbers)
    return judged_slope(job, found, slope)


def judged_slope(job: Job, found: Found, slope: float | None) -> tuple[str, str]:
    """Derivatives have no error bars: those of exact answers are compared."""
    if slope is None or not found.exact:
        return "right", ""

    def derivative(matrix):
        h = 1e-5
        change = np.ravel(job.exact((1 + h) * matrix) - job.exact((1 - h) * matrix))
        return np.sum(change.real, keepdims=True) / (2 * h)

    with np.errstate(all="ignore"):
        exact, change = exact_and_change(job, derivative)
        size = np.sum(np.broadcast_to(rounding_of(job, exact), np.shape(found.value)))
    allowed = 1e-3 * abs(exact[0]) + change[0] + 100 * size
    if abs(slope - exact[0]) > allowed:
        return "WRONG", f"derivative {slope}, exactly {exact[0]}"
    return "right", ""


def exact_and_change(job: Job, exact: Any) -> tuple[np.ndarray, Any]:
    """The truth, and how it changes with eigenvalues of the size of rounding errors."""
    matrix = job.subject.matrix
    value = np.ravel(exact(matrix))
    if job.linear:
        return value, np.zeros(value.shape)
    eps = max(float(jnp.finfo(job.subject.dtype).eps), 8 * np.finfo(float).eps)
    left, sizes, right = np.linalg.svd(matrix, full_matrices=False)
    unit = (
        np.eye(len(matrix)) if job.subject.kind in ("psd", "hermitian") else left @ right
    )
    moved = [exact(matrix + sign * eps * sizes[0] * unit) for sign in (1, -1)]
    return value, np.max([np.abs(np.ravel(x) - value) for x in moved], axis=0)


def rounding_of(job: Job, exact: np.ndarray) -> np.ndarray:
    """Of the products, and of sums in the dtype of values."""
    dtype = job.subject.dtype
    working = jnp.promote_types(dtype, jnp.float32)
    eps, wide = (float(jnp.finfo(x).eps) for x in (dtype, working))
    n = max(job.subject.matrix.shape)
    size = np.maximum(np.abs(exact), np.ravel(job.terms(job.subject.matrix)))
    return 16 * (2 * eps + wide * n**0.5) * size + n**2 * float(jnp.finfo(working).tiny)


def resident() -> float:
    """Memory of the process in MB, without what can be made anew."""
    jax.clear_caches()
    for cache in gc.get_objects():
        if isinstance(cache, functools._lru_cache_wrapper):
            cache.cache_clear()
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    arguments = parser.parse_args()
    if arguments.only is not None:
        print(*outcome(arguments.only))
        return
    start, counts, wrong, memory = time.monotonic(), Counter(), [], []
    seed = arguments.seed
    while (
        len(memory) < arguments.jobs or time.monotonic() - start < 60 * arguments.minutes
    ):
        begin = time.monotonic()
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        word, note = outcome(seed)
        faulthandler.cancel_dump_traceback_later()
        memory.append(resident())
        arrays = len(jax.live_arrays())
        seconds = time.monotonic() - begin
        print(f"    {word} {note}", flush=True)
        print(f"    {seconds:.0f} s, {memory[-1]:.0f} MB, {arrays} arrays", flush=True)
        counts[word] += 1
        if word == "WRONG":
            wrong.append(seed)
        seed += 1
    ratio = memory[-1] / memory[min(9, len(memory) - 1)]
    minutes = (time.monotonic() - start) / 60
    print(f"{len(memory)} jobs in {minutes:.0f} minutes:", dict(counts))
    print(f"memory: {memory[-1]:.0f} MB, {ratio:.2f} of that after ten jobs")
    for seed in wrong:
        print(f"python benchmarks/soak.py --only {seed}")
    sys.exit(bool(wrong) or ratio > 1.2)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main()
