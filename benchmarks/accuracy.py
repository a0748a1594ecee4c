"""Error, and what the error bars say of it, against products: ours and the peers'.

    python benchmarks/accuracy.py [keys]

Prints the mean relative error, and in brackets the mean standard error over the root mean
square of the error, for each spectrum and budget, as markdown tables, and draws both in
`docs/images/accuracy.svg`. n = 1000, float64. See `peers.py` for how to install them.
"""

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from matplotlib.figure import Figure
from peers import peer_functions
from spectra import ESTIMATORS, matrix_with, spectra

import traceax as tx


jax.config.update("jax_enable_x64", True)
N, BUDGETS = 1000, (10, 20, 30, 60, 90, 150, 300)
SHOWN = ("poly", "exp", "step")
IMAGE = Path(__file__).parents[1] / "docs" / "images" / "accuracy.svg"


def make_operator(matrix):
    structure = jax.ShapeDtypeStruct(matrix.shape[:1], matrix.dtype)
    tag = lx.positive_semidefinite_tag
    return lx.FunctionLinearOperator(lambda v: matrix @ v, structure, tag)


def ours(estimator, k, matrix, key):
    solution = tx.trace(make_operator(matrix), estimator, k=k, key=key, throw=False)
    return solution.value, solution.std_err


def functions(k):
    """`(matrix, key) -> (value, std_err)` by package and estimator."""
    mine = {name: partial(ours, each, k) for name, (each, _) in ESTIMATORS.items()}
    peers = peer_functions(make_operator, lambda v, a: a @ v, N, k, jnp.float64)
    return {"traceax 2.0": mine} | peers


def measure(function, matrix, exact, num_keys):
    """The mean relative error, and the mean standard error over the error."""
    keys = jax.random.split(jax.random.key(3), num_keys)
    run = jax.jit(lambda matrix: jax.lax.map(partial(function, matrix), keys))
    value, std_err = run(matrix)
    error = value - exact
    ratio = jnp.mean(std_err) / jnp.sqrt(jnp.mean(error**2))
    return float(jnp.mean(jnp.abs(error)) / exact), float(ratio)


def draw(results):
    colors = {name: f"C{i}" for i, name in enumerate(ESTIMATORS)}
    styles = {
        "traceax 2.0": {"linestyle": "-"},
        "traceax 1.0": {"linestyle": "", "marker": "x"},
        "matfree": {"linestyle": "", "marker": "o", "markerfacecolor": "none"},
    }
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots(2, len(SHOWN), sharex=True, sharey="row")
    for (spectrum, package, name), cells in results.items():
        if spectrum not in SHOWN:
            continue
        up, down = axes[:, SHOWN.index(spectrum)]
        style = {"color": colors[name], "markersize": 6} | styles[package]
        error, ratio = np.array(cells).T
        up.loglog(BUDGETS, error, **style)
        if package == "traceax 2.0" or np.isfinite(ratio).any():
            down.semilogx(BUDGETS, ratio, **style)
    for column, spectrum in enumerate(SHOWN):
        axes[0, column].set_title(f"eigenvalues: {spectrum}")
        axes[1, column].axhline(1, color="0.5", linewidth=1)
        axes[1, column].set_xlabel("products with the operator")
    axes[0, 0].set_ylabel("mean relative error")
    axes[0, 0].set_ylim(1e-16, 1)
    axes[1, 0].set_ylabel("standard error / actual error")
    axes[1, 0].set_ylim(0, 2.5)
    axes[1, 0].set_xticks((10, 30, 100, 300), ("10", "30", "100", "300"))
    handles = [axes[0, 0].plot([], [], color=c, label=n)[0] for n, c in colors.items()]
    for package, style in styles.items():
        (handle,) = axes[0, 0].plot([], [], color="0.3", label=package, **style)
        handles.append(handle)
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    figure.savefig(IMAGE, facecolor="white")


def main(num_keys: int) -> None:
    results = {}
    for spectrum, eigenvalues in spectra(N).items():
        matrix, exact = matrix_with(eigenvalues), jnp.sum(eigenvalues)
        for k in BUDGETS:
            for package, estimators in functions(k).items():
                for name, function in estimators.items():
                    cells = results.setdefault((spectrum, package, name), [])
                    cells.append(measure(function, matrix, exact, num_keys))
        print(f"\n{spectrum}, {num_keys} keys\n")
        print("| |" + "".join(f" {k} |" for k in BUDGETS))
        print("|---|" + "---|" * len(BUDGETS))
        for (each, package, name), cells in results.items():
            if each == spectrum:
                row = [f"{error:.1e} ({ratio:.2f})" for error, ratio in cells]
                row = [cell.removesuffix(" (nan)") for cell in row]
                print(f"| {package} {name} | " + " | ".join(row) + " |", flush=True)
    draw(results)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
