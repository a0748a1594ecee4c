"""CPU seconds of the first call in a process whose programs another one has kept.

    python benchmarks/cached_calls.py

The call in the example of each public function's docstring, in two processes with JAX's
persistent cache between them: seconds of either, without the example's other lines, and
how many programs the second one compiled although the first one had compiled them. The
last row is an empty `jax.jit`. The least of two pairs of processes.
"""

import contextlib
import functools as ft
import inspect
import os
import re
import subprocess
import sys
import tempfile
import time


def names() -> list[str]:
    """The public functions that make programs."""
    import traceax as tx

    public = {name: getattr(tx, name) for name in tx.__all__}
    functions = {name: x for name, x in public.items() if inspect.isfunction(x)}
    calls = [
        name
        for name, x in functions.items()
        if "throw" in inspect.signature(x).parameters
    ]
    return [*calls, "check_operator"]


def example_of(function) -> str:
    found = re.search(r"```python\n(.*?)```", function.__doc__, re.DOTALL)
    return inspect.cleandoc("\n" + found[1]) if found else ""


def seconds_of(call):
    """The result of a call, when it is there, and the CPU seconds until then."""
    import jax

    start = time.process_time()
    result = jax.block_until_ready(call())
    return result, time.process_time() - start


def first_call(name: str) -> None:
    """Print the seconds of the example's call, and how many programs were compiled."""
    import jax

    events, found = [], []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))

    def timed(function, *args, **kwargs):
        events.clear()
        result, seconds = seconds_of(lambda: function(*args, **kwargs))
        names = [event.rpartition("/")[2] for event in events]
        asked, kept = map(names.count, ("compile_requests_use_cache", "cache_hits"))
        found.append((seconds, asked - kept))
        return result

    timed(jax.jit(lambda x: x), 0.0)
    if name:
        import traceax as tx

        function = getattr(tx, name)
        setattr(tx, name, ft.partial(timed, function))
        with contextlib.redirect_stdout(None):
            exec(example_of(function), {})
    print(*found[1 if name else 0])


def in_process(name: str, folder: str) -> tuple[float, int]:
    settings = {
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, __file__, "call", name]
    output = subprocess.check_output(command, env=os.environ | settings, text=True)
    seconds, compiled = output.split()
    return float(seconds), int(compiled)


def main() -> None:
    print("| first call | a new process | the next process | not kept |")
    print("|---|---|---|---|")
    for name in [*(sys.argv[1:] or names()), ""]:
        pairs = []
        for _ in range(2):
            with tempfile.TemporaryDirectory() as folder:
                pairs.append([in_process(name, folder) for _ in range(2)])
        first, second = (min(x) for x in zip(*pairs, strict=True))
        label = f"`{name}`" if name else "an empty `jax.jit`"
        cells = f"{first[0]:.2f} s | {second[0]:.2f} s | {second[1]}"
        print(f"| {label} | {cells} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["call"]:
        first_call(sys.argv[2])
    else:
        main()
