"""Runs benchmarks and puts what they print into the page on them.

    pip install matfree scipy matplotlib linear_operator skerch curvlinops-for-pytorch
    pip install --no-deps --target .peers traceax==1.0.2
    python benchmarks/run.py [name ...]

Without names, all that `docs/benchmarks.md` has a place for: what is between the comments
`<!-- name -->` and `<!-- end of name -->` is replaced.
"""

import os
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
PLACE = re.compile(r"<!-- (\w+) -->\n.*?<!-- end of \1 -->", re.DOTALL)
PACKAGES = ("jax", "equinox", "lineax", "matfree", "linear_operator", "torch", "skerch")
PACKAGES += ("curvlinops-for-pytorch",)


def machine() -> str:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    python = f"Python {platform.python_version()}"
    cores = f"{os.cpu_count()} cores ({platform.machine()})"
    return ", ".join([cores, python, *found, "traceax 1.0.2"])


def run(place: re.Match) -> str:
    name = place[1]
    if sys.argv[1:] and name not in sys.argv[1:]:
        return place[0]
    print(f"running {name}", flush=True)
    command = [sys.executable, str(HERE / f"{name}.py")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    text = f"*`benchmarks/{name}.py` on {machine()}.*\n\n{done.stdout.strip()}"
    return f"<!-- {name} -->\n{text}\n<!-- end of {name} -->"


if __name__ == "__main__":
    PAGE.write_text(PLACE.sub(run, PAGE.read_text()))
