"""Quantiles of Student's distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from traceax._core.quantiles import student_quantile


@pytest.mark.parametrize("confidence", [0.5, 0.68, 0.95, 0.99])
def test_student_quantile(confidence):
    freedom = np.array([1.0, 2, 3, 4, 9, 29, 1e9])
    found = jax.jit(student_quantile)(jnp.asarray(confidence), jnp.asarray(freedom))
    assert np.allclose(found, stats.t.ppf((1 + confidence) / 2, freedom), rtol=1e-2)
