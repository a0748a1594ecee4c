"""The interface of estimators of the trace of a function of an operator."""

import abc
from typing import Any, ClassVar

import equinox as eqx
from jaxtyping import DTypeLike, PRNGKeyArray, Scalar

from .._core.flat import FlatOperator
from .._core.quantity import AbstractQuantity, Trace
from .._core.sampler import AbstractSampler
from .._core.solution import Estimate
from .._quadrature.domain import is_complex_on_reals
from .._quadrature.functions import AbstractSpectralFunction
from .._run.budget import Budget, default_max_k
from .._run.execution import AbstractExecution
from .._run.random_steps import RandomSteps
from .._run.steps import AdaptiveSteps
from .gradients import AbstractFunctionGradient


class AbstractFunctionEstimator(eqx.Module):
    """An estimator of $\\mathrm{tr} f(A)$. Hand one to
    [`traceax.trace_of_function`][] or [`traceax.logdet`][].

    !!! Example

        ```python
        from typing import Any, ClassVar

        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        class Frugal(tx.AbstractFunctionEstimator):
            # Krylov-aware where there are enough probes for it, SLQ elsewhere.
            sampler: tx.AbstractSampler = tx.SphereSampler()
            min_probes: ClassVar[int] = 1

            def run(self, operator, function, gradient, *, k, **settings):
                few = isinstance(k, tx.Adaptive) or k < 8
                chosen = tx.SLQEstimator if few else tx.KrylovAwareEstimator
                run = chosen(self.sampler).run
                return run(operator, function, gradient, k=k, **settings)

        operator = lx.MatrixLinearOperator(2 * jnp.eye(100), lx.symmetric_tag)
        solution = tx.trace_of_function(
            operator, tx.Exp(), Frugal(), k=4, num_steps=2, key=jax.random.key(0)
        )
        print(f"{solution.value:.1f}")  # 738.9
        ```

    **Attributes:**

    - `sampler`: the distribution of the probes.
    - `min_probes`: the smallest `k` that the estimator works with.
    - `most_steps`: the largest number of steps that is chosen automatically where
        [`traceax.AdaptiveSteps`][] sets no limit, by default 128.
    """

    sampler: eqx.AbstractVar[AbstractSampler]
    min_probes: eqx.AbstractClassVar[int]
    most_steps: ClassVar[int] = 128

    @abc.abstractmethod
    def run(
        self,
        operator: FlatOperator,
        function: Any,
        gradient: AbstractFunctionGradient,
        *,
        k: int | Budget,
        num_steps: int | AdaptiveSteps | RandomSteps,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
        quantity: AbstractQuantity = Trace(),
    ) -> Estimate:
        """Estimate $\\mathrm{tr} f(A)$.

        **Arguments:**

        - `operator`: A, as a map of flat vectors of shape `(n,)`.
        - `function`: f, a [`traceax.AbstractSpectralFunction`][].
        - `gradient`: how the derivative is estimated.
        - `k`: the number of probes, fixed or adaptive.
        - `num_steps`: the number of Lanczos steps, at most n, fixed or adaptive.
        - `key`: a JAX PRNG key, or `None` if the caller gave none.
        - `execution`: where matvecs are computed.
        - `quantity`: the function of the trace that users see (for a norm, a root of the
            trace). The tolerance of an adaptive budget applies to it. The estimate itself
            is one of the trace.

        **Returns:**

        An `Estimate` of `traceax.internal`, from about `k * num_steps` matvecs.
        """

    def default_max_k(self, operator: FlatOperator) -> int:
        """The largest number of probes where `Adaptive.max_k` is left out, 10,000 unless
        a subclass overrides this.

        **Arguments:**

        - `operator`: A, as a map of flat vectors of shape `(n,)`.

        **Returns:**

        A Python integer, 1 or more.
        """
        return default_max_k()

    def rescaled(
        self, factor: Scalar, least: Scalar | None = None
    ) -> "AbstractFunctionEstimator":
        """The same estimator for an operator whose spectrum lies above `factor` times the
        spectrum of the original operator. By default this is the estimator itself.
        Override the method in estimators that store bounds of the spectrum.

        **Arguments:**

        - `factor`: a positive number.
        - `least`: a known lower bound of the spectrum of the new operator, or `None`.

        **Returns:**

        An estimator of the same class.
        """
        return self


def describe_mismatch(operator: FlatOperator, function: AbstractSpectralFunction) -> str:
    """The part of an error message that describes an operator and a function that do not
    fit together."""
    certainty = "known" if operator.hermitian else "not known"
    described = f"the function `{type(function).__name__}`"
    if function.of_singular_values:
        described = (
            "a function of singular values, which `traceax.logdet` takes without a "
            "semidefinite tag"
        )
    return f"Found {described}, and an operator that is {certainty} to be Hermitian."


def check_of_eigenvalues(function: AbstractSpectralFunction) -> None:
    """Raise a `ValueError` for a function of singular values."""
    if function.of_singular_values:
        raise ValueError(
            "`function` must be a function of eigenvalues here. Found "
            f"`{type(function).__name__}`, a function of singular values. For a positive "
            "semidefinite operator pass the same function of eigenvalues. For traces use "
            "`traceax.trace_of_function`."
        )


def check_real_on_reals(function: AbstractSpectralFunction, dtype: DTypeLike) -> None:
    """Raise a `TypeError` for a function with complex values at eigenvalues of a
    Hermitian operator of `dtype`."""
    if is_complex_on_reals(function, dtype):
        raise TypeError(
            f"`function` must be real on real numbers here. Found {function!r}, which is "
            "not. `traceax.trace_of_function` by the default estimator, "
            "`traceax.diagonal_of_function` and `traceax.function_of` take complex "
            "functions of Hermitian operators."
        )
