"""One of two processes with two devices each (arguments: process, port), or one process
with four (single). Prints numbers that the test compares."""

import sys

import common
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

import traceax as tx


jax.config.update("jax_cpu_collectives_implementation", "gloo")
PROCESS, *PORT = sys.argv[1:]
if PROCESS != "single":
    jax.distributed.initialize(f"127.0.0.1:{PORT[0]}", 2, int(PROCESS))
assert len(jax.devices()) == 4, jax.devices()
assert tx.devices() == jax.devices()
EXECUTION = tx.Sharded(tx.probe_mesh())
N = 24


def show(kind, name, *arrays):
    """Replicated arrays, bit for bit. BITS are to be the same in any process, ABOUT up to
    the order of sums."""
    numbers = [float(x) for a in arrays for x in np.asarray(a, np.float64).reshape(-1)]
    print(kind, name, *[x.hex() for x in numbers], sep="|", flush=True)


def trace(estimator, k):
    def call(matrix):
        operator = lx.MatrixLinearOperator(matrix, common.PSD)
        return tx.trace(
            operator,
            estimator,
            k=k,
            key=common.some_key(),
            execution=EXECUTION,
            throw=False,
        )

    return call


def diagonal(estimator, k):
    def call(matrix):
        return tx.diagonal(
            common.matrix_free(matrix, common.PSD),
            estimator,
            k=k,
            key=common.some_key(),
            execution=EXECUTION,
            throw=False,
        )

    return call


def logdet(matrix):
    operator = lx.MatrixLinearOperator(matrix, common.PSD)
    return tx.logdet(
        operator,
        k=13,
        num_steps=6,
        key=common.some_key(),
        execution=EXECUTION,
        throw=False,
    )


def answers(matrix):
    told = []
    budget = tx.Adaptive(
        rtol=0.05,
        max_k=20,
        round_size=4,
        min_samples=4,
        callback=lambda *x: told.append(x),
    )
    cases = {
        "Hutchinson, k=13": trace(tx.HutchinsonEstimator(), 13),
        "XTrace, adaptive": trace(tx.XTraceEstimator(), budget),
        "Hutchinson, adaptive": trace(tx.HutchinsonEstimator(), budget),
        "diagonal by Hutchinson": diagonal(tx.HutchinsonEstimator(), 13),
        "log-determinant": logdet,
    }
    for name, call in cases.items():
        solution, slope = common.value_and_grad(call)(matrix)
        assert solution.result == tx.RESULTS.successful, name
        made = solution.stats["num_matvecs"]
        show("BITS", name, solution.value, solution.std_err, made)
        show("ABOUT", f"gradient of {name}", slope[:, 0])
        common.say(name)
    show("TOLD", "callbacks", len(told))


def errors(matrix):
    wrong = lx.MatrixLinearOperator(-matrix, common.PSD)
    nonfinite = lx.MatrixLinearOperator(matrix.at[3, 3].set(jnp.nan))
    right = lx.MatrixLinearOperator(matrix, common.PSD)
    for name, operator, estimator, expected in (
        ("tag", wrong, tx.XNysTraceEstimator(), tx.RESULTS.not_semidefinite),
        ("nan", nonfinite, tx.HutchinsonEstimator(), tx.RESULTS.nonfinite_product),
    ):
        settings = {"k": 8, "key": common.some_key(), "execution": EXECUTION}
        found = tx.trace(operator, estimator, **settings, throw=False)
        assert found.result == expected, name
        show("BITS", f"result, {name}", found.result._value)
        try:
            tx.trace(operator, estimator, **settings)
        except Exception as error:
            message = str(error)
            common.say(f"{name}: {type(error).__name__}: {message}")
        else:
            raise AssertionError(f"{name}: nothing was raised")
        assert tx.RESULTS[expected].splitlines()[0] in message, name
        again = tx.trace(right, estimator, **settings)
        show("BITS", f"after {name}", again.value, again.std_err)


MATRIX = common.positive_definite(N)
answers(MATRIX)
errors(MATRIX)
if PROCESS != "single":
    jax.distributed.shutdown()
