import statistics
import time
from collections.abc import Callable

import equinox as eqx
import jax
import numpy as np


def interleaved(functions: dict[str, Callable[[], object]], rounds: int = 7):
    """Median and range of the seconds of each function, called in turn `rounds` times
    after one call that compiles."""
    seconds = {name: [] for name in functions}
    for function in functions.values():
        jax.block_until_ready(function())
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function())
            seconds[name].append(time.perf_counter() - start)
    return {
        name: (statistics.median(each), min(each), max(each))
        for name, each in seconds.items()
    }


def spread(times: tuple[float, float, float], base: float) -> str:
    """The median over `base`, and in brackets the smallest and the largest."""
    median, low, high = (each / base for each in times)
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def alternate(functions, *args, rounds=9):
    """For each, the median CPU seconds of a call, and those of the first one."""
    first, seconds, compiled = {}, {name: [] for name in functions}, {}
    for name, fn in functions.items():
        compiled[name] = eqx.filter_jit(fn)
        start = time.process_time()
        jax.block_until_ready(compiled[name](*args))
        first[name] = time.process_time() - start
    for _ in range(rounds):
        for name, fn in compiled.items():
            start = time.process_time()
            jax.block_until_ready(fn(*args))
            seconds[name].append(time.process_time() - start)
    return {name: float(np.median(x)) for name, x in seconds.items()}, first
