"""The peers, each as `matrix -> jitted function of (matrix, key)` for a budget k.

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


def peer_functions(make_operator, matvec, n, k):
    """Functions `(data, key) -> estimate` by name; `matvec(v, data)` is the product and
    `make_operator(data)` the tagged lineax operator."""
    module = published()
    like = jnp.zeros((n,), jnp.float32)

    def old(estimator):
        return lambda data, key: estimator.estimate(key, make_operator(data), k)[0]

    def matfree(integrand, sampler, num, wrap):
        estimate = wrap(integrand, sampler(like, num=num))
        return lambda data, key: estimate(lambda v: matvec(v, data), key)

    monte_carlo = stochtrace.estimator_monte_carlo
    leave_one_out = stochtrace.estimator_leave_one_out
    signs, sphere = stochtrace.sampler_signs, stochtrace.sampler_sphere
    trace = stochtrace.monte_carlo_trace()
    xtrace = stochtrace.leave_one_out_xtrace()
    xnystrace = stochtrace.leave_one_out_xnystrace()
    signs_int = module.RademacherSampler(jnp.float32)
    return {
        "traceax 1.0": {
            "Hutchinson": old(module.HutchinsonEstimator(signs_int)),
            "Hutch++": old(module.HutchPlusPlusEstimator(signs_int)),
            "XTrace": old(module.XTraceEstimator()),
            "XNysTrace": old(module.XNysTraceEstimator()),
        },
        "matfree": {
            "Hutchinson": matfree(trace, signs, k, monte_carlo),
            "XTrace": matfree(xtrace, sphere, k // 2, leave_one_out),
            "XNysTrace": matfree(xnystrace, sphere, k, leave_one_out),
        },
    }
