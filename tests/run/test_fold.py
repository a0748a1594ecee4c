"""Sums over probes, which all estimators share."""

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

from traceax._operators.door import flatten
from traceax._run.execution import Local
from traceax._run.fold import fold


@pytest.mark.parametrize("rest", [0, 1])
def test_long_sums_keep_their_digits(rest):
    """Of as many equal terms one after another float32 lost four of seven digits."""
    n, term = 200_000 + rest, np.float32(0.7123456)
    flat = flatten(lx.IdentityLinearOperator(jax.ShapeDtypeStruct((n,), np.float32)))

    @eqx.filter_jit
    def total(term, scale):
        fn = lambda _, index: (scale * term + 0 * index, ())  # noqa: E731
        return fold(fn, lambda *_: (), lambda _: (), flat, n, Local(8))[0]

    # An array too, as for leaves; and the derivative of the sum.
    terms = np.array([term, 2 * term])
    exact = n * terms.astype(np.float64)
    np.testing.assert_allclose(total(jnp.asarray(terms), 1.0), exact, rtol=1e-6)
    slope = jax.grad(lambda scale: total(jnp.asarray(term), scale))(np.float32(1))
    np.testing.assert_allclose(slope, exact[0], rtol=1e-3)
