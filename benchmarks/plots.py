"""Draws the tables of `results/` as pictures for a light and for a dark page.

    python benchmarks/plots.py

Each picture holds a digest of its tables, so that a test can tell whether it is current.
Letters are at least 10 points high, for phones.
"""

import math
import re
from hashlib import sha256
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from pages import numbers, Table, tables


IMAGES = Path(__file__).parents[1] / "docs" / "images"
SOURCES = {
    "home": ["calibration"],
    "accuracy": ["accuracy"],
    "coverage": ["calibration"],
    "time": ["dense", "diagonal"],
    "scaling": ["scaling"],
}
SHOWN = {"poly": "eigenvalues $i^{-2}$", "exp": "eigenvalues $0.7^i$", "step": "a step"}
# Color on a light and on a dark page, and line style, of each estimator.
LOOK = {
    "Hutchinson": (("#555555", "#bbbbbb"), "-"),
    "Hutch++": (("#c84e00", "#ff9d4d"), (0, (5, 1.5))),
    "Nystrom++": (("#00805c", "#35cfa0"), (0, (1.5, 1.2))),
    "XTrace": (("#0065ad", "#62b8ff"), "-"),
    "XNysTrace": (("#a3307f", "#f08fd0"), (0, (6, 1.2, 1.5, 1.2))),
}
MARKERS = {"traceax 1.0": "x", "matfree": "o", "curvlinops": "s", "skerch": "^"}
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "traceax",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "savefig.transparent": True,
}
INK = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")


def read(picture: str) -> dict[str, list[Table]]:
    return {name: tables(name) for name in SOURCES[picture]}


def digest(picture: str) -> str:
    return sha256(repr(read(picture)).encode()).hexdigest()


def look(estimator: str, dark: bool) -> dict:
    colors, linestyle = LOOK[estimator]
    return {"color": colors[dark], "linestyle": linestyle}


def marker(package: str, color: str) -> dict:
    shape = {"marker": MARKERS[package], "markerfacecolor": "none", "color": color}
    return {"linestyle": "", "markeredgewidth": 0.9, **shape}


def by_spectrum(found: list[Table]) -> dict[str, Table]:
    return {table.title.split(",")[0]: table for table in found}


def keys(table: Table) -> str:
    return re.findall(r"\d+ keys", table.title)[0]


def split(label: str) -> tuple[str, str]:
    """The package and the estimator of a row."""
    package, _, estimator = label.rpartition(" ")
    return package, estimator


def legend(figure: Figure, styles: dict[str, dict], ncols: int) -> None:
    handles = [Line2D([], [], label=name, **style) for name, style in styles.items()]
    settings = {"handlelength": 2.4, "columnspacing": 1.2, "ncols": ncols}
    figure.legend(handles=handles, loc="outside lower center", **settings)


def estimators(dark: bool) -> dict[str, dict]:
    return {name: look(name, dark) for name in LOOK}


def packages(found: list[Table]) -> dict[str, dict]:
    """Those that are in a table."""
    present = {split(label)[0] for table in found for label in table.rows}
    return {name: marker(name, "gray") for name in MARKERS if name in present}


def power_of_ten(x: float, _) -> str:
    """Without a superscript, which would be too small on a phone."""
    return f"1e{round(math.log10(x))}"


SUBJECT = "How often a 95% interval covers the true trace"
# Where the labels of the published bars stand.
HOME = {"XTrace": (19.5, 0.81), "XNysTrace": (4, 0.61)}


def home(figure: Figure, dark: bool) -> None:
    """One spectrum, for a glance on a phone: larger letters, labels beside the lines."""
    figure.set_size_inches(5.2, 3.2)
    (panel,) = figure.subplots(1, 1, squeeze=False).flat
    table = by_spectrum(read("home")["calibration"])["exp"]
    samples = [int(each) for each in table.columns]
    for estimator, where in HOME.items():
        for bar, linestyle in (("", "-"), (", published", (0, (4, 2)))):
            covered = [numbers(cell)[0] for cell in table.rows[estimator + bar]]
            style = look(estimator, dark) | {"linestyle": linestyle, "linewidth": 2.2}
            panel.semilogx(samples, covered, **style)
        text = f"{estimator}, published bars"
        panel.text(*where, text, color=style["color"], fontsize=11)
    panel.text(3.6, 1.03, "traceax: XTrace, XNysTrace", fontsize=11, weight="bold")
    panel.axhline(0.95, color="gray", linewidth=1)
    panel.text(6, 0.895, "nominal 95%", color="gray", fontsize=11)
    figure.suptitle(SUBJECT, fontsize=12, x=0.02, ha="left")
    panel.set_xlabel(f"samples ({keys(table)}, {SHOWN['exp']})", fontsize=11)
    panel.set_ylim(0.38, 1.09)
    panel.set_yticks((0.4, 0.6, 0.8, 0.95), ("40%", "60%", "80%", "95%"), fontsize=11)
    panel.set_xticks(samples, table.columns, fontsize=11)
    panel.minorticks_off()


def accuracy(figure: Figure, dark: bool) -> None:
    axes = figure.subplots(2, len(SHOWN), sharex=True, sharey="row")
    found = by_spectrum(read("accuracy")["accuracy"])
    for (spectrum, title), (up, down) in zip(SHOWN.items(), axes.T, strict=True):
        products = [int(each) for each in found[spectrum].columns]
        for label, cells in found[spectrum].rows.items():
            package, estimator = split(label)
            style = look(estimator, dark)
            if package != "traceax 2.0":
                style = marker(package, style["color"])
            cells = [numbers(cell) for cell in cells]
            up.loglog(products, [cell[0] for cell in cells], **style)
            if len(cells[0]) > 1:
                down.semilogx(products, [cell[1] for cell in cells], **style)
        up.set_title(title, fontsize=11)
        down.axhline(1, color="gray", linewidth=0.8)
        down.set_xlabel(f"products with the operator ({keys(found[spectrum])})")
    axes[0, 0].set_ylabel("mean relative error")
    axes[0, 0].set_ylim(1e-16, 1)
    axes[1, 0].set_ylabel("error bar / actual error")
    axes[1, 0].set_ylim(0, 2.5)
    axes[1, 0].set_xticks((10, 30, 100, 300), ("10", "30", "100", "300"))
    axes[1, 0].minorticks_off()
    axes[0, 0].yaxis.set_major_formatter(power_of_ten)
    legend(figure, estimators(dark) | packages([*found.values()]), 5)


def coverage(figure: Figure, dark: bool) -> None:
    axes = figure.subplots(2, len(SHOWN), sharex=True, sharey=True)
    found = {
        table.title.split(",")[0]: table for table in read("coverage")["calibration"]
    }
    for (spectrum, title), (up, down) in zip(SHOWN.items(), axes.T, strict=True):
        samples = [int(each) for each in found[spectrum].columns]
        for label, cells in found[spectrum].rows.items():
            estimator, _, bar = label.partition(", ")
            if bar != "jackknife":
                panel = down if bar else up
                covered = [numbers(cell)[0] for cell in cells]
                panel.semilogx(samples, covered, **look(estimator, dark))
        for panel in (up, down):
            panel.axhline(0.95, color="gray", linewidth=0.8)
        up.set_title(title, fontsize=11)
        down.set_xlabel(f"samples ({keys(found[spectrum])})")
    axes[0, 0].set_ylabel("coverage, traceax")
    axes[1, 0].set_ylabel("coverage, published bars")
    axes[0, 0].set_ylim(0.4, 1.02)
    axes[0, 0].set_xticks(samples, [str(m) for m in samples])
    axes[0, 0].minorticks_off()
    legend(figure, estimators(dark), 5)


def time(figure: Figure, dark: bool) -> None:
    axes = figure.subplots(2, 3, sharey=True).flatten()
    (dense,), (cheap,) = read("time").values()
    for name, panel in zip(LOOK, axes, strict=False):
        lines = {split(each)[0]: each for each in dense.rows if split(each)[1] == name}
        draw_times(panel, dense, "A @ block, seconds", lines, name, dark)
        products = [numbers(cell)[0] for cell in dense.rows["A @ block, seconds"]]
        panel.plot(sizes(dense), products, color="gray", linewidth=0.8)
        panel.set_title(f"{name}, dense", fontsize=11)
    lines = {name: name for name in cheap.rows if ", " not in name}
    draw_times(axes[5], cheap, "traceax 2.0, seconds", lines, "Hutchinson", dark)
    axes[5].set_title("Hutchinson, diagonal", fontsize=11)
    for panel in axes[3:]:
        panel.set_xlabel("n")
    for panel in axes[::3]:
        panel.set_ylabel("seconds")
    for panel in axes:
        panel.minorticks_off()
        panel.xaxis.set_major_formatter(power_of_ten)
        panel.yaxis.set_major_formatter(power_of_ten)
    legend(figure, estimators(dark) | packages([dense]), 5)


def sizes(table: Table) -> list[float]:
    return [numbers(column)[0] for column in table.columns]


def draw_times(panel, table, base, lines, estimator, dark) -> None:
    """Of each package, as far as it was run."""
    seconds, height = [numbers(cell)[0] for cell in table.rows[base]], 28
    for package, label in lines.items():
        ratios = [cell for cell in table.rows[label] if not cell.startswith("not run")]
        run = [numbers(ratio)[0] * s for ratio, s in zip(ratios, seconds, strict=False)]
        style = look(estimator, dark)
        if package != "traceax 2.0":
            style = marker(package, style["color"]) | {"linestyle": "-", "linewidth": 0.6}
        panel.loglog(sizes(table)[: len(run)], run, **style)
        if len(run) < len(seconds):
            (memory,) = re.findall(r"(\d+) MB", table.rows[label][len(run)])
            where = sizes(table)[len(run) - 1], run[-1]
            text = f"{package}: {int(memory) / 1000:.0f} GB next"
            offset = {"xytext": (-40, height), "textcoords": "offset points"}
            panel.annotate(text, where, va="center", **offset)
            height -= 13


SPLIT = "probes", "rows"
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def in_mib(cell: str) -> float:
    size, unit = cell.split()
    return float(size) * UNITS[unit] / 2**20 or float("nan")


def look_of_call(name: str, dark: bool) -> dict:
    """That of its estimator; of an adaptive one, and of log-determinants, another."""
    if "adaptive" in name:
        return marker("matfree", "gray") | {"linestyle": ":"}
    estimator = name.split(",")[0]
    return look(estimator if estimator in LOOK else "Nystrom++", dark)


def scaling(figure: Figure, dark: bool) -> None:
    found = {table.title.strip("*"): table for table in read("scaling")["scaling"]}
    styles = {name: look_of_call(name, dark) for name in found}
    axes = figure.subplots(2, 2, sharex=True, sharey="row")
    for column, (split_by, (memory, sent)) in enumerate(zip(SPLIT, axes.T, strict=True)):
        for name, style in styles.items():
            devices = [int(each) for each in found[name].rows]
            cells = [row[3 * column :] for row in found[name].rows.values()]
            memory.loglog(devices, [in_mib(cell[2]) for cell in cells], **style)
            sent.loglog(devices, [in_mib(cell[1]) for cell in cells], **style)
        memory.set_title(f"{split_by} are split", fontsize=11)
        sent.set_xlabel("devices")
    axes[0, 0].set_xticks(devices, [str(count) for count in devices])
    for panel in axes.flat:
        panel.minorticks_off()
        panel.yaxis.set_major_formatter(power_of_ten)
    axes[0, 0].set_ylabel("memory per device, MiB")
    axes[1, 0].set_ylabel("sent by a device, MiB")
    legend(figure, styles, 2)


def draw(picture: str, dark: bool) -> None:
    ink = "#e2e4e9" if dark else "#24292f"
    with mpl.rc_context(STYLE | dict.fromkeys(INK, ink)):
        figure = Figure(figsize=(9, 5.4), layout="constrained")
        globals()[picture](figure, dark)
        metadata = {"Date": None, "Description": digest(picture)}
        path = IMAGES / f"{picture}-{'dark' if dark else 'light'}.svg"
        figure.savefig(path, metadata=metadata)


if __name__ == "__main__":
    for name in SOURCES:
        for dark in (False, True):
            draw(name, dark)
