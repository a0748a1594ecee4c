import abc
from typing import ClassVar

import equinox as eqx
from jaxtyping import PRNGKeyArray, Scalar

from .._core.flat import FlatOperator
from .._core.quantity import AbstractQuantity, Trace
from .._core.sampler import AbstractSampler
from .._core.solution import Estimate
from .._quadrature.functions import AbstractSpectralFunction
from .._run.budget import Budget
from .._run.execution import AbstractExecution
from .._run.steps import AdaptiveSteps
from .gradients import AbstractFunctionGradient


class AbstractFunctionEstimator(eqx.Module):
    """An estimator of $\\mathrm{tr} f(A)$. Hand one to
    [`traceax.trace_of_function`][] or [`traceax.logdet`][].

    !!! Example

        ```python
        from typing import ClassVar

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

    - `sampler`: distribution of the probes.
    - `min_probes`: the smallest `k` that it works with.
    - `most_steps`: how many steps a call chooses at most if nothing is said, 128.
    """

    sampler: eqx.AbstractVar[AbstractSampler]
    min_probes: eqx.AbstractClassVar[int]
    most_steps: ClassVar[int] = 128

    @abc.abstractmethod
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
        """Estimate $\\mathrm{tr} f(A)$.

        **Arguments:**

        - `operator`: A, as a map of flat vectors.
        - `function`: f.
        - `gradient`: how the derivative is to be made.
        - `k`: the number of probes, a number or adaptive.
        - `num_steps`: the number of Lanczos steps, at most n, a number or adaptive.
        - `key`: a JAX PRNG key, or `None` if the caller gave none.
        - `execution`: where products are to be made.
        - `quantity`: what users see of the trace, to which the tolerance of an adaptive
            budget applies: for a norm, a root of the trace. The estimate itself is of the
            trace.

        **Returns:**

        An `Estimate` of `traceax.internal`, from about `k * num_steps` products.
        """

    def rescaled(
        self, factor: Scalar, least: Scalar | None = None
    ) -> "AbstractFunctionEstimator":
        """The same for an operator whose spectrum lies above `factor` times that of the
        one that it was made for. By default the estimator itself: override it where it
        holds what is known of the spectrum.

        **Arguments:**

        - `factor`: a positive number.
        - `least`: a number that the spectrum is known not to be below, or None.

        **Returns:**

        An estimator of the same class.
        """
        return self


def describe_mismatch(operator: FlatOperator, function: AbstractSpectralFunction) -> str:
    """The part of an error message that describes an operator and a function that do not
    fit each other."""
    known = "known" if operator.hermitian else "not known"
    described = f"the function `{type(function).__name__}`"
    if function.of_singular_values:
        described = (
            "a function of singular values, which `traceax.logdet` takes without a "
            "semidefinite tag"
        )
    return f"Found {described}, and an operator that is {known} to be Hermitian."
