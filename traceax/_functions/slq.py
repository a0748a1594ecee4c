import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import PRNGKeyArray, Scalar

from .._core.checks import check_instance, check_scalar
from .._core.flat import FlatOperator
from .._core.quantity import AbstractQuantity, Trace
from .._core.sampler import AbstractSampler, draw_for, RademacherSampler
from .._core.solution import Estimate
from .._krylov.arnoldi import Arnoldi
from .._krylov.base import AbstractKrylovMethod
from .._krylov.golub_kahan import GolubKahan
from .._krylov.lanczos import Lanczos
from .._quadrature.domain import critical_extremes
from .._quadrature.functions import AbstractSpectralFunction
from .._run.budget import Budget, largest_budget
from .._run.execution import AbstractExecution
from .._run.steps import AdaptiveSteps, choose_steps_of_form, excess_of_bracket, Steps
from .base import AbstractFunctionEstimator, describe_mismatch
from .gradients import AbstractFunctionGradient
from .samples import estimate_of_forms, stream_forms


class SLQEstimator(AbstractFunctionEstimator):
    r"""Stochastic Lanczos quadrature: the mean of $z_i^* f(A) z_i$ over `k` probes, each
    by `num_steps` steps of Lanczos.

    Exact for polynomials $f$ of degree up to `2 * num_steps - 1`. Otherwise there are
    two errors. The sampling error is in `std_err` and falls with `k`. The quadrature
    error falls with `num_steps` alone. For `Log`, `Inverse`, `Entropy` and `Power` with
    a negative exponent or a fractional one below 2, of a Hermitian operator or of
    singular values, the truth for each probe is inside `stats["sample_brackets"]`, shape
    `(k, 2)`, whose mean is `stats["bracket"]`; otherwise the quadrature error is
    estimated. [`traceax.Solution.interval`][] counts both errors. Where the quadrature
    error is the larger one, more steps or a preconditioner help, and more probes do not.

    Cost: `k * num_steps` products, and as many with the adjoint by Golub-Kahan; with
    [`traceax.AdaptiveSteps`][] one run more. Memory: `num_steps` vectors of length n
    for each probe of a block, twice that by Golub-Kahan; with `krylov=Lanczos(window=0)`
    and no derivative, only those of a step. A derivative keeps two vectors for each
    column of its `gradient` and each probe between the passes.

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

    Further entries of `stats` are `"num_steps"`, how many steps each probe made;
    `"ritz_values"`, shape `(2,)`; and `"gradient_residual"`, shape `(k,)`, for a
    Hermitian operator the relative residual of $f'(A) z_i$ from the Krylov space of each
    probe. With `k >= n` there are the entries of one probe that made no steps, with a
    residual of 0. `"ritz_values"` are the smallest and the largest number that was found,
    by Lanczos of the Ritz values, by Golub-Kahan of the singular values of the bidiagonal
    matrices, and by Arnoldi of the eigenvalues of the Hermitian part of the Hessenberg
    matrices, between which the real parts of its eigenvalues are.

    **Attributes:**

    - `sampler`: distribution of the probes.
    - `krylov`: how the quadratic forms are made: [`traceax.Lanczos`][],
        [`traceax.GolubKahan`][] or [`traceax.Arnoldi`][], or a
        [`traceax.AbstractKrylovMethod`][] of your own. `None` takes the first of these
        that fits the operator and the function.
    - `lower_bound`: a number not above the smallest eigenvalue (for `logdet` of a
        general operator, singular value), such as the noise variance of a Gaussian
        process. A good bound makes brackets tight; a Ritz value below it takes its
        place. `None` takes 0, or where the function is singular there an eighth of the
        machine epsilon times the largest Ritz value, which is a bound for every
        operator that is not singular in its precision.

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
        if self.lower_bound is not None:
            scaled = factor * self.lower_bound
            bound = scaled if least is None else jnp.maximum(scaled, least)
        return dataclasses.replace(self, lower_bound=bound)

    def run(
        self,
        operator: FlatOperator,
        function: AbstractSpectralFunction,
        gradient: AbstractFunctionGradient,
        *,
        k: int | Budget,
        num_steps: int | AdaptiveSteps,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
        quantity: AbstractQuantity = Trace(),
    ) -> Estimate:
        krylov, bound = self.method(operator, function), self.lower_bound

        def draw(flat, indices):
            return draw_for(flat, self.sampler, key, indices)

        def excess(value, bracket, deviation):
            return excess_of_bracket(value, bracket, deviation, operator, k, quantity)

        def choose(adaptive):
            probe = draw(operator, jnp.zeros(1, int))[:, 0]
            settings = krylov, operator, function, bound, probe, excess, execution
            return choose_steps_of_form(adaptive, *settings)

        steps, k = Steps.resumed(num_steps, choose, k)

        def form(flat, index):
            probe = draw(flat, index[None])[:, 0]
            settings = function, steps.most, bound, gradient.columns, steps.made
            return krylov.form(flat, probe, *settings), probe

        settings = operator, function, gradient, k, execution
        streamed = stream_forms(form, *settings, width=steps.most, quantity=quantity)
        moments, extremes = streamed.summary

        def probes():
            budget = largest_budget(k)
            used = jnp.arange(budget) < streamed.count
            weight = jnp.sqrt(budget / jnp.maximum(moments.count, 1))
            return jnp.where(used, weight * draw(operator, jnp.arange(budget)), 0)

        estimate = estimate_of_forms(
            *(streamed, operator, function, k, steps, excess),
            live=streamed.mean,
            extremes=critical_extremes(extremes),
        )
        products = (estimate.num_matvecs + steps.spent) * krylov.products_per_step
        return dataclasses.replace(estimate, num_matvecs=products, probes=probes)

    def method(
        self, operator: FlatOperator, function: AbstractSpectralFunction
    ) -> AbstractKrylovMethod:
        """The Krylov method: `krylov`, or the first that fits."""
        methods = _METHODS if self.krylov is None else (self.krylov,)
        for method in methods:
            if method.fits(operator, function):
                return method
        names = " or ".join(f"`{type(method).__name__}`" for method in methods)
        raise ValueError(
            f"`krylov` must fit the operator and the function. Found {names}. "
            f"{describe_mismatch(operator, function)} Leave `krylov` out, or tag the "
            "operator."
        )


_METHODS = (Lanczos(), GolubKahan(), Arnoldi())


SLQEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: default is [`traceax.RademacherSampler`][].
- `krylov`: default is `None`, what fits.
- `lower_bound`: default is `None`.

**Raises:**

`TypeError` for a `sampler` that is no [`traceax.AbstractSampler`][], a `krylov` that is
no [`traceax.AbstractKrylovMethod`][], or a `lower_bound` that is no real scalar.
"""
