"""Answers: the `Estimate` that estimators return, and the `Solution` that calls make of
it."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, PyTree, Real

from .arithmetic import standard_promotion
from .interval import check_confidence, interval_of, TESTED_CONFIDENCE
from .report import as_number, describe_solution, fetch, has_numbers, reading
from .results import failure, first_failure, RESULTS
from .transformed import check_function, Scalars, transformed


_ValueT = TypeVar("_ValueT", bound=PyTree[Inexact[Array, "..."]])


class Estimate(eqx.Module):
    """The result of an estimator: the estimate, its standard error, and statistics.

    - `value`: the estimate, real or complex, of the shape that the quantity reads, for a
        trace `()`. The only field that carries derivatives.
    - `std_err`: its standard error, real, of the shape of `value`.
    - `samples`: the per-sample estimates, shape `(m,)`, if `value` is a scalar, which is
        their mean. For several scalars (`AbstractQuantity.scalars`) shape `(m, q)`. Else
        None.
    - `correlation`: the correlation of these scalars, shape `(p, p)`; None for that of
        the samples.
    - `num_matvecs`: the number of matrix-vector products with the operator, an integer,
        which may be traced.
    - `rounding`: relative size of rounding errors in `value`, a Python number; 0 for
        exact answers.
    - `magnitude`: the size that `rounding` is relative to, if it is larger than `value`;
        of the shape of `value`, or of shape `()`.
    - `unresolved`: further rounding error of `value`, of its shape, already counted in
        `bounds`.
    - `result`: a `RESULTS` member, or None for `RESULTS.successful`.
    - `extra`: further entries for `Solution.stats`.
    - `state`: the state of the adaptive loop, if there is one.
    - `num_samples`: the number of samples. By default as many as a run made of `samples`,
        and 1 where these are None.
    - `skewness`: the skewness of the samples, of the shape of `value`, if `samples` is
        None; None if it is 0.
    - `probes`: a function that returns probes of shape `(n, p)`, whose matvecs give the
        derivative of `value`; the mean of their outer products is the identity.
    - `method`: the estimator in words, if the name of the task does not say it.
    - `bounds`: bounds of `value` without quadrature error and rounding, for the same
        samples, shape `(2, 2)`, or `(2, 2, ...)` where `value` is no scalar: the lower
        bound with its standard error, and the upper bound with its own. None if there is
        no such error but `rounding`.
    - `ends`: bounds of the spectrum, shape `(2,)`, where the operator is not the one that
        `extra["ritz_values"]` belong to; else None.
    - `proven_bounds`: bounds that do not rely on an estimate of the quadrature error;
        None if they are the same as `bounds`.
    """

    value: Inexact[Array, "*q"]
    std_err: Real[Array, "*q"]
    samples: Inexact[Array, "m ..."] | None
    num_matvecs: Int[Array, ""] | int
    rounding: float = eqx.field(static=True)
    magnitude: Real[Array, "*q"] | Real[Array, ""] | float = 0.0
    unresolved: Real[Array, "*q"] | float = 0.0
    result: Any = None
    extra: dict[str, PyTree[Array]] = eqx.field(default_factory=dict)
    state: PyTree[Array] = None
    num_samples: Real[Array, ""] | int | None = None
    skewness: Real[Array, "*q"] | None = None
    correlation: Real[Array, "p p"] | None = None
    probes: Callable[[], Inexact[Array, "n p"]] | None = None
    method: str = eqx.field(static=True, default="")
    bounds: Real[Array, "2 2 *q"] | None = None
    proven_bounds: Real[Array, "2 2 *q"] | None = None
    ends: Real[Array, "2"] | None = None

    @property
    def count(self) -> Real[Array, ""] | int:
        """The number of samples."""
        if self.num_samples is not None:
            return self.num_samples
        if self.samples is None:
            return 1
        # Samples that an adaptive run has not made are infinite.
        made = jnp.isfinite(self.samples.reshape(len(self.samples), -1)[:, 0])
        return made.size if self.state is None else jnp.sum(made)

    def map_bounds(
        self, fn: Callable[[Real[Array, "2 2 *q"]], Real[Array, "2 2 *q"]]
    ) -> "Estimate":
        """The estimate with `fn` applied to both kinds of bounds, where there are any."""
        kinds = {"bounds": self.bounds, "proven_bounds": self.proven_bounds}
        return dataclasses.replace(
            self, **{name: fn(x) for name, x in kinds.items() if x is not None}
        )

    def moved(
        self, offset: Inexact[Array, "*q"], *, of_sample: Array | None = None
    ) -> "Estimate":
        """The estimate plus a number that is known exactly, of the shape of `value`. Only
        the value takes on its derivatives. `of_sample` is that number in the shape of a
        sample, if that is another one."""
        constant = jax.lax.stop_gradient(offset)
        samples, extra = self.samples, self.extra
        if samples is not None:
            moves = constant if of_sample is None else jax.lax.stop_gradient(of_sample)
            samples = samples + moves.astype(samples.dtype)
        # Estimators of users may have none.
        brackets = {
            name: extra[name] + constant.real
            for name in ("bracket", "sample_brackets")
            if name in extra
        }
        moved = dataclasses.replace(
            self,
            value=self.value + offset.astype(self.value.dtype),
            samples=samples,
            extra=extra | brackets,
        )
        # `x[:, 0]` are the bounds, and `x[:, 1]` their standard errors.
        return moved.map_bounds(lambda x: x.at[:, 0].add(constant.real))


class Solution(eqx.Module, Generic[_ValueT]):
    """The answer of [`traceax.trace`][], [`traceax.diagonal`][], [`traceax.logdet`][] and
    the others.

    !!! Example

        ```python
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        operator = lx.DiagonalLinearOperator(jnp.array([1.0, 2.0, 3.0]))
        solution = tx.trace(operator, k=3)
        print(solution.value, solution.std_err)  # 6.0 0.0
        print(solution.successful, solution.matvecs)  # True 0
        print(solution)
        # Trace, exact
        #   value  6.0, exact
        #   cost   0 matvecs
        ```

    `print` shows the value, rounded to two digits of its error bar, a 95% interval, and
    what it cost; and why the call failed, if it did. For arrays it shows a summary, and
    inside `jax.jit`, where there are no numbers yet, shapes.

    **Attributes:**

    - `value`: the estimate, a scalar or, for a quantity with entries, a PyTree, of the
        operator's dtype (float32 for operators in bfloat16 or float16); real for norms,
        log-determinants and traces of real functions of Hermitian operators.
    - `std_err`: the standard error of `value`, real, of its structure and in its units.
        It is `inf` if there is only one sample, and 0 if the value is exact, except for
        `trace_difference` and `gaussian_log_prob`, which count rounding then too.
    - `result`: a [`traceax.RESULTS`][] member; `RESULTS[result]` is its message.
    - `successful`: whether `result` is `RESULTS.successful`, a boolean array of shape
        `()`.
    - `stats`: a dictionary. `"num_matvecs"` is the number of matrix-vector products with
        the operator, `"num_samples"` the number m of samples, and `"num_steps"` the
        number of Krylov steps of each, 0 where no Krylov method runs. `"samples"` are the
        per-sample estimates, shape `(m,)`. Their mean is `value`; for norms it is a power
        of `value`, and for `log_trace_exp` `value` is the logarithm of the mean of their
        exponentials. Where `value` is not a scalar, `"skewness"` takes their place: the
        skewness of the samples, of the structure of `value`. `"exact"` says whether the
        answer is exact: because `k >= n`, or because an estimate failed and n more
        matvecs gave the exact answer instead. `"std.err"` is the standard error again,
        under the name that traceax 1.0 gave it. Functions of operators (except for
        log-determinants that are known from the structure) have `"bounds"`, shape
        `(2, 2)`, for diagonals `(2, 2, ...)` in each leaf: a lower bound of `value`
        without quadrature error and rounding, for the same probes, with its standard
        error; and an upper bound with its own. Estimators add entries, which their
        documentation describes. Which entries there are depends on the operator, the call
        and the estimator, and not on numbers of probes and steps or on functions;
        `Adaptive(history=True)` adds `"history"`.
    - `state`: with an adaptive budget, the state from which a further call continues;
        `None` for a fixed budget.
    - `quantity`: what was estimated, in words, for `print`.
    - `method`: the estimator that was used or chosen, in words, for `print`. An exact
        answer needs none.
    - `matvecs`: `stats["num_matvecs"]` as a Python integer, where it is one known number.

    Only `value` carries derivatives; the derivatives of the other fields are zero.
    """

    value: _ValueT
    std_err: _ValueT
    result: RESULTS
    stats: dict[str, Any]
    state: PyTree[Any]
    quantity: str = eqx.field(static=True, default="solution")
    method: str = eqx.field(static=True, default="")
    estimated: ClassVar[tuple[str, ...]] = ("value",)

    def interval(
        self, confidence: Any = 0.95, *, proven: bool | None = None
    ) -> tuple[Any, Any]:
        """A confidence interval, which counts the errors of sampling, of quadrature and
        of rounding.

        The sampling error is the standard error times a quantile of Student's t for the
        number of samples, above 95% widened for the skewness of the samples. For
        functions of operators, log-determinants and Schatten norms it is added at both
        ends of `stats["bounds"]`, each with its own standard error. The quadrature error
        in these bounds is an estimate, which measurements support for intervals of up to
        95%. For more confidence, or with `proven=True`, `stats["proven_bounds"]` take
        their place, in which no error is estimated where bounds are known. They may be
        far apart. One of them is infinite where the function is infinite at zero and the
        operator cannot be told from a singular one. Look at `result` first: if a call
        failed, its interval is meaningless.

        !!! Example

            ```python
            import jax
            import jax.numpy as jnp
            import lineax as lx
            import traceax as tx

            matrix = jnp.diag(jnp.linspace(1.0, 100.0, 300))
            operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
            solution = tx.logdet(operator, k=20, num_steps=20, key=jax.random.key(0))
            low, high = solution.interval()
            print(low, "to", high)
            ```

        **Arguments:**

        - `confidence`: the probability with which the interval covers the true value,
            between 0 and 1; a number or a scalar array, which may be traced.
        - `proven`: whether to use `stats["proven_bounds"]`. Default: if `confidence` is
            above 0.95.

        **Returns:**

        The lower and the upper end, each of the structure of `value`. Scalars are Python
        numbers, to print and to compare; inside of a program, and where processes share
        the arrays, they are arrays. Each entry of a diagonal has its own interval, and so
        have the real and the imaginary part of a complex value.

        **Raises:**

        `TypeError` for a `confidence` that is not a number. `ValueError` for a
        `confidence` that is not between 0 and 1, or an `equinox` run-time error if it is
        traced. `ValueError` for a batch of solutions.
        """
        self._refuse_batch("interval()")
        confidence = check_confidence(confidence)
        names = {"bounds", "proven_bounds"}
        # `DynamicTrace` has neither. Its error bar does not come from samples alone, and
        # takes the quantile of the normal distribution.
        if skewed := {"samples", "skewness"} & self.stats.keys():
            names |= {"num_samples", "freedom"}
            level = as_number(confidence)
            # Up to this level the skewness does not matter. A program without samples
            # does not depend on their number, and is compiled only once.
            if not (isinstance(level, float) and level <= TESTED_CONFIDENCE):
                names |= skewed
        stats = {name: self.stats[name] for name in sorted(names & self.stats.keys())}
        value, std_err, stats = jax.lax.stop_gradient((self.value, self.std_err, stats))
        ends = interval_of(
            value=value,
            std_err=std_err,
            stats=stats,
            confidence=confidence,
            proven=proven,
        )
        return jax.tree.map(as_number, ends)

    def transform(self, fn: Callable[[Any], Any]) -> "Solution[Any]":
        """A smooth function of the estimate, with one error bar. Where `value` has
        several scalars, estimated from the same probes, their covariance counts: the
        error of a ratio is often far smaller than those of its two parts suggest.

        The error bar is that of the delta method: first order, and the second-order terms
        of variance and bias, which matter with few samples. If `fn` divides by a number
        whose 95% interval contains zero, or takes its logarithm or a root, the result is
        `RESULTS.interval_with_zero` and the error bar infinite; nothing is raised.

        !!! Example

            ```python
            import jax
            import jax.numpy as jnp
            import traceax as tx

            def loss(w):
                return jnp.sum(w["a"] ** 4) + jnp.sum(w["b"] ** 2) * jnp.sum(w["a"])

            point = {"a": jnp.linspace(1.0, 2.0, 100), "b": jnp.ones(100)}
            operator = tx.hessian(loss, point)
            solution = tx.leaf_traces(operator, k=20, key=jax.random.key(0))
            share = solution.transform(lambda t: t["a"] / (t["a"] + t["b"]))
            print(share.value, "+-", share.std_err)
            ```

        **Arguments:**

        - `fn`: from `value` to a floating-point scalar, or to a PyTree of such scalars of
            one dtype. It may use the scalars of `value`, but not its arrays, whose
            entries have no known covariance. The function must be smooth: at a kink, such
            as that of `abs` or `max`, the error bar is too small. Divisions by zero and
            the like are not detected inside loops and branches.

        **Returns:**

        A [`traceax.Solution`][] with `fn(value)`, which carries its derivatives, and the
        same `state` and counts.

        **Raises:**

        `ValueError` if `fn` uses an array or returns anything but scalars, for several
        scalars without samples in common, and for a batch of solutions.
        """
        self._refuse_batch("transform(fn)")
        check_function(fn, self.value)
        parts = transformed(fn, self.value, self.std_err, self.stats)
        near_zero = failure(parts.pop("near_zero"), RESULTS.interval_with_zero)
        result = first_failure(self.result, near_zero)
        title = f"Function of: {self.quantity.removeprefix('Function of: ')}"
        return dataclasses.replace(self, **parts, result=result, quantity=title)

    @property
    def covariance(self) -> Real[Array, "p p"]:
        """The covariance of the scalars of `value`, in the order of its leaves: real, of
        shape `(q, q)`; for complex scalars, the covariance of all real and then all
        imaginary parts, of shape `(2 q, 2 q)`. The diagonal has the squares of `std_err`.
        Entries of diagonals and other arrays have no covariance; a `ValueError` is raised
        if there is nothing else."""
        self._refuse_batch("covariance")
        with standard_promotion():
            return Scalars.of(self.value, self.std_err, self.stats).covariance

    def _refuse_batch(self, attribute: str) -> None:
        # The samples of a batch would be taken for those of one mean.
        if any(jnp.ndim(index) > 0 for index in jax.tree.leaves(self.result)):
            raise ValueError(
                "This is a batch of solutions. Take one at a time: `jax.vmap(lambda "
                f"solution: solution.{attribute})(solutions)`."
            )

    def __repr__(self) -> str:
        names = "num_matvecs", "num_samples", "num_steps", "exact", "bounds"
        stats = {name: self.stats[name] for name in names if name in self.stats}
        parts = self.value, self.std_err, jax.tree.leaves(self.result), stats
        if not has_numbers(*parts):
            return eqx.tree_pformat(self)
        with reading():
            value, std_err, (result,), stats = fetch(parts)
            return describe_solution(
                quantity=self.quantity,
                method=self.method,
                value=value,
                std_err=std_err,
                result=result,
                stats=stats,
                interval=self.interval,
            )

    @property
    def successful(self) -> Bool[Array, "..."]:
        """Whether the call succeeded; an array for a batch of solutions."""
        return self.result == RESULTS.successful

    @property
    def matvecs(self) -> int | Array:
        """The number of matrix-vector products with the operator. A Python integer, or an
        array inside of a program and for a batch of solutions."""
        return as_number(self.stats["num_matvecs"])

    @property
    def details(self) -> str:
        """A sentence with the numbers of a failed call, which follows the message of its
        result."""
        if self.result == RESULTS.max_matvecs_reached:
            reached = ""
            if eqx.is_array(self.value) and self.value.ndim == 0:
                reached = f"{self.value} with a standard error of {self.std_err} after "
            return f"Reached {reached}{self.stats['num_matvecs']} matvecs."
        if self.result == RESULTS.not_null_space:
            found = self.stats["null_space_residual"]
            return f"Found a product of relative size {found}."
        if "ritz_values" in self.stats:
            smallest, largest = self.stats["ritz_values"]
            return f"Found Ritz values from {smallest} to {largest}."
        return ""
