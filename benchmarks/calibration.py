"""How honest the standard errors are, as markdown tables, two for each n.

    python benchmarks/calibration.py [keys] [n ...]

For m = 10, 30 and 60 probes in the estimate: the mean of the standard error over the
root-mean-square error (1 is exact, more is cautious), and how often the 95% interval with
Student's quantile for m - 1 degrees of freedom, covers the exact trace. The published
errors of XTrace and XNysTrace are `std(samples) / sqrt(m)`.
"""

import sys

import jax
import jax.numpy as jnp
from scipy.stats import t as student
from spectra import ESTIMATORS, matrix_with, spectra, trace_many


jax.config.update("jax_enable_x64", True)
PROBES = (10, 30, 60)


def main(n: int, num_keys: int) -> None:
    ratios, coverages = {}, {}
    for spectrum, eigenvalues in spectra(n).items():
        matrix, exact = matrix_with(eigenvalues), jnp.sum(eigenvalues)
        for name, (estimator, factor) in ESTIMATORS.items():
            for m in PROBES:
                value, std_err, stats = trace_many(
                    matrix, estimator, factor * m, num_keys
                )
                error = jnp.abs(value - exact)
                bars = {name: std_err}
                if "jackknife_std_err" in stats:
                    bars[f"{name}, jackknife"] = stats["jackknife_std_err"]
                    bars[f"{name}, published"] = stats["independent_std_err"]
                quantile = student.ppf(0.975, m - 1)
                for label, bar in bars.items():
                    ratio = jnp.mean(bar) / jnp.sqrt(jnp.mean(error**2))
                    covered = jnp.mean(error <= quantile * bar)
                    ratios.setdefault(label, {}).setdefault(spectrum, []).append(ratio)
                    coverages.setdefault(label, {}).setdefault(spectrum, []).append(
                        covered
                    )
    titles = {
        "mean of the standard error over the root-mean-square error": ratios,
        "coverage of the 95% interval": coverages,
    }
    for title, table in titles.items():
        samples = " / ".join(map(str, PROBES))
        print(f"\n**n = {n}, {num_keys} keys, m = {samples} samples: {title}**\n")
        print("| | " + " | ".join(spectra(n)) + " |")
        print("|---" * (1 + len(spectra(n))) + "|")
        for label, row in table.items():
            cells = [" / ".join(f"{x:.2f}" for x in cell) for cell in row.values()]
            print(f"| {label} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    num_keys, *sizes = [int(each) for each in sys.argv[1:]] or [400, 300, 1000]
    for n in sizes:
        main(n, num_keys)
