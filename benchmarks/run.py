"""Runs benchmarks and writes what they print to `results/`, for the documentation.

    python benchmarks/run.py [name ...]

Without names, all that have a result but those for accelerators: `results/name.md` gets
what `name.py` prints. A page shows it by the line `--8<-- "name.md"`; what no page shows
is on the page of further measurements. Then `plots.py` draws the tables. Those that take
no times run one on each core, the others after them, alone. All run in an environment of
their own, `.peers/environment`, with the other packages; the first call makes it.
"""

import functools as ft
import os
import platform
import re
import subprocess
import sys
import venv
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from importlib.metadata import version
from pathlib import Path


HERE = Path(__file__).parent
ROOT, RESULTS = HERE.parent, HERE / "results"
RELEASED, ENVIRONMENT = ROOT / ".peers", ROOT / ".peers" / "environment"
PEERS = {
    "matfree": "0.6.3",
    "linear_operator": "0.6.1",
    "torch": "2.13.0",
    "skerch": "1.2.0",
    "curvlinops-for-pytorch": "3.0.1",
}


def enter() -> None:
    """This script again, by the environment's Python."""
    python = ENVIRONMENT / "bin" / "python"
    if not (RELEASED / "traceax").exists():  # what is installed last
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install"]
        peers = [f"{name}=={release}" for name, release in PEERS.items()]
        subprocess.run([*pip, "-e", f"{ROOT}[examples]", "scipy", *peers], check=True)
        released = ["--no-deps", "--target", str(RELEASED), "traceax==1.0.2"]
        subprocess.run([*pip, *released], check=True)
    os.execv(python, [str(python), *sys.argv])


def described() -> str:
    """The commit, the machine and the releases."""
    git = ["git", "-C", str(ROOT)]
    # The tables may be filled in several runs: their changes are no changes of the code.
    filled = [f":(exclude){path}" for path in ("benchmarks/results", "docs/images")]
    status = [*git, "status", "--porcelain", "--untracked-files=no", "--", ".", *filled]
    dirty = "-dirty" if subprocess.check_output(status) else ""
    commit = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True)
    commit = commit.strip() + dirty
    packages = ("jax", "equinox", "lineax", *PEERS)
    found = [f"{name} {version(name)}" for name in packages]
    python = f"Python {platform.python_version()}"
    cores = f"{os.cpu_count()} cores ({platform.machine()})"
    return ", ".join([f"commit {commit}", cores, python, *found, "traceax 1.0.2"])


def takes_times(name: str) -> bool:
    source = (HERE / f"{name}.py").read_text()
    return bool(re.search(r"^(import time|from timing import)\b", source, re.MULTILINE))


def printed(name: str, **settings: str) -> str:
    print(f"{datetime.now():%H:%M} running {name}", flush=True)
    command = [sys.executable, str(HERE / f"{name}.py")]
    # Idle threads of LAPACK would be in the way of others: see `lapack_threads.py`.
    usual = {"PYTHONPATH": str(HERE), "OPENBLAS_NUM_THREADS": "1"}
    variables = os.environ | usual | settings
    return subprocess.check_output(command, env=variables, text=True).strip()


def fill(name: str, machine: str, **settings: str) -> bool:
    """Write what `name.py` prints. If it fails, write nothing, and return False."""
    try:
        table = printed(name, **settings)
    except subprocess.CalledProcessError:
        return False
    text = f"*`benchmarks/{name}.py` on {machine}.*\n\n{table}\n"
    (RESULTS / f"{name}.md").write_text(text)
    return True


def main(wanted: list[str]) -> None:
    machine = described()  # before results change
    kept = [path.relative_to(RESULTS).with_suffix("") for path in RESULTS.rglob("*.md")]
    default = sorted(str(name) for name in kept if name.parts[0] != "accelerator")
    names = wanted or default
    alone = [name for name in names if takes_times(name)]
    together = [name for name in names if name not in alone]
    one_thread = ft.partial(fill, machine=machine, NPROC="1", OMP_NUM_THREADS="1")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        filled = list(pool.map(one_thread, together))
    filled += [fill(name, machine) for name in alone]
    printed("plots")
    done = dict(zip([*together, *alone], filled, strict=True))
    if failed := [name for name, is_done in done.items() if not is_done]:
        sys.exit(f"These failed, and keep their old results: {', '.join(failed)}")


if __name__ == "__main__":
    if Path(sys.prefix) != ENVIRONMENT:
        enter()
    main(sys.argv[1:])
