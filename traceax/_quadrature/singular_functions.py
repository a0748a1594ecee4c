"""Functions of singular values, for log-determinants and Schatten norms.

With `A* A = V S^2 V*` the run sees eigenvalues s^2 of `A* A`, so `bracketed` and `degree`
refer to `f(sqrt(x))`: `log(x) / 2` and `x^(p/2)`.
"""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from .base import AbstractSpectralFunction


class SingularLog(AbstractSpectralFunction):
    """The logarithm of singular values, whose sum is `log |det A|`."""

    semidefinite_domain: ClassVar[bool] = True
    singular_at_zero: ClassVar[bool] = True
    bracketed: ClassVar[bool] = True
    nonnegative: ClassVar[bool] = False
    of_singular_values: ClassVar[bool] = True

    def __call__(self, x):
        return jnp.log(x)

    @property
    def derivative_by_solves(self) -> tuple[float, int] | None:
        return 1.0, 1


class SingularPower(AbstractSpectralFunction):
    """`s^p` of singular values s, for a real p > 0."""

    exponent: float = eqx.field(static=True)
    semidefinite_domain: ClassVar[bool] = True
    singular_at_zero: ClassVar[bool] = False
    nonnegative: ClassVar[bool] = True
    of_singular_values: ClassVar[bool] = True

    def __init__(self, exponent: float):
        self.exponent = exponent

    @property
    def bracketed(self) -> bool:  # pyright: ignore
        # `x^(p/2)` is bracketed for powers below 2, but for a linear function the Gauss
        # rule is exact.
        return self.exponent < 4 and self.exponent != 2

    @property
    def degree(self) -> int | None:
        return int(self.exponent / 2) if self.exponent % 2 == 0 else None

    def __call__(self, x):
        return x**self.exponent

    def derivative(self, x: Inexact[Array, " s"]) -> Inexact[Array, " s"]:
        return self.exponent * x ** (self.exponent - 1)
