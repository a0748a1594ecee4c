"""Second derivatives along several directions at once, in collapsed Taylor mode.

Along `x + t v + t^2 w / 2` a function f has the coefficients `f(x)`, `J v` and
`J w + d2f[v, v]`. The last is linear in w. So for directions `v_1 ... v_s` the sum of the
s second coefficients can be carried as one vector: `1 + s + 1` vectors go through the
function, instead of `1 + 2 s` with each direction by itself, or `2 + 2 s` with products
of the Hessian. Dangel, Siebert, Zeinhofer and Walther, "Collapsing Taylor Mode Automatic
Differentiation", arXiv 2505.13644, 2025.

The function is walked once, equation by equation. An equation without a rule here, such
as a loop, is differentiated as a whole, by two forward derivatives.
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

# First coefficients of all directions and, in the last row, the sum of the second ones;
# of what does not depend on x, None.
_Series = Inexact[Array, "s_and_1 ..."] | None


def second_derivative(
    jaxpr: ClosedJaxpr, x: Inexact[Array, " n"], directions: Inexact[Array, "s n"]
) -> Inexact[Array, "..."]:
    """The sum over the directions v of the second derivative of `f(x + t v)` in t, at 0,
    for the function of one vector that has this `jaxpr`."""
    series = jnp.concatenate([directions, jnp.zeros_like(x)[None]])
    (value,), (series,) = _walk(jaxpr, [x], [series])
    return jnp.zeros_like(value) if series is None else series[-1]


def _walk(
    jaxpr: ClosedJaxpr, inputs: Sequence[Array], series: Sequence[_Series]
) -> tuple[list[Array], list[_Series]]:
    """The outputs for these inputs, and their series."""
    known = {}

    def write(variables, values, series):
        known.update(zip(variables, zip(values, series, strict=True), strict=True))

    def read(atoms):
        literal = lambda x: (jnp.asarray(x.val), None)  # noqa: E731
        pairs = [literal(x) if isinstance(x, Literal) else known[x] for x in atoms]
        return [value for value, _ in pairs], [series for _, series in pairs]

    constants = jaxpr.jaxpr.constvars
    write(constants, jaxpr.consts, [None] * len(constants))
    write(jaxpr.jaxpr.invars, inputs, series)
    for equation in jaxpr.jaxpr.eqns:
        inputs, series = read(equation.invars)
        alone = _function(jaxpr.jaxpr, equation)
        write(equation.outvars, *_equation(equation, alone, inputs, series))
    return read(jaxpr.jaxpr.outvars)


def _equation(
    equation: JaxprEqn,
    fn: Callable[..., list[Array]],
    inputs: Sequence[Array],
    series: Sequence[_Series],
) -> tuple[list[Array], list[_Series]]:
    name, moving = equation.primitive.name, [s is not None for s in series]
    if name in ("jit", "pjit") and any(moving):
        return _walk(equation.params["jaxpr"], inputs, series)
    values = fn(*inputs)
    smooth = [jnp.issubdtype(x.dtype, jnp.inexact) for x in values]
    if not any(moving) or not any(smooth):
        return values, [None] * len(values)
    if name in _ENTRYWISE:
        return values, [_entrywise(lambda x: fn(x)[0], *inputs, *series)]

    def of_moving(*moved):
        moved = iter(moved)
        mixed = [next(moved) if m else x for m, x in zip(moving, inputs, strict=True)]
        return [y for y, s in zip(fn(*mixed), smooth, strict=True) if s]

    moved = [x for x, m in zip(inputs, moving, strict=True) if m]
    found = iter(_general(of_moving, moved, [s for s in series if s is not None]))
    return values, [next(found) if s else None for s in smooth]


def _function(jaxpr: Jaxpr, equation: JaxprEqn) -> Callable[..., list[Array]]:
    """One equation of the jaxpr as a function of all its inputs."""
    atoms = equation.invars
    variables = list(dict.fromkeys(x for x in atoms if not isinstance(x, Literal)))
    parts = {"constvars": [], "invars": variables, "outvars": equation.outvars}
    alone = jaxpr.replace(**parts, eqns=[equation], effects=equation.effects)
    run = jaxpr_as_fun(ClosedJaxpr(alone, []))
    return lambda *inputs: run(*(inputs[atoms.index(x)] for x in variables))


def _entrywise(fn: Callable[[Array], Array], x: Array, series: Array) -> Array:
    ones = jnp.ones_like(x)
    first, second = jax.jvp(lambda x: jax.jvp(fn, (x,), (ones,))[1], (x,), (ones,))
    bent = second * jnp.sum(series[:-1] ** 2, axis=0)
    return jnp.concatenate([first * series[:-1], (first * series[-1] + bent)[None]])


def _general(
    fn: Callable[..., list[Array]], inputs: list[Array], series: list[Array]
) -> list[_Series]:
    like, size = [s[0] for s in series], len(inputs)
    traced = jax.make_jaxpr(lambda *x: jax.jvp(fn, x[:size], x[size:])[1])(*inputs, *like)
    moving = _reached(traced, slice(size, None))
    if not any(moving):
        return [None] * len(moving)
    derivative = jaxpr_as_fun(traced)
    along = jax.vmap(lambda *v: derivative(*inputs, *v))(*series)
    if any(_reached(traced, slice(size))):

        def bend(*v):
            return jax.jvp(lambda *x: derivative(*x, *v), tuple(inputs), v)[1]

        bent = jax.vmap(bend)(*(s[:-1] for s in series))
        sums = [(a[-1] + b.sum(axis=0))[None] for a, b in zip(along, bent, strict=True)]
        along = [jnp.concatenate([a[:-1], s]) for a, s in zip(along, sums, strict=True)]
    return [a if m else None for a, m in zip(along, moving, strict=True)]


def _reached(jaxpr: ClosedJaxpr, inputs: slice) -> list[bool]:
    """Which outputs depend on these inputs."""
    reached = set(jaxpr.jaxpr.invars[inputs])

    def depends(atoms):
        return any(x in reached for x in atoms if not isinstance(x, Literal))

    for equation in jaxpr.jaxpr.eqns:
        if depends(equation.invars):
            reached.update(equation.outvars)
    return [depends([x]) for x in jaxpr.jaxpr.outvars]
