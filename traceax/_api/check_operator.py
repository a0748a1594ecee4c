"""Test an operator on a few random vectors, which show violations but prove nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
from jaxtyping import PRNGKeyArray

from .._core.approximation import approximation_error
from .._core.arithmetic import standard_promotion
from .._core.checks import check_key
from .._core.flat import from_flat, to_flat
from .._core.jax_interfaces import Tracer
from .._core.sampler import require_key
from .._estimators.auto import select_trace_estimator
from .._operators.checks import checked_operator
from .._operators.convert import convert, OperatorLike
from .._operators.diagonal import diagonal_cost
from .._operators.door import flatten
from .._operators.tags import dtypes, hermitian_tag, is_complex, is_hermitian, sign_of
from .operator_report import Notes, OperatorReport
from .spectral_density import spectral_density


# Relative deviations up to this, or up to this many machine epsilons, count as errors of
# the matvecs, such as those of an inner solve. Larger ones are violations.
_TOLERANCE, _EPSILONS = 1e-3, 8
# Deviations above this many machine epsilons are reported as more than rounding.
_ROUNDING = 1000
# Lanczos steps, most of the cost of a report. A few more would hardly show more.
_STEPS = 16


def check_operator(operator: OperatorLike, *, key: PRNGKeyArray | None) -> OperatorReport:
    """Test an operator with about 25 matvecs: whether it is linear, deterministic, the
    same under `jax.vmap`, of the shape and dtype that it declares, and Hermitian and
    semidefinite as its tags say. Also say which tag and estimator fit it.

    Use it for a new operator, or when an answer looks wrong. Random vectors prove
    nothing, least of all that an operator is semidefinite.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        matrix = jnp.diag(jnp.linspace(1.0, 3.0, 300)) + 0.01
        operator = lx.FunctionLinearOperator(
            lambda v: matrix @ v, jax.ShapeDtypeStruct((300,), matrix.dtype)
        )
        report = tx.check_operator(operator, key=jax.random.key(0))
        print(report)
        print(report.estimator.name)  # XNysTraceEstimator
        ```

    **Arguments:**

    - `operator`: any matrix or operator, as for [`traceax.as_operator`][], whose arrays
        have values.
    - `key`: a JAX PRNG key, for random vectors.

    **Returns:**

    A [`traceax.OperatorReport`][]. Problems of the operator are reported and not raised.
    Memory is about 20 vectors of length n.

    **Raises:**

    - `TypeError`: `operator` is not an operator, or its arrays are traced; `key` is not a
        key.
    - `ValueError`: `key` is missing.
    """
    converted = convert(operator, name="operator")
    check_key(key)
    key = require_key(key)
    if any(isinstance(x, Tracer) for x in jax.tree.leaves((converted, key))):
        raise TypeError(
            "`operator` must have arrays with values. Found traced ones. Call "
            "`traceax.check_operator` outside of `jax.jit` and other transformations."
        )
    notes = Notes()
    with standard_promotion():
        _examine(converted, key=key, notes=notes)
    structure, name = converted.in_structure(), type(converted).__name__
    kinds = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(structure)})
    size = f"vectors of {converted.in_size()} numbers ({', '.join(kinds)})"
    return notes.report(f"{name} on {size}")


def _attempt(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, str]:
    """The result and "", or None and the message of the error that was raised."""
    try:
        return fn(*args, **kwargs), ""
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        # An error from the host is a traceback, whose last line is the message.
        line = lines[-1 if "Traceback" in lines[0] else 0]
        return None, line or type(error).__name__


def _examine(
    operator: lx.AbstractLinearOperator, key: PRNGKeyArray, notes: Notes
) -> None:
    """Run the tests, until a problem makes the others meaningless."""
    _, error = _attempt(operator.out_structure)
    if error:
        notes.problems.append(f"It cannot be traced: {error}")
        return
    _, error = _attempt(checked_operator, operator, square=False)
    if error:
        notes.problems.append(error)
        return
    dtype, precision = dtypes(operator)
    code = jax.make_jaxpr(operator.mv)(operator.in_structure()).jaxpr
    notes.eps = max(float(jnp.finfo(precision).eps), approximation_error(code))
    notes.allowed = max(_TOLERANCE, _EPSILONS * notes.eps)
    vectors = _draw(key, operator.in_size(), dtype)
    products, error = _attempt(_compute_products, operator, vectors, notes)
    if error:
        notes.problems.append(f"A product raises an error: {error}")
    if products is None or not _test_deterministic(products, notes):
        return
    _test_vmap(operator, vectors, products, notes)
    _, refusal = _attempt(eqx.filter_eval_shape, _flat_product, operator)
    deviation = _test_linear(products, refusal, notes)
    if not notes.fields["linear"]:
        return
    if refusal:
        notes.problems.append(f"It looks linear, but is refused: {refusal}")
        return
    _, error = _attempt(checked_operator, operator)
    if error:
        notes.findings.append(f"Only `traceax.schatten_norm` takes it: {error}")
        return
    num_problems = len(notes.problems)
    asymmetry = _test_hermitian(operator, vectors, products, notes)
    if notes.fields["hermitian"]:
        # The rounding errors of sums of n terms grow like the root of n.
        rounding = (4 + operator.in_size() ** 0.5) * notes.eps
        noise = max(rounding, deviation, asymmetry)
        _test_semidefinite(operator, key=key, noise=noise, notes=notes)
    if len(notes.problems) == num_problems:
        _recommend(operator, notes)


@eqx.filter_jit
def _product(operator, vector) -> Any:
    return operator.mv(from_flat(vector, operator.in_structure()))


@eqx.filter_jit
def _batch_of_products(operator, vectors) -> Any:
    vectors = jnp.stack(vectors)
    return jax.vmap(lambda x: to_flat(_product(operator, x), x.dtype))(vectors)


def _flat_product(operator, adjoint=False) -> Any:
    flat = flatten(operator)
    zero = jnp.zeros(flat.size, flat.dtype)
    return flat.adjoint_mv(zero) if adjoint else flat.mv(zero)


@eqx.filter_jit
def _draw(key: PRNGKeyArray, n: int, dtype: Any) -> list[Any]:
    """Vectors v, w, u, v + w, -v / 4, 0 and v again. Their entries, from -2 to 2, are
    exact in any dtype, so that deviations are those of the operator alone."""

    def sixteenths(key):
        signs = jr.rademacher(jr.fold_in(key, 0), (3, n), dtype)
        return signs * jr.randint(key, (3, n), 1, 16) / 16

    first = sixteenths(key)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        first = first + 1j * sixteenths(jr.fold_in(key, 1))
    v, w, u = first
    return [v, w, u, v + w, -v / 4, 0 * v, v]


def _compute_products(
    operator: lx.AbstractLinearOperator, vectors: list[Any], notes: Notes
) -> np.ndarray | None:
    """The products with all vectors, one by one, or None if they are not finite or not
    of the declared structure."""

    def summary(structure):
        leaves, tree = jax.tree.flatten(structure)
        return tree, [(leaf.shape, leaf.dtype) for leaf in leaves]

    declared, products = operator.out_structure(), []
    for vector in vectors:
        product = _product(operator, vector)
        notes.fields["num_matvecs"] = len(products) + 1
        if summary(product) != summary(declared):
            notes.fields["as_declared"] = False
            actual = eqx.filter_eval_shape(_product, operator, vector)
            notes.problems.append(
                f"Products have the structure {actual}, and `out_structure()` says "
                f"{declared}."
            )
            return None
        products.append(_on_host(to_flat(product, vector.dtype)))
    notes.fields["as_declared"] = True
    # Without the product with 0, where `v / norm(v)` is NaN: that map is not linear.
    passed = notes.test(
        "finite",
        bool(np.isfinite(np.delete(products, 5, axis=0)).all()),
        "Products are finite, and of the shape and dtype that the operator says.",
        "Products with vectors of entries of size one are not finite: look for NaN and "
        "inf in its arrays, for a division by zero, and for overflow.",
    )
    return np.stack(products) if passed else None


def _test_deterministic(products: np.ndarray, notes: Notes) -> bool:
    change = _norm(products[6] - products[0]) / _size(products)
    return notes.test(
        "deterministic",
        change <= notes.allowed,
        f"The same vector gives the same product again{_up_to(change)}.",
        "The same vector gives another product the next time: they differ by "
        f"{change:.0e} of their size. Fix the random key or the choice of data in it.",
    )


def _test_vmap(
    operator: lx.AbstractLinearOperator,
    vectors: list[Any],
    products: np.ndarray,
    notes: Notes,
) -> None:
    batch, error = _attempt(lambda: _on_host(_batch_of_products(operator, vectors[:3])))
    notes.fields["num_matvecs"] += 3
    change = np.inf
    if batch is not None:
        change = _norm(batch - products[:3]) / 3**0.5 / _size(products)
        error = f"they differ by {change:.0e} of their size"
    notes.test(
        "vectorised",
        change <= notes.allowed,
        f"Products are the same under `jax.vmap`{_up_to(change)}.",
        f"Products are not the same under `jax.vmap`, in which most calls make them: "
        f"{error}. For a callback pass `vmap_method='sequential'`, or wrap the function "
        "in `jax.custom_batching.sequential_vmap`.",
    )


def _test_linear(products: np.ndarray, refusal: str, notes: Notes) -> float:
    """The relative deviation from a linear map."""
    of_v, of_w, _, of_sum, of_quarter, of_zero, _ = products
    size = _size(products)
    constant = _norm(of_zero) / size
    sums = _norm(of_sum - of_v - of_w) / size
    multiples = _norm(4 * of_quarter + of_v) / size
    deviation = max(constant, sums, multiples)
    finding = f"It is linear{_up_to(deviation)}"
    if deviation > _ROUNDING * notes.eps:
        finding += ", which is more than rounding; no error bar counts that"
    problem = f"A (v + w) or A (-v / 4) is off by {deviation:.0e} of its size"
    if not constant <= notes.allowed:
        problem = "the product with zero is not zero"
    hint = refusal or (
        "For the derivative of a function pass `traceax.hessian(function, x)` or a "
        "`lineax.JacobianLinearOperator`."
    )
    problem = f"It is not linear: {problem}. {hint}"
    notes.test("linear", deviation <= notes.allowed, f"{finding}.", problem)
    return deviation


def _test_hermitian(
    operator: lx.AbstractLinearOperator,
    vectors: list[Any],
    products: np.ndarray,
    notes: Notes,
) -> float:
    """An estimate of `||A - A*||_F / ||A||_F`."""
    # v* A w and the conjugate of w* A v differ by v* (A - A*) w. For entries of size one
    # this is about ||A - A*||_F, and `size` is about ||A||_F.
    inputs, products = np.stack([_on_host(x) for x in vectors[:3]]), products[:3]
    forms = inputs.conj() @ products.T
    size = _norm(inputs) * _norm(products) / 3 / operator.in_size() ** 0.5 or 1.0
    asymmetry = float(np.max(np.abs(forms - forms.conj().T))) / size
    hermitian, tagged = asymmetry <= notes.allowed, is_hermitian(operator)
    kind, tag = "symmetric", "lineax.symmetric_tag"
    if is_complex(operator):
        kind, tag = "Hermitian", "traceax.hermitian_tag"
    notes.fields["hermitian"] = hermitian
    if hermitian:
        hint = "as its tag says" if tagged else f"and has no tag: `{tag}` fits"
        notes.findings.append(f"It is {kind}{_up_to(asymmetry)}, {hint}.")
    elif tagged:
        notes.problems.append(
            f"It is tagged {kind} or semidefinite, and is not {kind}: it differs from "
            f"its adjoint by {asymmetry:.0e} of its size. Leave the tag out."
        )
    else:
        notes.findings.append(f"It is not {kind}, and has no tag that says so.")
    # For A = diag(a) both are a v w, entry by entry.
    av_w, aw_v = products[0] * inputs[1], products[1] * inputs[0]
    differ = _norm(aw_v - av_w) > notes.allowed * _norm(av_w)
    if lx.is_diagonal(operator) and differ:
        notes.problems.append("It is tagged diagonal, and is not. Leave the tag out.")
    return asymmetry


def _test_semidefinite(
    operator: lx.AbstractLinearOperator, key: PRNGKeyArray, noise: float, notes: Notes
) -> None:
    tagged = lx.TaggedLinearOperator(operator, hermitian_tag)
    steps = min(_STEPS, operator.in_size())
    density = spectral_density(tagged, k=1, num_steps=steps, key=key, throw=False)
    notes.fields["num_matvecs"] += steps
    nodes = _on_host(density.nodes)
    smallest, largest = float(np.min(nodes)), float(np.max(nodes))
    floor = noise * max(-smallest, largest)
    ritz_range = f"Ritz values from {smallest:.3g} to {largest:.3g}"
    notes.findings.append(f"{ritz_range} in {steps} Lanczos steps.")
    tag = hermitian_tag if is_complex(operator) else lx.symmetric_tag
    positive, negative = smallest >= -floor, largest <= floor
    tagged_sign = sign_of(operator)
    for sign, fits, says, stronger in (
        ("negative", negative, tagged_sign < 0, lx.negative_semidefinite_tag),
        ("positive", positive, tagged_sign > 0, lx.positive_semidefinite_tag),
    ):
        if says and not fits:
            notes.problems.append(
                f"It is tagged {sign} semidefinite, and is not: {ritz_range}. Leave the "
                "tag out."
            )
        if fits:
            tag = stronger
        if fits and tagged_sign == 0:
            notes.findings.append(
                "All have one sign. If you know that all eigenvalues do, "
                f"`lineax.{sign}_semidefinite_tag` fits."
            )
    if (positive or negative) and min(abs(smallest), abs(largest)) <= floor:
        notes.findings.append(
            "It cannot be told from a singular one, whose logarithm and inverse are "
            "infinite: for these, add a multiple of the identity."
        )
    notes.fields |= {
        "ritz_values": (smallest, largest),
        "semidefinite": positive or negative,
        "tag": tag,
    }


def _recommend(operator: lx.AbstractLinearOperator, notes: Notes) -> None:
    adjoint, tag = is_hermitian(operator), notes.fields.get("tag")
    if not adjoint:
        _, error = _attempt(eqx.filter_eval_shape, _flat_product, operator, adjoint=True)
        adjoint = not error
    if not adjoint:
        notes.findings.append(
            "JAX cannot make products with its adjoint. Without a tag, log-determinants "
            "and the default estimator of diagonals need them. "
            "`traceax.HutchinsonEstimator()` does not."
        )
    tagged = operator if tag is None else lx.TaggedLinearOperator(operator, tag)
    estimator, untagged = (select_trace_estimator(x, 2) for x in (tagged, operator))
    notes.fields |= {"adjoint": adjoint, "estimator": estimator}
    text = f"`traceax.trace` takes `traceax.{estimator.name}`"
    if estimator.name != untagged.name:
        text += f" with that tag, and `traceax.{untagged.name}` without it"
    cost = diagonal_cost(operator)
    exact = "for any k, by the known diagonal" if cost == 0 else f"from k={cost} on"
    notes.findings.append(f"{text}. It is exact {exact}.")


def _on_host(x: Any) -> np.ndarray:
    wide = np.complex128 if jnp.iscomplexobj(x) else np.float64
    return np.asarray(jax.device_get(x)).astype(wide)


def _norm(x: np.ndarray) -> float:
    """The Frobenius norm, without overflow or underflow."""
    largest = float(np.max(np.abs(x))) or 1.0
    return largest * float(np.sqrt(np.sum(np.abs(x / largest) ** 2)))


def _size(products: np.ndarray) -> float:
    """The norm of a product, by which deviations are divided."""
    return _norm(products[:3]) / 3**0.5 or 1.0


def _up_to(deviation: float) -> str:
    return f", up to {deviation:.0e}" if deviation > 0 else ""
