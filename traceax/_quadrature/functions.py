import abc
import math
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.special import xlogy
from jaxtyping import Array, DTypeLike, Inexact, Scalar

from .._core.checks import check_scalar, plain_integer
from .._numerics.small_matrix import by_eigenvalues, exponential, power, shifted_inverse


class AbstractSpectralFunction(eqx.Module):
    """A function $f$ of the eigenvalues of an operator: real on real numbers, and, for
    operators that are not Hermitian, analytic around their eigenvalues.

    To write one, subclass, give the attributes and define `__call__`. A plain callable
    will do too, as a function of all reals. Derivatives in a function's own arrays work.

    !!! Example

        ```python
        from typing import ClassVar

        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        class Fraction(tx.AbstractSpectralFunction):
            # x / (x + noise): its trace is the effective dimension of ridge regression.
            noise: float
            semidefinite_domain: ClassVar[bool] = True
            singular_at_zero: ClassVar[bool] = False
            bracketed: ClassVar[bool] = True
            nonnegative: ClassVar[bool] = True

            def __call__(self, x):
                return x / (x + self.noise)

        operator = lx.DiagonalLinearOperator(jnp.array([1.0, 3.0]))
        solution = tx.trace_of_function(operator, Fraction(1.0), k=2, num_steps=2)
        print(f"{solution.value:.3f}")  # 1.250
        ```

    **Attributes:**

    - `semidefinite_domain`: whether the domain has no negative numbers.
    - `singular_at_zero`: whether 0 is outside the domain.
    - `bracketed`: whether on positive numbers the derivatives from the second on
        alternate in sign, so that Gauss and Gauss-Radau rules bracket $z^* f(A) z$.
    - `nonnegative`: whether $f \\ge 0$ on the domain, so that $f(A)$ is semidefinite.
    - `of_singular_values`: whether it is one of the singular values of A, which then need
        not be Hermitian, rather than of its eigenvalues; `bracketed` is of
        $f(\\sqrt{x})$ then.
    """

    semidefinite_domain: eqx.AbstractVar[bool]
    singular_at_zero: eqx.AbstractVar[bool]
    bracketed: eqx.AbstractVar[bool]
    nonnegative: eqx.AbstractVar[bool]
    of_singular_values: ClassVar[bool] = False

    @abc.abstractmethod
    def __call__(self, x: Inexact[Array, " s"]) -> Inexact[Array, " s"]:
        """The function, elementwise.

        **Arguments:**

        - `x`: eigenvalues, an array of shape `(s,)`, real for Hermitian operators.

        **Returns:**

        An array of the same shape and dtype.
        """

    def derivative(self, x: Inexact[Array, " s"]) -> Inexact[Array, " s"]:
        """The derivative, elementwise; by default `jax.jvp` of `__call__`.

        **Arguments:**

        - `x`: as for `__call__`.

        **Returns:**

        An array of the shape of `x`.
        """
        return jax.jvp(self, (x,), (jnp.ones_like(x),))[1]

    def of_matrix(
        self, matrix: Inexact[Array, "s s"]
    ) -> tuple[Inexact[Array, "s s"], Inexact[Array, "s s"]]:
        """The function and its derivative of a small matrix, for operators that are not
        Hermitian; by default from its eigenvalues and eigenvectors. Where these are too
        ill conditioned, half of the digits are correct, which the run measures. Override
        it where there is a better method.

        **Arguments:**

        - `matrix`: M, any square matrix, real or complex, constant to derivatives.

        **Returns:**

        $f(M)$ and $f'(M)$, of the shape and dtype of `matrix`, not finite where they are
        not defined.
        """
        return by_eigenvalues(
            self,
            self.derivative,
            matrix,
            semidefinite_domain=self.semidefinite_domain,
            singular_at_zero=self.singular_at_zero,
        )

    @property
    def degree(self) -> int | None:
        """Of a polynomial (of singular values: in their squares), for which rules of
        enough steps are exact; else `None`."""
        return None

    @property
    def derivative_by_solves(self) -> tuple[float, int] | None:
        """`(c, p)` if the derivative is $c x^{-p}$ with an integer $p \\ge 1$: then
        [`traceax.SolveGradient`][] can make gradients."""
        return None


class Log(AbstractSpectralFunction):
    """The natural logarithm, whose trace is $\\log\\det A$. Domain: `x > 0`.

    !!! Example

        ```python
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        operator = lx.DiagonalLinearOperator(jnp.array([2.0, 4.0]))
        solution = tx.trace_of_function(operator, tx.Log(), k=2, num_steps=2)
        print(f"{solution.value:.3f}")  # 2.079
        ```
    """

    semidefinite_domain: ClassVar[bool] = True
    singular_at_zero: ClassVar[bool] = True
    bracketed: ClassVar[bool] = True
    nonnegative: ClassVar[bool] = False

    def __call__(self, x):
        return jnp.log(x)

    @property
    def derivative_by_solves(self) -> tuple[float, int] | None:
        return 1.0, 1


class Inverse(AbstractSpectralFunction):
    """$1 / (x + s)$. Domain: `x > 0`; with a positive shift s `x >= 0`.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        operator = lx.DiagonalLinearOperator(jnp.array([2.0, 4.0]))

        def trace(shift):
            function = tx.Inverse(shift)
            return tx.trace_of_function(operator, function, k=2, num_steps=2).value

        print(f"{trace(0.0):.3f}")  # 0.750
        first, second = jax.vmap(trace)(jnp.array([1.0, 2.0]))
        print(f"{first:.3f} {second:.3f}")  # 0.533 0.417
        ```

    **Attributes:**

    - `shift`: s, a real number or array of shape `()`, in which derivatives work; a
        complex one only for an operator of complex dtype without a Hermitian tag. The
        real part of an array must be positive; where it is not, the result is NaN.
    """

    shift: Scalar | float
    _shifted: bool = eqx.field(static=True, init=False, repr=False)
    semidefinite_domain: ClassVar[bool] = True
    bracketed: ClassVar[bool] = True
    nonnegative: ClassVar[bool] = True

    def __init__(self, shift: Scalar | float = 0.0):
        """**Arguments:**

        - `shift`: what is added to the eigenvalues. Default is 0.

        **Raises:**

        `TypeError` for a `shift` that is no scalar, `ValueError` for a negative number.
        """
        check_scalar("shift", shift, real=False)
        known = isinstance(shift, int | float)
        if known and shift < 0:
            raise ValueError(
                f"`shift` must not be negative. Found {shift!r}. Shift the operator."
            )
        # Also where a transformation makes an array of the number.
        self.shift, self._shifted = shift, not known or shift > 0

    @property
    def singular_at_zero(self) -> bool:  # pyright: ignore
        return not self._shifted

    def __call__(self, x):
        return 1 / (x + self._positive(x.dtype))

    def of_matrix(self, matrix):
        value = shifted_inverse(self._positive(matrix.dtype), matrix)
        return value, -jnp.matmul(value, value, precision="highest")

    def _positive(self, dtype: Any) -> Scalar:
        shift = _parameter("shift", self.shift, dtype)
        return jnp.where(shift.real > 0, shift, jnp.nan) if self._shifted else shift

    @property
    def derivative_by_solves(self) -> tuple[float, int] | None:
        return None if self._shifted else (-1.0, 2)


class Power(AbstractSpectralFunction):
    """$x^p$. Domain: `x > 0` for negative p, `x >= 0` for other fractional p, all reals
    for whole p from 0 on.

    !!! Example

        ```python
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        operator = lx.DiagonalLinearOperator(jnp.array([4.0, 9.0]))
        solution = tx.trace_of_function(operator, tx.Power(0.5), k=2, num_steps=2)
        print(f"{solution.value:.3f}")  # 5.000
        ```

    **Attributes:**

    - `exponent`: p, a Python number.
    """

    exponent: int | float = eqx.field(static=True)

    def __init__(self, exponent: int | float):
        """**Arguments:**

        - `exponent`: p, a Python int or float.

        **Raises:**

        `TypeError` for anything else, `ValueError` for a number that is not finite.
        """
        exponent = plain_integer(exponent)
        if isinstance(exponent, bool) or not isinstance(exponent, int | float):
            raise TypeError(
                "`exponent` must be a Python int or float. Found an object of type "
                f"{type(exponent).__name__}. For a traced exponent `p` pass the callable "
                "`lambda x: x**p` as the function."
            )
        if not math.isfinite(exponent):
            raise ValueError(f"`exponent` must be finite. Found {exponent}.")
        self.exponent = exponent

    @property
    def _whole(self) -> bool:
        return self.exponent == int(self.exponent)

    @property
    def semidefinite_domain(self) -> bool:  # pyright: ignore
        return self.exponent < 0 or not self._whole

    @property
    def singular_at_zero(self) -> bool:  # pyright: ignore
        return self.exponent < 0

    @property
    def bracketed(self) -> bool:  # pyright: ignore
        return self.semidefinite_domain and self.exponent < 2

    @property
    def nonnegative(self) -> bool:  # pyright: ignore
        return self.semidefinite_domain or self.exponent % 2 == 0

    @property
    def degree(self) -> int | None:
        return None if self.semidefinite_domain else int(self.exponent)

    def __call__(self, x):
        return x ** int(self.exponent) if self._whole else x**self.exponent

    def of_matrix(self, matrix):
        if not self._whole:
            return super().of_matrix(matrix)
        return power(matrix, int(self.exponent))

    @property
    def derivative_by_solves(self) -> tuple[float, int] | None:
        if self.exponent < 0 and self._whole:
            return float(self.exponent), 1 - int(self.exponent)
        return None


class Exp(AbstractSpectralFunction):
    """$\\exp(s x)$, for partition functions, heat kernels and Estrada indices. Domain:
    all reals.

    !!! Example

        ```python
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        operator = lx.DiagonalLinearOperator(jnp.array([0.0, 2.0]))
        solution = tx.trace_of_function(operator, tx.Exp(-1.0), k=2, num_steps=2)
        print(f"{solution.value:.3f}")  # 1.135
        ```

    **Attributes:**

    - `scale`: s, a real number or array of shape `()`, in which derivatives work; a
        complex one only for an operator of complex dtype without a Hermitian tag.
    """

    scale: Scalar | float = 1.0
    semidefinite_domain: ClassVar[bool] = False
    singular_at_zero: ClassVar[bool] = False
    bracketed: ClassVar[bool] = False
    nonnegative: ClassVar[bool] = True

    def __check_init__(self):
        check_scalar("scale", self.scale, real=False)

    def __call__(self, x):
        return jnp.exp(_parameter("scale", self.scale, x.dtype) * x)

    def of_matrix(self, matrix):
        scale = _parameter("scale", self.scale, matrix.dtype)
        value = exponential(scale, matrix)
        return value, scale * value


Exp.__init__.__doc__ = """**Arguments:**

- `scale`: what the eigenvalues are multiplied by. Default is 1.

**Raises:**

`TypeError` for a `scale` that is no scalar.
"""


def _parameter(name: str, value: Scalar | float, dtype: DTypeLike) -> Scalar:
    """As an array of the dtype of eigenvalues, or of a matrix that has them."""
    if jnp.iscomplexobj(value) and not jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"`{name}` is complex, which needs an operator of complex dtype without a "
            f"Hermitian tag. Found {value!r}, and {jnp.dtype(dtype).name} eigenvalues or "
            "matrices. Convert the operator, and leave out its tag."
        )
    return jnp.asarray(value, dtype)


class Entropy(AbstractSpectralFunction):
    """$-x \\log x$, for the von Neumann entropy of a density matrix, in nats. Domain:
    `x >= 0`, with the value 0 at 0.

    !!! Example

        ```python
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        operator = lx.DiagonalLinearOperator(jnp.array([0.5, 0.5]))
        solution = tx.trace_of_function(operator, tx.Entropy(), k=2, num_steps=2)
        print(f"{solution.value:.3f}")  # 0.693
        ```
    """

    semidefinite_domain: ClassVar[bool] = True
    singular_at_zero: ClassVar[bool] = False
    bracketed: ClassVar[bool] = True
    nonnegative: ClassVar[bool] = False

    def __call__(self, x):
        return -xlogy(x, x)

    def derivative(self, x: Inexact[Array, " s"]) -> Inexact[Array, " s"]:
        return -1 - jnp.log(x)
