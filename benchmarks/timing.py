import statistics
import time
from collections.abc import Callable

import equinox as eqx
import jax


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


def alternate(functions, *args, rounds=25, first_calls=3):
    """For each, the median CPU seconds of a call, and those of a first one, with nothing
    left in JAX's caches."""
    first, seconds = ({name: [] for name in functions} for _ in range(2))
    for _ in range(first_calls):
        for name, fn in functions.items():
            jax.clear_caches()
            start = time.process_time()
            jax.block_until_ready(eqx.filter_jit(fn)(*args))
            first[name].append(time.process_time() - start)
    compiled = {name: eqx.filter_jit(fn) for name, fn in functions.items()}
    for fn in compiled.values():
        jax.block_until_ready(fn(*args))
    for _ in range(rounds):
        for name, fn in compiled.items():
            start = time.process_time()
            jax.block_until_ready(fn(*args))
            seconds[name].append(time.process_time() - start)
    return tuple(
        {name: statistics.median(each) for name, each in times.items()}
        for times in (seconds, first)
    )
