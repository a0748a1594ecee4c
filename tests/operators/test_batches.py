"""Curvature over batches: the operator of all data, in the memory of one batch."""

import contextlib
import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import traceax as tx

from ..programs.common import close, collectives


BATCHES, EXAMPLES, INPUTS, HIDDEN = 8, 4, 3, 2


def data(seed, batches=BATCHES, examples=EXAMPLES, inputs=INPUTS):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batches, examples, inputs))
    return {"x": x, "y": np.sin(x.sum(axis=-1))}


def point(inputs=INPUTS, hidden=HIDDEN):
    a, b = np.random.default_rng(5).standard_normal((2, inputs, hidden))
    return {"a": a, "b": b[0], "name": "tanh"}


def outputs(w, batch):
    return jnp.tanh(batch["x"] @ w["a"]) @ w["b"]


def loss(z, batch):
    return jnp.mean(jnp.cosh(z - batch["y"]))


def total(w, batch):
    return loss(outputs(w, batch), batch)


def losses(w, batch):
    return jnp.cosh(outputs(w, batch) - batch["y"])


def hessian(w, batches, chunk_size=1):
    return tx.hessian(total, w, batches, chunk_size=chunk_size)


def ggn(w, batches, chunk_size=1):
    return tx.ggn(outputs, loss, w, batches, chunk_size=chunk_size)


def fisher(w, batches, chunk_size=1):
    return tx.empirical_fisher(losses, w, batches, chunk_size=chunk_size)


def dense(make, w, batches):
    """The matrix of all examples at once, by dense derivatives."""
    arrays, static = eqx.partition(w, eqx.is_array)
    flat, unravel = ravel_pytree(arrays)
    whole = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batches)
    at = lambda v: eqx.combine(unravel(v), static)  # noqa: E731
    if make is hessian:
        return jax.hessian(lambda v: total(at(v), whole))(flat)
    first = outputs if make is ggn else losses
    jacobian = jax.jacobian(lambda v: first(at(v), whole))(flat)
    count = len(jacobian)
    weights = jnp.ones(count) / count
    if make is ggn:
        weights = weights * losses(w, whole)  # The second derivative of cosh.
    return jacobian.T @ (weights[:, None] * jacobian)


MAKERS = [hessian, ggn, fisher]
every_operator = pytest.mark.parametrize("make", MAKERS)


def trace_by_signs(operator):
    settings = {"k": 3, "key": jr.key(1), "throw": False}
    return tx.trace(operator, tx.HutchinsonEstimator(), **settings).value


def everything(fn):
    """Value and gradient of the first of what `fn` returns, both of them and their
    derivative in a direction; and the second."""
    arrays, static = eqx.partition((point(), data(0)), eqx.is_array)
    slope = jax.value_and_grad(lambda x: fn(*eqx.combine(x, static)), has_aux=True)

    def both(x):
        (value, matrix), gradient = slope(x)
        return (value, gradient), matrix

    direction = jax.tree.map(np.cos, arrays)
    *found, matrix = jax.jit(lambda *x: jax.jvp(both, *x, has_aux=True))(
        (arrays,), (direction,)
    )
    return found, matrix


@ft.cache
def of_all_data(make):
    def over_all(w, batches):
        matrix = dense(make, w, batches)
        params = eqx.filter(w, eqx.is_array)
        structure = jax.eval_shape(lambda: params)
        _, unravel = ravel_pytree(params)
        mv = lambda v: unravel(matrix @ ravel_pytree(v)[0])  # noqa: E731
        return trace_by_signs(lx.FunctionLinearOperator(mv, structure)), matrix

    return everything(over_all)


def ragged(whole, sizes=(5, 5, 9, 5, 8)):
    """The examples of stacked batches as a list of batches of several sizes, each with
    its number."""
    whole = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), whole)
    ends = np.cumsum(sizes)
    assert ends[-1] == len(whole["y"])
    parts = zip(ends - sizes, ends, strict=True)
    return [jax.tree.map(lambda x: x[i:j], whole) | {"number": j} for i, j in parts]  # noqa: B023


@pytest.mark.slow(but=("ggn-2-stacked", "fisher-2-ragged"))
@pytest.mark.parametrize(
    ("make", "chunk_size", "arrange"),
    [
        (hessian, 1, "stacked"),
        (hessian, 3, "stacked"),
        (ggn, 2, "stacked"),
        (fisher, 1, "stacked"),
        (hessian, 1, "ragged"),
        (ggn, 1, "ragged"),
        (fisher, 2, "ragged"),
    ],
)
def test_is_the_operator_of_all_data(make, chunk_size, arrange):
    """Matrix, trace of it, and first and second derivatives of the trace, in parameters
    and in data."""

    def over_batches(w, batches):
        batches = ragged(batches) if arrange == "ragged" else batches
        operator = make(w, batches, chunk_size)
        return trace_by_signs(operator), operator.as_matrix()

    found, matrix = everything(over_batches)
    expected, expected_matrix = of_all_data(make)
    close("matrix", matrix, expected_matrix, 1e-13)
    close("", found, expected, 1e-11)


@every_operator
def test_tags(make):
    operator = make(point(), data(0))
    assert lx.is_symmetric(operator)
    assert lx.is_positive_semidefinite(operator) == (make is not hessian)


def test_without_batches():
    w, batches = point(), data(0)
    whole = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batches)
    operator = tx.empirical_fisher(lambda w: losses(w, whole), w)
    assert lx.is_positive_semidefinite(operator)
    close("", jax.jit(lambda: operator.as_matrix())(), of_all_data(fisher)[1], 1e-13)


def test_keys_in_batches():
    """For dropout, as an example."""
    keys = jr.split(jr.key(0), 5)
    operator = tx.hessian(lambda x, key: jr.normal(key) * x**2, jnp.ones(()), keys)
    expected = 2 * np.mean([jr.normal(key) for key in keys])
    np.testing.assert_allclose(operator.mv(jnp.ones(())), expected, rtol=1e-13)


def test_low_precision_is_summed_in_float32():
    """300 batches of ones: a sum in bfloat16 ends at 256."""
    ones = jnp.ones(300, jnp.bfloat16)
    operator = tx.hessian(lambda x, b: b * x**2 / 2, jnp.ones((), jnp.bfloat16), ones)
    product = operator.mv(jnp.ones((), jnp.bfloat16))
    assert (product.dtype, product) == (jnp.bfloat16, 1)


@pytest.mark.slow(but="ggn")
@pytest.mark.parametrize("make", [hessian, ggn])
def test_memory_does_not_grow_with_the_number_of_batches(make):
    """Of a trace, and of its gradient in the parameters, beyond the data themselves."""
    w = eqx.filter(point(8, 64), eqx.is_array)
    one_batch = 64 * 64 * 8  # bytes of activations

    def temporaries(batches):
        def trace(w, batches):
            operator, estimator = make(w, batches), tx.HutchinsonEstimator()
            return tx.trace(operator, estimator, k=2, key=jr.key(0), throw=False).value

        fn = jax.jit(jax.value_and_grad(trace))
        arguments = jax.eval_shape(lambda: (w, data(0, batches, 64, 8)))
        return fn.lower(*arguments).compile().memory_analysis().temp_size_in_bytes

    few, many = temporaries(4), temporaries(64)
    assert one_batch < few, "there are no activations"
    assert many - few < one_batch, f"{few} bytes for 4 batches, {many} for 64"


def test_strict_modes():
    """Made and applied outside of our own calls, where they are on."""
    w, batches = jnp.ones(3, jnp.bfloat16), jnp.ones((2, 4, 3), jnp.bfloat16)
    settings = ("strict", jax.numpy_dtype_promotion), ("raise", jax.numpy_rank_promotion)
    with contextlib.ExitStack() as stack:
        for mode, setting in settings:
            stack.enter_context(setting(mode))
        operator = tx.hessian(
            lambda w, b: jnp.sum((b @ w) ** 2), w, batches, chunk_size=2
        )
        np.testing.assert_array_equal(operator.mv(w), np.full(3, 24, w.dtype))


def test_new_data_compile_nothing():
    w, traces = point(), []

    def f(w, batch):
        traces.append(1)
        return total(w, batch)

    def value(seed):
        operator = tx.hessian(f, w, data(seed))
        operator.mv(eqx.filter(w, eqx.is_array))
        return tx.trace(operator, tx.HutchinsonEstimator(), k=4, key=jr.key(0)).value

    first, count = value(0), len(traces)
    assert value(1) != first
    assert len(traces) == count > 0


def test_closures_and_vmap():
    """Derivatives in what `f` closes over, batched."""
    w, batches, scales = point(), data(0), np.array([1.0, 2.0])

    def trace(scale):
        operator = tx.hessian(lambda w, b: scale**3 * total(w, b), w, batches)
        return trace_by_signs(operator)

    both = jax.jit(jax.vmap(jax.value_and_grad(trace)))(scales)
    values, slopes = map(np.asarray, both)
    assert np.allclose(slopes, 3 * values / scales, rtol=1e-12, atol=0)
    assert np.isclose(values[1], 8 * values[0], rtol=1e-12, atol=0)


MESH = jax.make_mesh((2, 4), ("probes", "data"), axis_types=(AxisType.Auto,) * 2)
SPLITS = {"batches": (P("data"), 4), "examples": (P(None, "data"), 1)}


@pytest.mark.parametrize("split", SPLITS)
def test_data_on_devices(split):
    """A product is one all-reduce of the sums, which stands after the loop over batches
    if these are split, and in it if each of them is."""
    w, (spec, chunk_size) = eqx.filter(point(), eqx.is_array), SPLITS[split]
    batches = jax.device_put(data(0), NamedSharding(MESH, spec))
    product = jax.jit(lambda w, b, v: ggn(w, b, chunk_size).mv(v))
    compiled = product.lower(w, batches, w).compile()
    found = {kind for kind, _ in collectives(compiled)}
    assert found == {"all-reduce"}, collectives(compiled)
    assert compiled.as_text().count(" all-reduce(") == 1
    looping = "while/body" in next(
        line for line in compiled.as_text().splitlines() if " all-reduce(" in line
    )
    assert looping == (split == "examples")
    close("", compiled(w, batches, w), ggn(w, data(0)).mv(w), 1e-13)


@ft.partial(jax.jit, static_argnums=(2, 3))
def trace_and_slope(w, batches, chunk_size, execution):
    def trace(w):
        operator, estimator = ggn(w, batches, chunk_size), tx.HutchinsonEstimator()
        operator += 0.1 * lx.IdentityLinearOperator(operator.in_structure())
        settings = {"k": 6, "key": jr.key(0), "throw": False, "execution": execution}
        return tx.trace(operator, estimator, **settings).value

    return jax.value_and_grad(trace)(w)


@pytest.mark.slow(but="batches")
@pytest.mark.parametrize("split", SPLITS)
def test_data_and_probes_on_devices(split):
    w, (spec, chunk_size) = eqx.filter(point(), eqx.is_array), SPLITS[split]
    batches = jax.device_put(data(0), NamedSharding(MESH, spec))
    arguments = w, batches, chunk_size, tx.Sharded(MESH)
    compiled = trace_and_slope.lower(*arguments).compile()
    # Nothing is gathered but a number or two from each of the two groups of devices.
    gathered = [shape for kind, shape in collectives(compiled) if kind != "all-reduce"]
    assert set(gathered) <= {(2,), (2, 1)}, gathered
    expected = trace_and_slope(w, data(0), 1, tx.Local())
    close("", compiled(w, batches), expected, 1e-12)


@pytest.mark.parametrize(
    ("batches", "found"),
    [
        ({"x": jnp.ones((3, 2)), "y": jnp.ones(4)}, r"\(3, 2\), \(4,\)"),
        ((jnp.ones(()), jnp.ones(3)), r"\(\), \(3,\)"),
        (jnp.ones((0, 3)), r"\(0, 3\)"),
        ((), r"\[\]"),
        ("data", "str"),
        # Stacked images and labels, of which the one or the other are no batch.
        ([jnp.ones((8, 4, 3)), jnp.ones((8, 4))], r"\(8, 4, 3\)\], \[\(8, 4\)"),
        ([jnp.ones((8, 3)), {"x": jnp.ones((8, 3))}], r"\(8, 3\)"),
        ([(jnp.ones(4), jnp.ones(9)), (jnp.ones(3), jnp.ones(7))], r"\(4,\), \(9,\)"),
        ([jnp.ones((4, 3)), jnp.ones((2, 5))], r"\(4, 3\)\], \[\(2, 5\)"),
        ([jnp.ones((4, 3)), jnp.ones((0, 3))], r"\(4, 3\)\], \[\(0, 3\)"),
        ([], r"\[\]"),
        ([(jnp.ones(4), "name")], "str"),
    ],
)
def test_bad_batches(batches, found):
    with pytest.raises(ValueError, match=rf"`batches` must be.*Found.*{found}"):
        tx.hessian(total, point(), batches)


def test_bad_functions():
    w, batches = point(), data(0)
    with pytest.raises(TypeError, match=r"`fn` must return a real.*shape"):
        tx.hessian(losses, w, batches)
    with pytest.raises(TypeError, match=r"`loss` must return a real.*shape"):
        tx.ggn(outputs, lambda z, batch: z, w, batches)
    with pytest.raises(TypeError, match=r"`losses` must return.*\(examples,\)"):
        tx.empirical_fisher(total, w, batches)
    with pytest.raises(TypeError, match="`x` must hold at least one real"):
        tx.hessian(lambda x, b: jnp.sum(b), jnp.arange(3), jnp.ones(2))
