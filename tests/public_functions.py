"""Every public function, as one of a matrix and a key that returns arrays."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np

import traceax as tx

from .helpers import hermitian, matrix_free, PSD


N = 24
KEY = jr.key(0)
SETTINGS = {"k": 4, "num_steps": 5}


@ft.cache
def example(seed=0):
    return jnp.asarray(hermitian(seed, np.linspace(1, 3, N) + seed))


def arrays_of(solution):
    return solution.value, solution.std_err, solution.stats["samples"]


def dense(matrix, tags=PSD):
    return lx.MatrixLinearOperator(matrix, tags)


def traced(estimator):
    def run(matrix, key, throw=True):
        solution = tx.trace(dense(matrix), estimator, k=8, key=key, throw=throw)
        return arrays_of(solution)

    return run


def on_diagonal(estimator):
    def run(matrix, key, throw=True):
        solution = tx.diagonal(
            matrix_free(matrix, PSD), estimator, k=8, key=key, throw=throw
        )
        return solution.value, solution.std_err

    return run


def leaf_traces(matrix, key, throw=True):
    estimator = tx.XTraceEstimator()
    solution = tx.leaf_traces(matrix_free(matrix), estimator, k=8, key=key, throw=throw)
    return solution.value, solution.std_err


def jacobi(matrix, key, throw=True):
    operator = matrix_free(matrix, PSD)
    return (tx.jacobi_preconditioner(operator, k=8, key=key, throw=throw).entries,)


def auto(matrix, key, throw=True):
    return arrays_of(tx.trace(matrix_free(matrix, PSD), k=8, key=key, throw=throw))


def exact(matrix, key, throw=True):
    operator, k = matrix_free(matrix), matrix.shape[0]
    estimator = tx.ExactTraceEstimator()
    return arrays_of(tx.trace(operator, estimator, k=k, key=key, throw=throw))


def sharded(matrix, key, throw=True):
    settings = {"execution": tx.Sharded(tx.probe_mesh()), "throw": throw}
    estimator = tx.XTraceEstimator()
    return arrays_of(tx.trace(dense(matrix), estimator, k=8, key=key, **settings))


def logdet(matrix, key, throw=True, **settings):
    settings = SETTINGS | {"key": key, "throw": throw} | settings
    solution = tx.logdet(dense(matrix), **settings)
    return (*arrays_of(solution), solution.stats["bracket"])


def general_logdet(matrix, key, throw=True):
    operator = dense(matrix + jnp.triu(matrix, 1), ())
    return arrays_of(tx.logdet(operator, key=key, throw=throw, **SETTINGS))


def nystrom_logdet(matrix, key, throw=True):
    settings = {"key": jr.fold_in(key, 1), "throw": throw}
    preconditioner = tx.nystrom_preconditioner(dense(matrix), 6, **settings)
    return logdet(matrix, key, throw, preconditioner=preconditioner)


def cholesky_logdet(matrix, key, throw=True):
    preconditioner = tx.pivoted_cholesky_preconditioner(dense(matrix), 6, throw=throw)
    return logdet(matrix, key, throw, preconditioner=preconditioner)


def nystrom_inverse(matrix, key, throw=True):
    settings = {"key": key, "throw": throw}
    preconditioner = tx.nystrom_preconditioner(dense(matrix), 6, **settings)
    return preconditioner.inverse().mv(matrix[0]), preconditioner.logdet


def function_trace(function, estimator=tx.SLQEstimator()):
    def run(matrix, key, throw=True):
        settings = SETTINGS | {"key": key, "throw": throw}
        solution = tx.trace_of_function(dense(matrix), function, estimator, **settings)
        return arrays_of(solution)

    return run


def general_function_trace(matrix, key, throw=True):
    operator = dense(matrix + jnp.triu(matrix, 1) / 4, ())
    settings = SETTINGS | {"key": key, "throw": throw}
    return arrays_of(tx.trace_of_function(operator, tx.Exp(-0.5), **settings))


def log_trace_exp(matrix, key, throw=True):
    settings = SETTINGS | {"key": key, "throw": throw}
    return arrays_of(tx.log_trace_exp(dense(matrix), 2.0, **settings))


def gaussian(matrix, key, throw=True):
    settings = SETTINGS | {"key": key, "throw": throw}
    return arrays_of(tx.gaussian_log_prob(dense(matrix), matrix[0], **settings))


def damped(x):
    return x * jnp.exp(-x)


@eqx.filter_jit
def product(operator, vector):
    return operator.mv(vector)


def eigenvalues(matrix, key, throw=True):
    pairs = tx.eigsh(dense(matrix), 2, key=key, throw=throw)
    return pairs.values, pairs.vectors, pairs.residuals


def singular_values(matrix, key, throw=True):
    triplets = tx.svds(dense(matrix[:20], ()), 2, key=key, throw=throw)
    return triplets.values, triplets.left, triplets.right


def action(matrix, key, throw=True):
    operator = tx.function_of(dense(matrix), tx.Inverse(), 5)
    return (product(operator, matrix[0]),)


def diagonal_of_inverse(matrix, key, throw=True):
    settings = {"k": 8, "num_steps": 5, "key": key, "throw": throw}
    solution = tx.diagonal_of_function(dense(matrix), tx.Inverse(), **settings)
    return solution.value, solution.std_err


def diagonal_of_product(matrix, key, throw=True):
    settings = {"k": 8, "num_steps": 5, "key": key, "throw": throw}
    factor = lx.MatrixLinearOperator(matrix[:5])
    solution = tx.diagonal_of_product(factor, dense(matrix), tx.Inverse(), **settings)
    return solution.value, solution.std_err


def difference(matrix, key, throw=True):
    pair = dense(matrix), dense(matrix @ matrix)
    settings = SETTINGS | {"key": key, "throw": throw}
    return arrays_of(tx.trace_difference(*pair, tx.Log(), **settings))


def frobenius_products(matrix, key, throw=True):
    pair = [dense(matrix), dense(matrix @ matrix)]
    solution = tx.frobenius_products(pair, k=8, key=key, throw=throw)
    return solution.value, solution.std_err


def curved(make):
    def run(matrix, key, throw=True):
        operator = make(matrix, matrix[0])
        estimator = tx.HutchinsonEstimator()
        return arrays_of(tx.trace(operator, estimator, k=8, key=key, throw=throw))

    return run


def layer(matrix):
    return lambda w: jnp.tanh(matrix @ w)


def squares(outputs):
    return jnp.sum(outputs**2)


def hessian(matrix, point):
    return tx.hessian(lambda w: squares(layer(matrix)(w)), point)


def ggn(matrix, point):
    return tx.ggn(layer(matrix), squares, point)


def jacobian_gram(matrix, point):
    return tx.jacobian_gram(layer(matrix), point)


def losses(w, rows):
    return jnp.tanh(rows @ w) ** 2


def empirical_fisher(matrix, point):
    return tx.empirical_fisher(losses, point, matrix.reshape(2, -1, *point.shape))


def data_gram(matrix, point):
    return tx.data_gram(matrix, chunk_size=7, standardise=True)


def divergence(matrix, key, throw=True):
    settings = {"k": 2, "key": key, "throw": throw}
    velocity, solution = tx.divergence(layer(matrix), matrix[0], **settings)
    return velocity, *arrays_of(solution)


def laplacian(matrix, key, throw=True):
    def fn(x):
        return squares(layer(matrix)(x))

    value, gradient, solution = tx.laplacian(fn, matrix[0], k=3, key=key, throw=throw)
    return *arrays_of(solution), value, gradient


def probes(sampler):
    def run(matrix, key, throw=True):
        return (sampler(key, matrix.shape[0], 5),)

    return run


def slope(run):
    def of(matrix, key, throw=True):
        return (jax.grad(lambda matrix: jnp.sum(run(matrix, key, throw)[0]))(matrix),)

    return of


FUNCTIONS = {
    "auto": auto,
    "hutchinson": traced(tx.HutchinsonEstimator()),
    "hutchpp": traced(tx.HutchPlusPlusEstimator()),
    "nystrompp": traced(tx.NystromPlusPlusEstimator()),
    "xtrace": traced(tx.XTraceEstimator()),
    "xnystrace": traced(tx.XNysTraceEstimator()),
    "diagonal-auto": on_diagonal(tx.AutoDiagonalEstimator()),
    "diagonal-hutchinson": on_diagonal(tx.HutchinsonEstimator()),
    "diagonal-diagpp": on_diagonal(tx.DiagPlusPlusEstimator()),
    "diagonal-xdiag": on_diagonal(tx.XDiagEstimator()),
    "diagonal-xnysdiag": on_diagonal(tx.XNysDiagEstimator()),
    "leaf-traces": leaf_traces,
    "jacobi": jacobi,
    "exact": exact,
    "sharded": sharded,
    "logdet": logdet,
    "logdet-general": general_logdet,
    "logdet-nystrom": nystrom_logdet,
    "logdet-cholesky": cholesky_logdet,
    "nystrom-inverse": nystrom_inverse,
    "power": function_trace(tx.Power(-1)),
    "exp": function_trace(tx.Exp(-0.5)),
    "callable": function_trace(damped),
    "exp-general": general_function_trace,
    "log-trace-exp": log_trace_exp,
    "gaussian": gaussian,
    "power-krylov": function_trace(tx.Power(-1), tx.KrylovAwareEstimator()),
    "difference": difference,
    "eigenvalues": eigenvalues,
    "singular-values": singular_values,
    "diagonal-of-inverse": diagonal_of_inverse,
    "diagonal-of-product": diagonal_of_product,
    "frobenius-products": frobenius_products,
    "action": action,
    "hessian": curved(hessian),
    "ggn": curved(ggn),
    "jacobian-gram": curved(jacobian_gram),
    "empirical-fisher": curved(empirical_fisher),
    "data-gram": curved(data_gram),
    "divergence": divergence,
    "laplacian": laplacian,
    "rademacher": probes(tx.RademacherSampler()),
    "normal": probes(tx.NormalSampler()),
    "sphere": probes(tx.SphereSampler()),
    "steinhaus": probes(tx.SteinhausSampler(jnp.complex128)),
    "slope-diagonal": slope(on_diagonal(tx.XDiagEstimator())),
    "slope-divergence": slope(lambda *args: divergence(*args)[1:]),
    "slope-laplacian": slope(laplacian),
    "slope-xtrace": slope(traced(tx.XTraceEstimator())),
    "slope-logdet": slope(logdet),
}
