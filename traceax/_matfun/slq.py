from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, Scalar

from .._adaptive import Adaptive
from .._checks import check_window, plain_integer
from .._execution import AbstractExecution, Local
from .._flat import FlatOperator
from .._gradient import attach, attach_derivative
from .._iterate import stream
from .._moments import Moments
from .._quantity import AbstractQuantity, Trace
from .._sampler import AbstractSampler, draw_for, RademacherSampler
from .._solution import Estimate, first_failure, RESULTS
from .base import AbstractFunctionEstimator
from .functions import AbstractSpectralFunction
from .gradients import AbstractFunctionGradient
from .quadratic_form import (
    check_domain,
    check_precision,
    golub_kahan_form,
    lanczos_form,
    QuadraticForm,
    span,
)


class SLQEstimator(AbstractFunctionEstimator):
    r"""Stochastic Lanczos quadrature: the mean of $z_i^* f(A) z_i$ over `k` probes, each
    by `num_steps` steps of Lanczos.

    Exact for polynomials $f$ of degree up to `2 * num_steps - 1`. Otherwise there are two
    errors. That of sampling is in `std_err` and falls with `k`. That of the quadrature,
    which no number of probes reduces, falls with `num_steps`: for `Log`, `Inverse`,
    `Entropy` and fractional `Power` below 2, the truth for each probe is inside
    `stats["sample_brackets"]`, shape `(k, 2)`, whose mean is `stats["bracket"]`. If that
    is wider than `std_err`, more steps or a preconditioner help, and more probes do not.

    Cost: `k * num_steps` products. Memory: `num_steps` vectors of length n for each probe
    of a block; with `window=0` and no derivative, only those of a step. A derivative
    keeps two vectors for each probe between the passes.

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

    **Attributes:**

    - `sampler`: distribution of the probes.
    - `window`: how many of the last basis vectors each new one is orthogonalised against.
        `None`: all, so that rounding errors play no role. 0: none, which is fastest, and
        needs more steps for the same accuracy once Ritz values have converged.
    - `lower_bound`: a number not above the smallest eigenvalue (for `logdet` of a general
        operator, singular value), such as the noise variance of a Gaussian process.
        Brackets are proven with it, and tight; where a Ritz value is below it, that
        takes its place. `None` takes 0, or where the function is singular there an eighth
        of the unit roundoff times the largest Ritz value, which holds for every operator
        that is not singular in its precision.

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
    window: int | None = eqx.field(static=True, default=None, converter=plain_integer)
    lower_bound: Scalar | float | None = None
    min_probes: ClassVar[int] = 1

    def __check_init__(self):
        check_window(self.window)

    def run(
        self,
        operator: FlatOperator,
        function: AbstractSpectralFunction,
        gradient: AbstractFunctionGradient,
        *,
        k: int | Adaptive,
        num_steps: int,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        def form(flat, probe):
            return lanczos_form(
                flat.mv,
                probe,
                function,
                num_steps,
                window=self.window,
                lower_bound=self.lower_bound,
                eps=flat.eps,
            )

        settings = k, num_steps, key, execution
        return self._mean(form, operator, function, gradient, *settings, True, Trace())

    def run_singular(
        self,
        operator: FlatOperator,
        function: AbstractSpectralFunction,
        gradient: AbstractFunctionGradient,
        quantity: AbstractQuantity = Trace(),
        *,
        k: int | Adaptive,
        num_steps: int,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        """`run` for a function of the singular values of any A with at least as many rows
        as columns, by Golub-Kahan. The `quantity` is what is made of the trace."""

        def form(flat, probe):
            return golub_kahan_form(
                flat.mv,
                flat.adjoint_mv,
                probe,
                function,
                num_steps,
                window=self.window,
                lower_bound=self.lower_bound,
                eps=flat.eps,
            )

        settings = k, num_steps, key, execution
        return self._mean(form, operator, function, gradient, *settings, False, quantity)

    def _mean(
        self,
        form: Callable[[FlatOperator, Array], QuadraticForm],
        operator: FlatOperator,
        function: AbstractSpectralFunction,
        gradient: AbstractFunctionGradient,
        k: int | Adaptive,
        num_steps: int,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
        hermitian: bool,
        quantity: AbstractQuantity,
    ) -> Estimate:
        def body(flat, index):
            probe = draw_for(flat, self.sampler, key, index[None])
            one = form(flat.frozen, probe[:, 0])
            frame = gradient.frame(function, one.gradient[:, None], probe, hermitian)
            value = attach(flat, one.value, frame, execution=Local())
            errors = jnp.append(one.bracket, one.rounding)
            return value, (errors, one.extremes, one.residual)

        def reduce(outs, valid):
            samples, (errors, extremes, _) = outs
            errors = Moments.of(errors, valid)
            return Moments.of(samples, valid), errors, span(extremes)

        def merge(parts):
            moments, errors, extremes = parts
            # Of no samples, the extremes are 0.
            made = moments.count[:, None] > 0
            extremes = jnp.where(made, extremes, extremes[jnp.argmax(made)])
            return Moments.merge(moments), Moments.merge(errors), span(extremes)

        settings = {"width": num_steps, "quantity": quantity}
        streamed = stream(body, reduce, merge, operator, k, execution, **settings)
        moments, errors, extremes = streamed.summary
        sample_errors, _, residuals = streamed.others
        low, high, rounding = errors.center[0]
        extra = {"gradient_residual": residuals, "ritz_values": extremes}
        if function.bracketed:
            extra["sample_brackets"] = sample_errors[:, :2]
            extra["bracket"] = jnp.stack([low, high])
        in_domain = check_domain(
            function,
            operator,
            extremes,
            moments.mean,
            RESULTS.not_positive_definite if hermitian else RESULTS.zero_determinant,
        )
        precise = check_precision(operator, moments, high - low, rounding)
        return Estimate(
            value=attach_derivative(moments.mean, streamed.mean),
            std_err=moments.std_err(),
            samples=streamed.samples,
            num_matvecs=streamed.count * num_steps * (1 if hermitian else 2),
            rounding=operator.rounding,
            result=first_failure(in_domain, precise, streamed.loop.result),
            extra=extra | streamed.loop.extra,
            state=streamed.loop.state,
        )


SLQEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: default is [`traceax.RademacherSampler`][].
- `window`: default is `None`, full reorthogonalisation.
- `lower_bound`: default is `None`.

**Raises:**

`ValueError` for a negative `window`.
"""
