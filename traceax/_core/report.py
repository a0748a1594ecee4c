"""The text that `print` shows of answers: values rounded to two digits of their error,
intervals, the cost, and why a call failed.

Text is made from NumPy arrays. Answers that cannot be read (tracers, shapes, arrays of
other processes) are for `equinox.tree_pformat`.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .jax_interfaces import Tracer
from .results import describe_failures


# Numbers from 1e-3 to 1e7 are written without an exponent.
_FIXED_EXPONENTS = range(-3, 7)
# More lines than a screen has are hard to read, and networks have hundreds of leaves.
_MAX_LEAVES = 12


def is_readable(x: Any) -> bool:
    """Whether `x` is a number or an array whose entries this process can read."""
    if not isinstance(x, jax.Array):
        return isinstance(x, np.ndarray | np.generic | int | float | complex)
    # The entries of tracers are unknown, and other processes may hold those of arrays.
    return not isinstance(x, Tracer) and x.is_fully_addressable and not x.is_deleted()


def has_numbers(value: PyTree, std_err: PyTree, result: list[Any], stats: PyTree) -> bool:
    """Whether these are the parts of an answer with numbers. One inside of a program, of
    shapes, or with arrays filtered out has none."""
    parts = value, std_err, result, stats
    leaves = jax.tree.leaves(parts, is_leaf=lambda x: x is None)
    if not (all(map(is_readable, leaves)) and result and jax.tree.leaves(value)):
        return False
    kinds = {_kind(x) for x in jax.tree.leaves((value, std_err))}
    same = jax.tree.map(np.shape, value) == jax.tree.map(np.shape, std_err)
    return same and kinds <= {"f", "c"} and _kind(result[0]) == "i"


def _kind(x: Any) -> str:
    """NumPy's letter for real, complex, and integer numbers."""
    return np.dtype(getattr(x, "dtype", type(x))).kind


def as_number(x: Any) -> Any:
    """A Python number if `x` is one number that can be read, else `x`."""
    return fetch(x).item() if is_readable(x) and np.ndim(x) == 0 else x


def fetch(tree: PyTree) -> Any:
    """The arrays of a tree as NumPy arrays."""
    return jax.tree.map(np.asarray, jax.device_get(tree))


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """A context for reading answers, without the checks that users switch on to find
    errors in programs. While a program is traced, known arrays are computed with at
    once."""
    with (
        jax.ensure_compile_time_eval(),
        jax.transfer_guard("allow"),
        jax.debug_nans(False),
        jax.debug_infs(False),
        np.errstate(all="ignore"),
    ):
        yield


def table(title: str, rows: list[tuple[str, str]]) -> str:
    """A title, and below it a line for each pair of a label and a text."""
    width = max(len(label) for label, _ in rows)
    return "\n".join([title, *(f"  {label:<{width}}  {text}" for label, text in rows)])


def counted(count: Any, name: str) -> str:
    """`"3 steps"`, or `"3 to 5 steps"` for a batch."""
    # The mean of random numbers of steps is not whole.
    low, high = round(float(np.min(count))), round(float(np.max(count)))
    number = str(low) if low == high else f"{low} to {high}"
    return f"{number} {name if number == '1' else name + 's'}"


class _Leaf(NamedTuple):
    """A leaf of a value, with the errors of its entries."""

    label: str
    value: np.ndarray
    std_err: np.ndarray
    sampling: np.ndarray
    quadrature: np.ndarray

    @classmethod
    def of(
        cls,
        label: str,
        value: np.ndarray,
        std_err: np.ndarray,
        bounds: np.ndarray | None,
        batch_axes: int,
    ) -> "_Leaf":
        if bounds is None:
            return cls(label, value, std_err, std_err, np.zeros_like(std_err))
        # Before the axes of the entries are two: the end, and whether it is the bound
        # itself or its standard error.
        ends, bars = np.moveaxis(bounds, (batch_axes + 1, batch_axes), (0, 1))
        distances = np.where(ends == np.real(value), 0, np.abs(ends - np.real(value)))
        return cls(label, value, std_err, bars.max(axis=0), distances.max(axis=0))

    @property
    def error(self) -> np.ndarray:
        return np.maximum(self.std_err, self.quadrature)

    def describe(self) -> str:
        if self.value.ndim == 0:
            return _with_error(self.value, self.std_err)
        if self.value.size == 0:
            return f"{self.value.shape}, no entries"
        sizes, error = np.abs(self.value), self.error
        low_high, kind = (self.value.min(), self.value.max()), ""
        if np.iscomplexobj(self.value):
            low_high, kind = (sizes.min(), sizes.max()), "magnitudes "
        # An entry that is zero for certain has no error.
        median = float(np.median(np.where(error == 0, 0, error / sizes)))
        known = f"median error bar {100 * median:.2g}%"
        unknown = "median error bar unknown"
        bar = unknown if median == math.inf else known if np.any(error) else "exact"
        return "{}, {}{:.4g} to {:.4g}, {}".format(self.value.shape, kind, *low_high, bar)

    def describe_interval(self, low: Any, high: Any) -> str:
        # An infinite error has no digits to round to.
        error = self.error if self.error < math.inf else self.std_err
        if (grid := _Grid.of(self.value, error)) is None:
            return f"{low:.6g} to {high:.6g}"
        return f"{grid.write(low)} to {grid.write(high)}"


def describe_solution(
    *,
    quantity: str,
    method: str,
    value: PyTree[np.ndarray],
    std_err: PyTree[np.ndarray],
    result: np.ndarray,
    stats: dict[str, Any],
    interval: Callable[[], tuple[Any, Any]],
) -> str:
    """The text for a solution, or for a batch of solutions. The arguments are parts of
    `Solution`; `result` are the indices of the members of `RESULTS`, of the shape of the
    batch."""
    batch, exact = result.shape, bool(np.all(stats.get("exact", False)))
    title = quantity + (", exact" if exact else f" by {method}" if method else "")
    if batch:
        title += f", a batch of shape {batch}"
    leaves = _leaves(value, std_err, None if exact else stats.get("bounds"), len(batch))
    rows = [("result", text) for text in describe_failures(result)]
    quadrature = _median([leaf.quadrature for leaf in leaves])
    sampling = _median([leaf.sampling for leaf in leaves])
    if quadrature > sampling:
        text = f"{quadrature:.2g}, larger than the sampling error {sampling:.2g}: "
        rows.append(("quadrature error", text + "more steps reduce it"))
    rows += [(leaf.label, leaf.describe()) for leaf in leaves[:_MAX_LEAVES]]
    if len(leaves) > _MAX_LEAVES:
        rows.append(("...", f"{len(leaves) - _MAX_LEAVES} more leaves"))
    one, *others = leaves
    single = not others and one.value.ndim == 0
    if single and not exact and one.error > 0 and one.std_err < math.inf:
        # Of a container with one leaf, that leaf.
        low, high = jax.tree.leaves(interval())
        rows.append(("95% interval", one.describe_interval(low, high)))
    if "num_matvecs" in stats:
        rows.append(("cost of each" if batch else "cost", _cost(stats, exact)))
    return table(title, rows)


def describe_values(
    *,
    title: str,
    values: np.ndarray,
    errors: np.ndarray,
    result: np.ndarray,
    stats: dict[str, Any],
) -> str:
    """The text for a few numbers, each with an error that cannot be larger, or for a
    batch of such answers."""
    batch = result.shape
    if batch:
        title += f", a batch of shape {batch}"
    rows = [("result", text) for text in describe_failures(result)]
    if batch or len(values) > _MAX_LEAVES:
        leaf = _Leaf.of("values", values, errors, bounds=None, batch_axes=len(batch))
        rows.append((leaf.label, leaf.describe()))
    else:
        pairs = zip(values, errors, strict=True)
        rows += [(str(i), _with_error(*pair)) for i, pair in enumerate(pairs, 1)]
    rows.append(("cost of each" if batch else "cost", _cost(stats, exact=True)))
    return table(title, rows)


def _cost(stats: dict[str, Any], exact: bool) -> str:
    text = counted(stats["num_matvecs"], "matvec")
    if "num_samples" in stats and not exact:
        text += f", {counted(stats['num_samples'], 'sample')}"
        # Without a Krylov method there are no steps.
        if np.any(stats.get("num_steps", 0)):
            text += f" of {counted(stats['num_steps'], 'step')}"
    return text


def _leaves(value: Any, std_err: Any, bounds: Any, batch_axes: int) -> list[_Leaf]:
    paths, treedef = jtu.tree_flatten_with_path(value)
    bars = treedef.flatten_up_to(std_err)
    ends = [None] * len(bars) if bounds is None else treedef.flatten_up_to(bounds)
    return [
        _Leaf.of(jtu.keystr(path) or "value", entries, bar, end, batch_axes)
        for (path, entries), bar, end in zip(paths, bars, ends, strict=True)
    ]


def _median(arrays: list[np.ndarray]) -> float:
    entries = np.concatenate([x.ravel() for x in arrays])
    return float(np.median(entries)) if entries.size else 0.0


def _with_error(value: np.ndarray, error: np.ndarray) -> str:
    """`3336.2 +- 2.6`."""
    digits = str(value[()])  # as many as its dtype has
    if not np.isfinite(value):
        return digits
    if error == 0 or error == math.inf:
        return f"{digits}, {'exact' if error == 0 else 'error bar unknown'}"
    grid = _Grid.of(value, error)
    if grid is None:
        return f"{digits} +- {error:.2g}"
    text = f"{grid.round(value)} +- {grid.round(error)}"
    return f"({text}){grid.suffix}" if grid.suffix else text


class _Grid(NamedTuple):
    """The numbers with this exponent, and with so many decimals of the mantissa."""

    exponent: int
    decimals: int

    @classmethod
    def of(cls, value: Any, error: Any) -> "_Grid | None":
        """The grid on which `error` has two digits. None if there are none, or more
        digits of `value` than it has."""
        size = max(abs(value.real), abs(value.imag), error)
        if not np.isfinite(size) or error <= np.finfo(value.dtype).eps * size:
            return None
        exponent, of_error = (int(f"{x:.1e}".partition("e")[2]) for x in (size, error))
        exponent = 0 if exponent in _FIXED_EXPONENTS else exponent
        return cls(exponent=exponent, decimals=exponent - of_error + 1)

    @property
    def suffix(self) -> str:
        return f"e{self.exponent:+03d}" if self.exponent else ""

    def write(self, x: Any) -> str:
        return self.round(x) + (self.suffix if np.isfinite(x) else "")

    def round(self, x: Any) -> str:
        """The mantissa of a number."""
        if np.iscomplexobj(x):
            imag = self.round(x.imag)
            return f"({self.round(x.real)}{'' if imag[0] == '-' else '+'}{imag}j)"
        mantissa = round(float(x) / 10.0**self.exponent, self.decimals)
        return f"{mantissa + 0.0:.{max(self.decimals, 0)}f}"  # no -0.0
