"""Stochastic Lanczos quadrature.

    tr f(A) ~ 1/k sum_i z_i* f(A) z_i,
    z* f(A) z ~ ||z||^2 e_1* f(T) e_1 = ||z||^2 sum_j w_j f(t_j)

(Ubaru, Chen and Saad, SIAM J. Matrix Anal. Appl. 38, 2017). T is the tridiagonal matrix
of a Lanczos run from z. Its eigenvalues t_j are the nodes of a Gauss rule, and the
squared first entries w_j of its eigenvectors are the weights. In the code `krylov` makes
the forms, `form` is one of them with its probe z, `num_steps` is the order of T, and
`samples.py` averages them. Brackets and error estimates are derived in
docs/devdocs/quadrature.md.
"""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Inexact, PRNGKeyArray, Real, Scalar

from .._core.checks import check_instance, check_scalar
from .._core.flat import FlatOperator
from .._core.quantity import AbstractQuantity, Trace
from .._core.sampler import AbstractSampler, draw_for
from .._core.samplers import RademacherSampler
from .._core.solution import Estimate
from .._krylov.arnoldi import Arnoldi
from .._krylov.base import AbstractKrylovMethod
from .._krylov.golub_kahan import GolubKahan
from .._krylov.lanczos import Lanczos
from .._quadrature.domain import critical_extremes
from .._quadrature.function_tree import FunctionTree, members_of
from .._quadrature.functions import AbstractSpectralFunction
from .._run.budget import Budget, in_sweeps, largest_budget
from .._run.execution import AbstractExecution
from .._run.gradient_steps import GradientTarget
from .._run.random_steps import RandomSteps, refuse_random_steps
from .._run.steps import AdaptiveSteps, choose_steps_of_form, excess_of_bracket, Steps
from .base import AbstractFunctionEstimator, describe_mismatch
from .gradients import AbstractFunctionGradient
from .random_steps import RandomRuns
from .samples import stream_forms
from .several import estimate_of_members


class SLQEstimator(AbstractFunctionEstimator):
    r"""Stochastic Lanczos quadrature: the mean of $z_i^* f(A) z_i$ over `k` probes, each
    from `num_steps` steps of Lanczos.

    Exact for polynomials $f$ of degree up to `2 * num_steps - 1`. Otherwise there are
    two errors. The sampling error is in `std_err` and falls with `k`. The quadrature
    error falls with `num_steps` alone. For `Log`, `Inverse`, `Entropy` and `Power` with
    a negative exponent or a fractional one below 2, of a Hermitian operator or of
    singular values, `stats["sample_brackets"]`, shape `(k, 2)`, contains the true value
    of each quadratic form, and its mean is `stats["bracket"]`. Otherwise they are
    estimates, the value plus and minus its estimated quadrature error.
    [`traceax.Solution.interval`][] counts both errors. Where the quadrature error is the
    larger one, more steps or a preconditioner help, and more probes do not.

    Cost: `k * num_steps` matvecs, and as many with the adjoint by Golub-Kahan. With
    [`traceax.AdaptiveSteps`][] there is one more run. Memory: `num_steps` vectors of
    length n for each probe of a block, twice that by Golub-Kahan. With
    `krylov=Lanczos(window=0)` and no derivative, only the vectors of one step are kept.
    A derivative keeps two vectors for each column of its `gradient` and each probe
    between the passes.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jnp.linspace(0.0, 1.0, 300)
        kernel = jnp.exp(-50 * (x[:, None] - x) ** 2) + 0.1 * jnp.eye(300)
        operator = lx.MatrixLinearOperator(kernel, lx.positive_semidefinite_tag)
        estimator = tx.SLQEstimator(lower_bound=0.1)
        key = jax.random.key(0)
        solution = tx.logdet(operator, estimator, k=20, num_steps=20, key=key)
        print(solution.value, "+-", solution.std_err, solution.stats["bracket"])
        ```

    `stats` has three further entries. `"num_steps"` is the number of steps of each probe.
    `"gradient_residual"`, shape `(k,)`, is for a Hermitian operator the relative residual
    of $f'(A) z_i$ from the Krylov space of each probe. `"ritz_values"`, shape `(2,)`, are
    the smallest and the largest Ritz value by Lanczos; by Golub-Kahan the singular values
    of the bidiagonal matrices take their place, and by Arnoldi the eigenvalues of the
    Hermitian parts of the Hessenberg matrices, between which the real parts of the
    eigenvalues of these matrices lie. With `k >= n` the entries are those of one probe
    without steps, with a residual of 0.

    **Attributes:**

    - `sampler`: the distribution of the probes.
    - `krylov`: the method for the quadratic forms: [`traceax.Lanczos`][],
        [`traceax.GolubKahan`][], [`traceax.Arnoldi`][], or a
        [`traceax.AbstractKrylovMethod`][] of your own. `None` takes the first of these
        three that fits the operator and the function.
    - `lower_bound`: a lower bound of the spectrum (for `logdet` of a general operator, of
        the singular values), such as the noise variance of a Gaussian process. A good
        bound makes brackets tight. A Ritz value below the bound replaces it. `None` takes
        0, or where the function is singular at 0 an eighth of the machine epsilon times
        the largest Ritz value, which is a lower bound for every operator that is not
        singular in its precision.

    ??? cite

        ```bibtex
        @article{ubaru2017fast,
            author  = {Ubaru, Shashanka and Chen, Jie and Saad, Yousef},
            title   = {Fast Estimation of $\mathrm{tr}(f(A))$ via Stochastic {Lanczos}
                       Quadrature},
            journal = {SIAM Journal on Matrix Analysis and Applications},
            volume  = {38},
            number  = {4},
            pages   = {1075--1099},
            year    = {2017},
        }
        ```
    """

    sampler: AbstractSampler = RademacherSampler()
    krylov: AbstractKrylovMethod | None = None
    lower_bound: Scalar | float | None = None
    min_probes: ClassVar[int] = 1

    def __check_init__(self):
        check_instance("sampler", self.sampler, AbstractSampler, "RademacherSampler()")
        if self.lower_bound is not None:
            check_scalar("lower_bound", self.lower_bound)
        if self.krylov is not None:
            example = "Lanczos(window=0)"
            check_instance("krylov", self.krylov, AbstractKrylovMethod, example)

    def rescaled(self, factor: Scalar, least: Scalar | None = None) -> "SLQEstimator":
        bound = least
        # Both are lower bounds, and the larger one makes the tighter brackets.
        if self.lower_bound is not None:
            scaled = factor * self.lower_bound
            bound = scaled if least is None else jnp.maximum(scaled, least)
        return dataclasses.replace(self, lower_bound=bound)

    def run(
        self,
        operator: FlatOperator,
        function: AbstractSpectralFunction | FunctionTree,
        gradient: AbstractFunctionGradient,
        *,
        k: int | Budget,
        num_steps: int | AdaptiveSteps | RandomSteps,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
        quantity: AbstractQuantity = Trace(),
    ) -> Estimate:
        krylov, functions = self.method(operator, function), members_of(function)
        num_strata = self.sampler.num_strata
        k = in_sweeps(k, num_strata)
        excess = ft.partial(
            excess_of_bracket,
            operator=operator,
            k=k,
            quantity=quantity,
            num_strata=num_strata,
        )
        target = GradientTarget.of(operator, k, gradient.from_runs)
        settings: dict[str, Any] = {"krylov": krylov, "operator": operator, "key": key}
        settings |= {"k": k, "execution": execution}
        runs = None
        if isinstance(num_steps, RandomSteps):
            if isinstance(function, FunctionTree):
                refuse_random_steps(num_steps)
            runs, k = RandomRuns.of(
                num_steps,
                function=functions[0],
                lower_bound=self.lower_bound,
                sampler=self.sampler,
                **settings,
            )
            steps = runs.steps
        else:
            steps, k = self._steps(
                num_steps, function, excess=excess, target=target, **settings
            )

        def forms(flat, index):
            probe = draw_for(flat, self.sampler, key, index[None])[:, 0]
            if runs is not None:
                return (runs.form(flat, probe, index, gradient.columns),), probe
            state = krylov.start(flat, probe, steps.most)
            state = krylov.advance(flat, state, 0, steps.made)
            # By position: parameters of a user's method may have other names.
            read = ft.partial(krylov.read, flat, state, steps.made)
            settings = self.lower_bound, gradient.columns
            return [read(each, *settings) for each in functions], probe

        streamed = stream_forms(
            forms,
            operator=operator,
            function=function,
            gradient=gradient,
            k=k,
            execution=execution,
            sampler=self.sampler,
            width=steps.most,
            quantity=quantity,
        )
        moments, extremes = streamed.summary

        # `trace_difference` streams forms of two operators. The domain is checked for the
        # one that is nearer to leaving it.
        estimate = estimate_of_members(
            streamed,
            function=function,
            operator=operator,
            k=k,
            steps=steps,
            excess=excess,
            target=target,
            extremes=critical_extremes(extremes),
        )
        if runs is not None:
            estimate = runs.finish(estimate, streamed, operator)
        # A step of Golub-Kahan has a second matvec, with the adjoint.
        products = (estimate.num_matvecs + steps.spent) * krylov.products_per_step
        return dataclasses.replace(
            estimate,
            num_matvecs=products,
            probes=ft.partial(
                self.isotropic_columns, operator, key, largest_budget(k), moments.total
            ),
            method=f"{type(self).__name__} with {krylov.title}",
        )

    def _steps(
        self,
        num_steps: int | AdaptiveSteps,
        function: AbstractSpectralFunction | FunctionTree,
        *,
        krylov: AbstractKrylovMethod,
        operator: FlatOperator,
        key: PRNGKeyArray | None,
        k: int | Budget,
        excess: Callable[..., Real[Array, ""]],
        target: GradientTarget,
        execution: AbstractExecution,
    ) -> tuple[Steps, int | Budget]:
        """The number of steps, and k with the state that its loop resumes."""

        def choose(adaptive):
            # With the first probe. Its form is computed again later: the mean is over
            # forms of the same number of steps.
            probe = draw_for(operator, self.sampler, key, jnp.zeros(1, int))[:, 0]
            return choose_steps_of_form(
                adaptive,
                krylov=krylov,
                operator=operator,
                function=function,
                bound=self.lower_bound,
                probe=probe,
                excess=excess,
                target=target,
                execution=execution,
            )

        return Steps.resumed(num_steps, choose, k)

    def isotropic_columns(
        self,
        operator: FlatOperator,
        key: PRNGKeyArray | None,
        budget: int,
        count: Real[Array, ""],
    ) -> Inexact[Array, "n p"]:
        """All probes Z that the budget allows; those that were not used are zero. The
        weight makes `Z Z* / budget` the mean of z z* over those that were used."""
        indices = jnp.arange(budget)
        weight = jnp.sqrt(budget / jnp.maximum(count, 1))
        probes = draw_for(operator, self.sampler, key, indices)
        return jnp.where(indices < count, weight * probes, 0)

    def method(
        self, operator: FlatOperator, function: AbstractSpectralFunction | FunctionTree
    ) -> AbstractKrylovMethod:
        """The Krylov method: `krylov`, or the first of `_METHODS` that fits."""
        methods = _METHODS if self.krylov is None else (self.krylov,)
        functions = members_of(function)
        for method in methods:
            if all(method.fits(operator, each) for each in functions):
                return method
        names = " or ".join(f"`{type(method).__name__}`" for method in methods)
        raise ValueError(
            f"`krylov` must fit the operator and the function. Found {names}. "
            f"{describe_mismatch(operator, functions[0])} Leave `krylov` out, or tag the "
            "operator."
        )


def lanczos_of(estimator: Any) -> tuple[AbstractSampler, Lanczos]:
    """The sampler and the Krylov method of the estimator, for calls that read other
    things from Lanczos runs than quadratic forms. Raises a `TypeError` for any estimator
    but an `SLQEstimator` with [`traceax.Lanczos`][]."""
    check_instance("estimator", estimator, SLQEstimator, "SLQEstimator()")
    krylov = Lanczos() if estimator.krylov is None else estimator.krylov
    check_instance("estimator.krylov", krylov, Lanczos, "Lanczos(window=0)")
    return estimator.sampler, krylov


# The most accurate first: s steps of Lanczos or Golub-Kahan are exact for polynomials of
# degree up to 2 s - 1, those of Arnoldi up to s.
_METHODS = (Lanczos(), GolubKahan(), Arnoldi())


SLQEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: default is [`traceax.RademacherSampler`][].
- `krylov`: default is `None`, the first method that fits.
- `lower_bound`: default is `None`.

**Raises:**

`TypeError` for a `sampler` that is not a [`traceax.AbstractSampler`][], a `krylov` that
is not a [`traceax.AbstractKrylovMethod`][], or a `lower_bound` that is not a real scalar.
"""
