"""The rule of adaptive budgets: stop as soon as

    q std_err <= max(atol, rtol |value|),

with the quantile q of Student's t for the number of samples. In the code, `tolerance` is
the right-hand side, and `excess` is the left-hand side divided by it.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Inexact, PyTree, Real, Scalar

from .._core.checks import (
    check_flag,
    check_scalar,
    concrete_number,
    plain_integer,
    real_scalar,
    refuse_traced,
)
from .._core.quantiles import normal_quantile, student_quantile
from .._numerics.dense import two_norm


# The relative tolerance where none is given: an error of one percent is small enough for
# most uses, and few samples reach it.
_DEFAULT_RTOL = 1e-2
# The smallest `min_samples`: with fewer samples the estimated variance is often far too
# small, and a test would stop by chance.
_FEWEST_SAMPLES = 4
# How many times the tolerance the estimate of the rounding error may be. It is an upper
# estimate, and must not fail calls whose actual error is below the tolerance.
_FLOOR_ALLOWANCE = 4


@runtime_checkable
class ProgressMeter(Protocol):
    """The interface of progress meters of `equinox` and `diffrax`."""

    def init(self) -> Any:
        """The state of a new meter."""
        ...

    def step(self, state: Any, progress: Any) -> Any:
        """The state after a round; `progress` is a traced number from 0 to 1."""
        ...

    def close(self, state: Any) -> None:
        """End the run."""
        ...


class Adaptive(eqx.Module):
    r"""A budget that ends when the estimate is accurate enough: pass it as `k`.

    Probes are added in rounds until, with the requested confidence, the error is below
    the tolerance: until $q\, \mathrm{std\_err} \le \max(\mathrm{atol}, \mathrm{rtol}\,
    |\mathrm{value}|)$, where $q$ is the quantile of Student's t for the number of
    samples. This test is for the sampling error. The reported `std_err` also includes an
    upper estimate of the rounding error. If that estimate is above four tolerances, a
    call for a single number fails, since no further sample would help; for a value with
    several entries, look at `std_err`. The loop is compiled once, whatever the data; the
    tolerances may be traced.

    The test comes after each round; estimators that take their probes together, such as
    XTrace, leave out more and more tests after the first 8 rounds. Repeated tests stop a
    little early more often than late. The error bars are cautious enough that intervals
    still cover the true value with the requested confidence: see [Stop at a
    tolerance](../adaptive.md) for measurements.

    !!! Example

        ```python
        import jax
        import lineax as lx
        import traceax as tx

        x = jax.random.normal(jax.random.key(0), (500, 200))
        operator = lx.MatrixLinearOperator(x @ x.T)
        k = tx.Adaptive(rtol=0.02, max_k=400)
        key = jax.random.key(1)
        solution = tx.trace(operator, tx.HutchinsonEstimator(), k=k, key=key)
        print(solution.value, "+-", solution.std_err, solution.stats["num_matvecs"])
        ```


    **Attributes:**

    - `rtol`, `atol`: relative and absolute tolerance, real scalars. If neither is given,
        `rtol` is 0.01, and otherwise the other one is 0.
    - `max_k`: the largest budget, in the units of `k`: matvecs for traces, diagonals,
        Frobenius and row norms, divergences and Laplacians; products with f(A) for
        [`traceax.diagonal_of_function`][]; probes for log-determinants, Schatten norms
        and other traces of functions. It is rounded down to whole rounds. Array shapes
        and memory depend on it. If it is at least n plus one round (or n plus the
        smallest budget of the estimator, if that is more), the call cannot run out of
        it: n units are reserved for the exact answer. The estimate spends at most the
        others, and not more than n. After that, or as soon as independent samples show
        that they would need more than n further units, the exact answer is computed. A
        call that resumes one without such a reserve has one if its `max_k` is larger by n
        (or is `2 n`, if that is less).

        If it is left out, the estimate spends at most n units, and at most 10,000; an
        estimator whose probes are taken together (XTrace, XNysTrace, Hutch++ and others)
        at most 512, and fewer where its buffers would have more than $2^{28}$ numbers.
        Then n units are reserved for the exact answer if n is at most 10,000; for
        functions of operators, whose exact answer takes a factorisation, if n is at most
        4096 (1024 without a tag). For a larger n a call may end as
        `RESULTS.max_matvecs_reached`.
    - `confidence`: the probability with which the error is to be below the tolerance.
    - `min_samples`: the number of samples before the first test.
    - `round_size`: how much of the budget a round spends, in the same units.
    - `history`: whether `stats["history"]`, shape `(rounds, 3)`, has the budget spent,
        in the units of `k`, the value and the standard error after each round of this
        call. Other rows are infinite, and so are entries of `stats` for samples that were
        not made.
    - `progress`: `True` for a progress bar, by `tqdm` where that is installed, and as
        text otherwise. Or a progress meter, an object with the methods `init`, `step` and
        `close` of the meters of `equinox` and `diffrax`. It shows the fraction of the
        budget that is spent, or the fraction of the budget that the tolerance will take
        at this rate, whichever is larger.
    - `callback`: a function that is called on the host after each round with the budget
        spent, the value and the standard error, to print or to log them. It is static:
        pass the same function again, since another one compiles anew. An exception in it
        ends the run after that round, and the call raises it; inside `jax.jit` it is
        printed, and the result is `RESULTS.interrupted`.
    - `norm`: a norm of PyTrees, for values with several entries. The norms of the value
        and of the standard error are compared with the tolerances, and reported by
        `history` and `callback`. The default is the two-norm; norms of `optimistix` fit.
        A function to a vector asks for the tolerance of each of its entries, of which the
        one with the largest error, as a multiple of its tolerance, is reported:
        [`traceax.each_leaf`][] and [`traceax.each_entry`][]. It is static, like
        `callback`.
    """

    rtol: Real[Array | np.ndarray, ""]
    atol: Real[Array | np.ndarray, ""]
    max_k: int | None = eqx.field(static=True)
    confidence: float = eqx.field(static=True)
    min_samples: int = eqx.field(static=True)
    round_size: int = eqx.field(static=True)
    history: bool = eqx.field(static=True)
    progress: ProgressMeter
    callback: Callable[[Any, Any, Any], None] | None = eqx.field(static=True)
    norm: Callable[[PyTree], Array] = eqx.field(static=True)

    def __init__(
        self,
        *,
        rtol: Scalar | float | None = None,
        atol: Scalar | float | None = None,
        max_k: int | None = None,
        confidence: float = 0.95,
        min_samples: int = 10,
        round_size: int = 16,
        history: bool = False,
        progress: ProgressMeter | bool | None = None,
        callback: Callable[[Any, Any, Any], None] | None = None,
        norm: Callable[[PyTree], Array] = two_norm,
    ):
        """**Arguments:** as above. All may be left out.

        **Raises:**

        `ValueError` if a tolerance is negative or both are zero, if `confidence` is not
        in (0, 1), or if `max_k`, `round_size` or `min_samples` is not a Python integer or
        too small. `TypeError` if a tolerance is not a real scalar, `norm` not a function
        of a PyTree to a real scalar or vector, `history` not a bool, `progress` neither a
        bool nor a progress meter, or `callback` not a function.
        """
        if rtol is None and atol is None:
            rtol = _DEFAULT_RTOL
        self.rtol = _tolerance("rtol", rtol)
        self.atol = _tolerance("atol", atol)
        if concrete_number(self.rtol) == concrete_number(self.atol) == 0:
            raise ValueError(
                "`traceax.Adaptive` needs a tolerance. Found rtol=0 and atol=0. Pass, "
                "for example, `rtol=1e-2`."
            )
        self.max_k = None if max_k is None else _check_integer("max_k", max_k, smallest=1)
        # A round has two units at least, unless the whole budget is smaller.
        fewest = min(2, self.max_k or 2)
        size = _check_integer("round_size", round_size, smallest=fewest)
        self.round_size = min(size, self.max_k or size)
        self.min_samples = _check_integer(
            "min_samples", min_samples, smallest=_FEWEST_SAMPLES
        )
        check_scalar("confidence", confidence)
        level = concrete_number(confidence)
        # The two-sided interval takes the quantile at (1 + level) / 2, which rounds to 1,
        # and its quantile to infinity, for a level just below 1.
        if level is None or not 0 < level < (1 + level) / 2 < 1:
            raise ValueError(
                "`confidence` must be a known number between 0 and 1. Found "
                f"{confidence!r}."
            )
        check_flag("history", history)
        _check_reports(progress, callback)
        _check_norm(norm)
        self.confidence = level
        self.history = history
        self.progress = _meter(progress)
        self.callback = callback
        self.norm = norm

    def __repr__(self) -> str:
        """As a call without what is a default: `k=Adaptive()` in signatures."""
        mine, default = (
            {field.name: _shown(getattr(budget, field.name)) for field in fields(budget)}
            for budget in (self, Adaptive())
        )
        changed = [f"{name}={mine[name]}" for name in mine if mine[name] != default[name]]
        return f"Adaptive({', '.join(changed)})"

    def with_arrays(self) -> "Adaptive":
        """The same rule with arrays as tolerances, so that a compiled program does not
        depend on their numbers."""
        where = lambda rule: (rule.rtol, rule.atol)  # noqa: E731
        arrays = real_scalar("rtol", self.rtol), real_scalar("atol", self.atol)
        return eqx.tree_at(where, self, arrays)

    def size(self, tree: PyTree[Array]) -> Inexact[Array, "*s"]:
        """What is compared with tolerances: a scalar `tree` itself, or else its norm."""
        if eqx.is_array(tree) and tree.ndim == 0:
            return tree
        return self.norm(tree)

    def worst(
        self, value: PyTree[Array], std_err: PyTree[Array]
    ) -> tuple[Inexact[Array, ""], Real[Array, ""]]:
        """The sizes of a value and of its standard error, in the norm. Of several sizes,
        those whose error is the largest multiple of its tolerance."""
        size, error = self.size(value), self.size(std_err)
        if size.ndim == 0:
            return size, error
        # A NaN counts as the largest number here.
        index = jnp.argmax(_ratio(error, self.tolerance(size)))
        return size[index], error[index]

    def tolerance(self, value: Inexact[Array, "*s"]) -> Real[Array, "*s"]:
        """The largest acceptable error, in the units of the value."""
        # For the value zero this is zero, even where an infinite `rtol` would give NaN.
        relative = jnp.where(value == 0, 0, self.rtol * jnp.abs(value))
        return jnp.maximum(self.atol, relative).astype(value.real.dtype)

    def excess(
        self,
        value: Inexact[Array, ""],
        std_err: Real[Array, ""],
        count: Real[Array, ""],
    ) -> Real[Array, ""]:
        """The half-width of the confidence interval, divided by the tolerance."""
        width = student_quantile(self.confidence, count - 1) * std_err
        return _ratio(width, self.tolerance(value))

    def reachable(
        self, value: Inexact[Array, ""], floor: Real[Array, ""]
    ) -> Bool[Array, ""]:
        """Whether the tolerance can be met, where `floor` is an upper estimate of the
        part of the standard error that no sample makes smaller."""
        return floor <= _FLOOR_ALLOWANCE * self.tolerance(value)

    def samples_saved(
        self,
        norm: Real[Array, ""],
        value: Inexact[Array, ""],
        scale: Real[Array, ""],
    ) -> Real[Array, ""]:
        """How many fewer samples are needed if the squared Frobenius norm of the sampled
        operator falls by `norm`. The variance of a sample is twice that norm. `norm` is
        in units of `scale**2`, and `value` in units of `scale`."""
        quantile = normal_quantile(self.confidence)
        return 2 * norm * (quantile * scale / self.tolerance(scale * value)) ** 2

    def satisfied(
        self,
        value: Inexact[Array, ""],
        std_err: Real[Array, ""],
        count: Real[Array, ""],
    ) -> Bool[Array, ""]:
        """Whether the estimate from `count` samples meets the tolerance."""
        enough = count >= self.min_samples
        return enough & (self.excess(value, std_err, count) <= 1)


def _tolerance(name: str, value: Scalar | float | None) -> Real[Array | np.ndarray, ""]:
    """The tolerance `value`, 0 for None, as an array, so that a user's program that it is
    passed to does not depend on its number. An array of JAX would start a device while
    the default budget is made, at import."""
    if value is None:
        return np.zeros(())
    check_scalar(name, value)
    number = concrete_number(value)
    if number is not None and not number >= 0:
        raise ValueError(f"`{name}` must not be negative. Found {number!r}.")
    return value if isinstance(value, jax.Array) else np.asarray(value, float)


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, np.ndarray) else eqx.tree_pformat(value)


def _check_integer(name: str, value: Any, smallest: int) -> int:
    refuse_traced(name, value)
    number = plain_integer(value)
    if type(number) is not int or number < smallest:
        raise ValueError(
            f"`{name}` must be a Python integer, {smallest} or more. Found {value!r}."
        )
    return number


def _ratio(width: Real[Array, "*s"], tolerance: Real[Array, "*s"]) -> Real[Array, "*s"]:
    safe = jnp.where(tolerance > 0, tolerance, 1)
    # An exact answer meets the tolerance zero; 0 / 0 would be NaN, and never stop.
    without_tolerance = jnp.where(width > 0, jnp.inf, 0)
    return jnp.where(tolerance > 0, width / safe, without_tolerance)


def _meter(progress: ProgressMeter | bool | None) -> ProgressMeter:
    if progress is None or progress is False:
        return eqxi.NoProgressMeter()
    if progress is not True:
        return progress
    if importlib.util.find_spec("tqdm") is None:
        return eqxi.TextProgressMeter()
    # A round takes longer than a bar to draw.
    return eqxi.TqdmProgressMeter(refresh_steps=1)


def _check_reports(progress: Any, callback: Any) -> None:
    is_meter = isinstance(progress, ProgressMeter) and not isinstance(progress, type)
    if not is_meter and not isinstance(progress, bool | None):
        raise TypeError(
            f"`progress` must be True, False or a progress meter. Found {progress!r}. "
            "Pass, for example, `equinox.internal.TextProgressMeter()`."
        )
    if callback is not None and not callable(callback):
        raise TypeError(
            "`callback` must be a function of the budget spent, the value and the "
            f"standard error, or None. Found {callback!r}."
        )


def _check_norm(norm: Any) -> None:
    if callable(norm):
        # Two leaves of different sizes: a norm of arrays alone fails here, not in a loop.
        pair = tuple(jax.ShapeDtypeStruct((size,), jnp.float32) for size in (2, 3))
        try:
            output = eqx.filter_eval_shape(norm, pair)
        except Exception as error:
            raise TypeError(
                f"`norm` must take a PyTree of arrays. Found {norm!r}, which raised "
                f"{type(error).__name__} for a pair of vectors: {error}"
            ) from error
        is_array = isinstance(output, jax.ShapeDtypeStruct)
        if is_array and output.ndim < 2 and jnp.issubdtype(output.dtype, jnp.floating):
            return
        norm = f"a function that returns {output}"
    raise TypeError(
        "`norm` must be a function of a PyTree of arrays to a real scalar or vector. "
        f"Found {norm}. Pass, for example, `optimistix.max_norm`."
    )


# The budget of calls without `k`. Its tolerances are numbers, since an array would start
# JAX's backend when the package is imported.
DEFAULT_BUDGET = Adaptive()
