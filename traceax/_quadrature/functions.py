"""Functions of eigenvalues: logarithm, inverse, powers, exponential and entropy."""

import math
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jax.scipy.special import xlogy
from jaxtyping import Array, DTypeLike, Inexact, Scalar

from .._core.arithmetic import complex_dtype
from .._core.checks import check_scalar, plain_integer
from .._numerics.small_matrix import exponential, power, shifted_inverse
from .base import AbstractSpectralFunction


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
    """$1 / (x + s)$. Domain: `x > 0`, or `x >= 0` for a positive shift s.

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

    - `shift`: s, a number or array of shape `()`. Derivatives with respect to it work. It
        may be complex for a Hermitian operator, or one of complex dtype. The real part of
        an array must be positive; where it is not, the result is NaN.
    """

    shift: Scalar | complex
    _shifted: bool = eqx.field(static=True, init=False, repr=False)
    semidefinite_domain: ClassVar[bool] = True

    def __init__(self, shift: Scalar | complex = 0.0):
        """**Arguments:**

        - `shift`: the number to add to the eigenvalues. Default is 0.

        **Raises:**

        `TypeError` if `shift` is not a scalar, `ValueError` if it is a negative number.
        """
        check_scalar("shift", shift, real=False)
        is_number = isinstance(shift, int | float)
        if is_number and shift < 0:
            raise ValueError(
                f"`shift` must not be negative. Found {shift!r}. Shift the operator."
            )
        # Static, since the domain depends on it: a transformation may turn the number
        # into an array, whose value is not known while tracing.
        self.shift, self._shifted = shift, not is_number or shift > 0

    @property
    def singular_at_zero(self) -> bool:  # pyright: ignore
        return not self._shifted

    @property
    def bracketed(self) -> bool:  # pyright: ignore
        return not jnp.iscomplexobj(self.shift)

    @property
    def nonnegative(self) -> bool:  # pyright: ignore
        return not jnp.iscomplexobj(self.shift)

    def __call__(self, x):
        return 1 / (x + self._positive(x.dtype))

    def of_matrix(self, matrix):
        _check_real("shift", self.shift, matrix.dtype)
        value = shifted_inverse(self._positive(matrix.dtype), matrix)
        return value, -jnp.matmul(value, value, precision="highest")

    def _positive(self, dtype: Any) -> Scalar:
        """The shift, as NaN where it is an array whose real part is not positive."""
        shift = _parameter(self.shift, dtype)
        return jnp.where(shift.real > 0, shift, jnp.nan) if self._shifted else shift

    @property
    def derivative_by_solves(self) -> tuple[float, int] | None:
        return None if self._shifted else (-1.0, 2)


class Power(AbstractSpectralFunction):
    """$x^p$. Domain: all reals if p is 0, 1, 2 and so on; `x > 0` if p is negative;
    `x >= 0` for all other p.

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

        `TypeError` for any other type, `ValueError` for a number that is not finite.
        """
        exponent = plain_integer(exponent)
        if isinstance(exponent, bool) or not isinstance(exponent, int | float):
            raise TypeError(
                "`exponent` must be a Python int or float. Found an object of type "
                f"{type(exponent).__name__}. For a traced exponent `p`, pass the "
                "callable `lambda x: x**p` as the function."
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
        # A fractional power above 2 has derivatives of alternating sign too, but only
        # from a later one than the second on.
        return self.semidefinite_domain and self.exponent < 2

    @property
    def nonnegative(self) -> bool:  # pyright: ignore
        return self.semidefinite_domain or self.exponent % 2 == 0

    @property
    def degree(self) -> int | None:
        return None if self.semidefinite_domain else int(self.exponent)

    def __call__(self, x):
        # An integer exponent becomes multiplications, which negative x allow.
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

    - `scale`: s, a number or array of shape `()`. Derivatives with respect to it work. It
        may be complex for a Hermitian operator, or one of complex dtype. Of
        $\\exp(-i t A)$, the evolution in time, the scale is `-1j * t`.
    """

    scale: Scalar | complex
    semidefinite_domain: ClassVar[bool] = False
    singular_at_zero: ClassVar[bool] = False
    bracketed: ClassVar[bool] = False

    def __init__(self, scale: Scalar | complex = 1.0):
        """**Arguments:**

        - `scale`: the number to multiply the eigenvalues by. Default is 1.

        **Raises:**

        `TypeError` if `scale` is not a scalar.
        """
        check_scalar("scale", scale, real=False)
        self.scale = scale

    @property
    def nonnegative(self) -> bool:  # pyright: ignore
        return not jnp.iscomplexobj(self.scale)

    def __call__(self, x):
        return jnp.exp(_parameter(self.scale, x.dtype) * x)

    def of_matrix(self, matrix):
        _check_real("scale", self.scale, matrix.dtype)
        # Scaling and squaring is accurate where eigenvectors are ill conditioned.
        scale = _parameter(self.scale, matrix.dtype)
        value = exponential(scale, matrix, jnp.zeros_like(scale))
        return value, scale * value


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


def _parameter(value: Scalar | complex, dtype: DTypeLike) -> Scalar:
    """A parameter of a function, as an array of the `dtype` of its argument, or of the
    complex one."""
    is_complex = jnp.iscomplexobj(value)
    return jnp.asarray(value, complex_dtype(dtype) if is_complex else dtype)


def _check_real(name: str, value: Scalar | complex, dtype: DTypeLike) -> None:
    """Raise for a complex parameter of a function of a real matrix."""
    if jnp.iscomplexobj(value) and not jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"`{name}` is complex, which needs an operator of complex dtype, or one that "
            f"is tagged as Hermitian. Found {value!r}, and a matrix of dtype "
            f"{jnp.dtype(dtype).name}. Convert the operator to a complex dtype."
        )
