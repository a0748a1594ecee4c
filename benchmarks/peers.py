"""The peers, each as a function `(data, key) -> (estimate, standard error)`.

`traceax` 1.0 shares our name, so it is loaded from a folder of its own:

    pip install --no-deps --target .peers traceax==1.0.2
    pip install matfree
"""

import importlib.util
import sys
from pathlib import Path

import jax.numpy as jnp
from matfree import stochtrace


def published(folder: Path = Path(".peers")):
    """The module of traceax 1.0, under the name `traceax_1`."""
    path = folder / "traceax" / "__init__.py"
    spec = importlib.util.spec_from_file_location("traceax_1", path)
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(f"{path}: install the peers as this module's text says.")
    module = importlib.util.module_from_spec(spec)
    sys.modules["traceax_1"] = module
    spec.loader.exec_module(module)
    return module


def peer_functions(make_operator, matvec, n, k, dtype=jnp.float32):
    """By package and name, for a budget of k products; `matvec(v, data)` is the product
    and `make_operator(data)` the tagged lineax operator. The standard error is NaN where
    there is none."""
    module = published()
    like = jnp.zeros((n,), dtype)

    def old(estimator):
        def estimate(data, key):
            value, stats = estimator.estimate(key, make_operator(data), k)
            return value, stats.get("std.err", jnp.full((), jnp.nan, dtype))

        return estimate

    def matfree(integrand, sampler, num, wrap):
        estimate = wrap(integrand, sampler(like, num=num))
        return lambda data, key: estimate(lambda v: matvec(v, data), key)

    monte_carlo = stochtrace.estimator_monte_carlo_mean_and_sem
    leave_one_out = stochtrace.estimator_leave_one_out_mean_and_sem
    signs, sphere = stochtrace.sampler_signs, stochtrace.sampler_sphere
    trace = stochtrace.monte_carlo_trace()
    xtrace = stochtrace.leave_one_out_xtrace()
    xnystrace = stochtrace.leave_one_out_xnystrace()
    floating_signs = module.RademacherSampler(dtype)
    return {
        "traceax 1.0": {
            "Hutchinson": old(module.HutchinsonEstimator(floating_signs)),
            "Hutch++": old(module.HutchPlusPlusEstimator(floating_signs)),
            "XTrace": old(module.XTraceEstimator(module.SphereSampler(dtype))),
            "XNysTrace": old(module.XNysTraceEstimator(module.SphereSampler(dtype))),
        },
        "matfree": {
            "Hutchinson": matfree(trace, signs, k, monte_carlo),
            "XTrace": matfree(xtrace, sphere, k // 2, leave_one_out),
            "XNysTrace": matfree(xnystrace, sphere, k, leave_one_out),
        },
    }
