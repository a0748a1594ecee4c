"""Runs benchmarks and puts what they print into the pages that have a place for it.

    python benchmarks/run.py [name ...]

Without names, all: what a page has between the comments `<!-- name -->` and
`<!-- end of name -->` is replaced by what `benchmarks/name.py` prints. They run in an
environment of their own, `.peers/environment`, with the other packages; the first call
makes it.
"""

import os
import platform
import re
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path


HERE = Path(__file__).parent
ROOT = HERE.parent
RELEASED, ENVIRONMENT = ROOT / ".peers", ROOT / ".peers" / "environment"
PLACE = re.compile(r"<!-- ([\w/]+) -->\n.*?<!-- end of \1 -->", re.DOTALL)
PEERS = ("matfree", "linear_operator", "torch", "skerch", "curvlinops-for-pytorch")


def enter() -> None:
    """This script again, by the environment's Python."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        venv.create(ENVIRONMENT, with_pip=True)
        pip = [str(python), "-m", "pip", "install"]
        subprocess.run([*pip, "-e", f"{ROOT}[examples]", "scipy", *PEERS], check=True)
        released = ["--no-deps", "--target", str(RELEASED), "traceax==1.0.2"]
        subprocess.run([*pip, *released], check=True)
    os.execv(python, [str(python), *sys.argv])


def machine() -> str:
    packages = ("jax", "equinox", "lineax", *PEERS)
    python = f"Python {platform.python_version()}"
    cores = f"{os.cpu_count()} cores ({platform.machine()})"
    found = [f"{name} {version(name)}" for name in packages]
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    commit = f"commit {described.stdout.strip()}"
    return ", ".join([commit, cores, python, *found, "traceax 1.0.2"])


def run(place: re.Match) -> str:
    name = place[1]
    if sys.argv[1:] and name not in sys.argv[1:]:
        return place[0]
    print(f"running {name}", flush=True)
    command = [sys.executable, str(HERE / f"{name}.py")]
    helpers = os.environ | {"PYTHONPATH": str(HERE)}
    done = subprocess.run(
        command, env=helpers, stdout=subprocess.PIPE, text=True, check=True
    )
    text = f"*`benchmarks/{name}.py` on {machine()}.*\n\n{done.stdout.strip()}"
    return f"<!-- {name} -->\n{text}\n<!-- end of {name} -->"


if __name__ == "__main__":
    if Path(sys.prefix) != ENVIRONMENT:
        enter()
    for page in sorted((ROOT / "docs").rglob("*.md")):
        page.write_text(PLACE.sub(run, page.read_text()))
