"""Second derivatives along several directions at once, in collapsed Taylor mode.

Along `x + t v + t^2 w / 2` a function f has the coefficients

    f(x),    J v,    J w + d2f[v, v].

The last one is linear in w. So for directions `v_1 ... v_s` the sum of the s second
coefficients can be carried as one vector: `1 + s + 1` vectors go through the function,
instead of `1 + 2 s` with each direction by itself, or `2 + 2 s` with products of the
Hessian.

In the code: the rows of a `series` are the s first coefficients and, last, the sum of the
second ones; f is a `jaxpr`, whose equations are propagated through one by one. An
equation without a rule here, such as a loop, is differentiated as a whole, by two forward
derivatives.

Reference: Dangel, Siebert, Zeinhofer and Walther, Collapsing Taylor Mode Automatic
Differentiation, arXiv 2505.13644, 2025.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from .._core.jax_interfaces import ClosedJaxpr, Jaxpr, jaxpr_as_fun, JaxprEqn, Literal


# Functions of one number, applied to each entry: their second derivative is a vector. A
# function that is missing here is only slower.
# fmt: off
_ENTRYWISE = frozenset({
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "cbrt", "cos", "cosh", "digamma",
    "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "integer_pow", "lgamma", "log",
    "log1p", "logistic", "rsqrt", "sin", "sinh", "sqrt", "square", "tan", "tanh",
})
# fmt: on

# The series of a value that depends on x; None for one that does not.
_Series = Inexact[Array, "s_and_1 ..."] | None


def second_derivative(
    jaxpr: ClosedJaxpr, x: Inexact[Array, " n"], directions: Inexact[Array, "s n"]
) -> Inexact[Array, "..."]:
    """The sum over the directions v of the second derivative of `f(x + t v)` in t, at 0,
    for the function of one vector that has this `jaxpr`."""
    series = jnp.concatenate([directions, jnp.zeros_like(x)[None]])
    (value,), (series,) = _propagate(jaxpr, [x], [series])
    return jnp.zeros_like(value) if series is None else series[-1]


def _propagate(
    jaxpr: ClosedJaxpr, inputs: Sequence[Array], series: Sequence[_Series]
) -> tuple[list[Array], list[_Series]]:
    """The outputs of the jaxpr for these inputs, and their series."""
    environment = {}

    def write(variables, values, series):
        environment.update(zip(variables, zip(values, series, strict=True), strict=True))

    def read(atoms):
        pairs = [
            (jnp.asarray(x.val), None) if isinstance(x, Literal) else environment[x]
            for x in atoms
        ]
        return [value for value, _ in pairs], [series for _, series in pairs]

    constants = jaxpr.jaxpr.constvars
    write(constants, jaxpr.consts, [None] * len(constants))
    write(jaxpr.jaxpr.invars, inputs, series)
    for equation in jaxpr.jaxpr.eqns:
        inputs, series = read(equation.invars)
        fn = _function_of(jaxpr.jaxpr, equation)
        values, series = _propagate_equation(equation, fn, inputs, series)
        write(equation.outvars, values, series)
    return read(jaxpr.jaxpr.outvars)


def _propagate_equation(
    equation: JaxprEqn,
    fn: Callable[..., list[Array]],
    inputs: Sequence[Array],
    series: Sequence[_Series],
) -> tuple[list[Array], list[_Series]]:
    """The outputs of one equation, which computes `fn`, and their series."""
    name, is_active = equation.primitive.name, [s is not None for s in series]
    # The equations of an inner `jit` have rules. As a whole it would have none.
    if name in ("jit", "pjit") and any(is_active):
        return _propagate(equation.params["jaxpr"], inputs, series)
    values = fn(*inputs)
    is_smooth = [jnp.issubdtype(x.dtype, jnp.inexact) for x in values]
    if not any(is_active) or not any(is_smooth):
        return values, [None] * len(values)
    coefficients = [s for s in series if s is not None]
    if name in _ENTRYWISE:
        entry_function = lambda x: fn(x)[0]  # noqa: E731
        return values, [_entrywise_series(entry_function, inputs[0], coefficients[0])]

    # JAX differentiates in inexact inputs and outputs only. All others are constants.
    def active_function(*active_inputs):
        remaining = iter(active_inputs)
        mixed = [
            next(remaining) if active else x
            for active, x in zip(is_active, inputs, strict=True)
        ]
        return [y for y, smooth in zip(fn(*mixed), is_smooth, strict=True) if smooth]

    active_inputs = [x for active, x in zip(is_active, inputs, strict=True) if active]
    outputs = iter(_general_series(active_function, active_inputs, coefficients))
    return values, [next(outputs) if smooth else None for smooth in is_smooth]


def _function_of(jaxpr: Jaxpr, equation: JaxprEqn) -> Callable[..., list[Array]]:
    """One equation of the jaxpr as a function of all its inputs."""
    atoms = equation.invars
    # A variable may occur twice, as in `x * x`, and must be an argument once.
    variables = list(dict.fromkeys(x for x in atoms if not isinstance(x, Literal)))
    single = jaxpr.replace(
        constvars=[],
        invars=variables,
        outvars=equation.outvars,
        eqns=[equation],
        effects=equation.effects,
    )
    run = jaxpr_as_fun(ClosedJaxpr(single, []))
    return lambda *inputs: run(*(inputs[atoms.index(x)] for x in variables))


def _entrywise_series(fn: Callable[[Array], Array], x: Array, series: Array) -> Array:
    """For `y = f(x)` in each entry: `f' v_i`, and `f' w + f'' sum_i v_i^2`."""
    ones = jnp.ones_like(x)
    first, second = jax.jvp(lambda x: jax.jvp(fn, (x,), (ones,))[1], (x,), (ones,))
    curvature = second * jnp.sum(series[:-1] ** 2, axis=0)
    return (first * series).at[-1].add(curvature)


def _general_series(
    fn: Callable[..., list[Array]], inputs: list[Array], series: list[Array]
) -> list[_Series]:
    """For any function: `J v_i`, and `J w + sum_i d2f[v_i, v_i]`."""
    tangents, size = [s[0] for s in series], len(inputs)
    derivative_jaxpr = jax.make_jaxpr(lambda *x: jax.jvp(fn, x[:size], x[size:])[1])(
        *inputs, *tangents
    )
    is_active = _depends_on(derivative_jaxpr, slice(size, None))
    if not any(is_active):
        return [None] * len(is_active)
    derivative = jaxpr_as_fun(derivative_jaxpr)
    outputs = jax.vmap(lambda *v: derivative(*inputs, *v))(*series)
    # A linear function has a derivative that does not depend on x. The second derivative
    # is then zero, and need not be computed.
    if any(_depends_on(derivative_jaxpr, slice(size))):

        def second_along(*v):
            return jax.jvp(lambda *x: derivative(*x, *v), tuple(inputs), v)[1]

        curvatures = jax.vmap(second_along)(*(s[:-1] for s in series))
        outputs = [
            y.at[-1].add(curvature.sum(axis=0))
            for y, curvature in zip(outputs, curvatures, strict=True)
        ]
    return [y if active else None for y, active in zip(outputs, is_active, strict=True)]


def _depends_on(jaxpr: ClosedJaxpr, inputs: slice) -> list[bool]:
    """Which outputs depend on these inputs."""
    dependent = set(jaxpr.jaxpr.invars[inputs])

    def is_dependent(atoms):
        return any(x in dependent for x in atoms if not isinstance(x, Literal))

    for equation in jaxpr.jaxpr.eqns:
        if is_dependent(equation.invars):
            dependent.update(equation.outvars)
    return [is_dependent([x]) for x in jaxpr.jaxpr.outvars]
