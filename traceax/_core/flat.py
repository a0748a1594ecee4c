import contextlib
import itertools
import math
from collections.abc import Callable, Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.tree_util import tree_leaves, tree_structure, tree_unflatten
from jaxtyping import Array, DTypeLike, Inexact, PyTree

from .arithmetic import standard_promotion
from .linearity import why_not_linear


@contextlib.contextmanager
def needing_adjoint() -> Iterator[None]:
    """For what transposes a product, with an error that says why, and what to do where
    JAX cannot."""
    try:
        yield
    except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
        raise NotImplementedError(
            "This call makes products with the adjoint of `operator`, and JAX cannot "
            "transpose its product. No adjoint is needed of an operator that is tagged "
            "as symmetric (`lineax.symmetric_tag`, `traceax.hermitian_tag`), if that is "
            "true; nor, for traces, diagonals, Frobenius and row norms, by "
            "`traceax.HutchinsonEstimator()`. Elsewhere give the product a transpose by "
            "`jax.custom_derivatives.linear_call`, and pass "
            "`execution=traceax.Local(block_size=1)`. JAX says: "
            f"{type(error).__name__}: {error}"
        ) from error


class _HermitianTag:
    """A tag for Hermitian operators, used like those of `lineax`: needed where one is
    complex and not semidefinite.

    !!! Example

        ```python
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        matrix = jnp.array([[0, -1j], [1j, 0]])
        operator = lx.MatrixLinearOperator(matrix, tx.hermitian_tag)
        solution = tx.trace_of_function(operator, tx.Exp(), k=2, num_steps=2)
        print(f"{solution.value:.3f}")  # 3.086
        ```
    """

    def __repr__(self):
        return "hermitian_tag"

    def __reduce__(self):
        # The name of the one object there is: so it stays that when copied or pickled.
        return "hermitian_tag"


hermitian_tag = _HermitianTag()


class FlatFunction(eqx.Module):
    """A traced function of a flat vector. Arrays that it closes over are leaves."""

    arrays: list[Array]
    code: Jaxpr = eqx.field(static=True)

    @classmethod
    def of(
        cls, fn: Callable[[Array], Array], size: int, dtype: DTypeLike
    ) -> "FlatFunction":
        closed = jax.make_jaxpr(fn)(jax.ShapeDtypeStruct((size,), dtype))
        return cls([jnp.asarray(x) for x in closed.consts], closed.jaxpr)

    @property
    def jaxpr(self) -> ClosedJaxpr:
        return ClosedJaxpr(self.code, self.arrays)

    def __call__(self, vector: Array) -> Array:
        (out,) = jaxpr_as_fun(self.jaxpr)(vector)
        return out


class FlatOperator(eqx.Module):
    """A linear operator seen as a map of flat vectors of one dtype; square, unless the
    caller says otherwise.

    The product is traced once, when the object is made (after `lineax.linearise`, so
    that what does not depend on the vector is computed once). Arrays that the operator
    closes over are leaves here, so that derivatives with respect to them are seen.

    - `size`: n, the length of the vectors that it is applied to.
    - `dtype`: of the vectors in and out: the operator's, but at least float32.
    - `precision`: the coarsest dtype that a product passes through.
    - `hermitian`: whether it is known to be.

    Vectors in have the shape `(n,)`, vectors out `(m,)`, with m = n for a square one.
    """

    fn: Callable[[Array], Array]
    size: int = eqx.field(static=True)
    dtype: jnp.dtype = eqx.field(static=True)
    precision: jnp.dtype = eqx.field(static=True)
    hermitian: bool = eqx.field(static=True, default=False)

    @property
    def eps(self) -> float:
        """Machine epsilon of the products."""
        return float(jnp.finfo(self.precision).eps)

    @property
    def rounding(self) -> float:
        """Relative size of rounding errors in an estimate: those of n-term sums in the
        working dtype, and those of single products in the operator's."""
        return 2 * self.eps + float(jnp.finfo(self.dtype).eps) * self.size**0.5

    @property
    def frozen(self) -> "FlatOperator":
        """The same operator, constant to all derivatives."""
        return freeze(self)

    @property
    def narrow(self) -> bool:
        """Whether products pass through a dtype of a smaller range than that of the
        vectors: float16."""
        return jnp.finfo(self.precision).maxexp < jnp.finfo(self.dtype).maxexp

    def mv(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " m"]:
        """A v for a flat vector v, of shape `(n,)`."""
        return self._scaled(self.fn, vector)

    def adjoint_mv(self, vector: Inexact[Array, " m"]) -> Inexact[Array, " n"]:
        """A* v for a flat vector v, of shape `(m,)`; m is n for a square operator.

        **Raises:**

        `NotImplementedError` if JAX cannot transpose the product of an operator that is
        not known to be Hermitian."""
        if self.hermitian:
            return self.mv(vector)
        like = jax.ShapeDtypeStruct((self.size,), self.dtype)

        def transposed(vector):
            with needing_adjoint():
                (product,) = jax.linear_transpose(self.fn, like)(vector)
            return product

        return self._scaled(transposed, vector.conj()).conj()

    def _scaled(self, fn: Callable[[Array], Array], vector: Array) -> Array:
        """`fn(vector)`; if the range is narrow, of a vector whose largest entry is from
        `n^(-1/4)` to 1: the product of a unit vector, with entries of `n^(-1/2)`, might
        underflow, and that of a larger one overflow."""
        if not self.narrow:
            return fn(vector)
        least = 2.0 ** -round(math.log2(vector.size) / 4)
        largest = jax.lax.stop_gradient(jnp.max(jnp.abs(vector)))
        small = (largest > 0) & (largest < least)
        size = jnp.where(small, largest / least, jnp.maximum(largest, 1))
        size = size.astype(vector.dtype)
        return size * fn(vector / size)


def freeze(tree: PyTree) -> PyTree:
    """The same PyTree, constant to all derivatives; its leaves may be anything."""
    arrays, static = eqx.partition(tree, eqx.is_inexact_array)
    return eqx.combine(jax.lax.stop_gradient(arrays), static)


def is_hermitian(operator: lx.AbstractLinearOperator) -> bool:
    """Whether the tags say so; lineax has no tag for complex Hermitian operators."""
    if lx.is_positive_semidefinite(operator) or lx.is_negative_semidefinite(operator):
        return True
    if hermitian_tag in getattr(operator, "tags", ()):
        return True
    if not is_complex(operator) and lx.is_symmetric(operator):
        return True
    if isinstance(operator, lx.TaggedLinearOperator | lx.NegLinearOperator):
        return is_hermitian(operator.operator)
    if isinstance(operator, lx.MulLinearOperator | lx.DivLinearOperator):
        return jnp.isrealobj(operator.scalar) and is_hermitian(operator.operator)
    if isinstance(operator, lx.AddLinearOperator):
        return is_hermitian(operator.operator1) and is_hermitian(operator.operator2)
    return False


def is_complex(operator: lx.AbstractLinearOperator) -> bool:
    return jnp.issubdtype(dtypes(operator)[0], jnp.complexfloating)


def check_square(operator: lx.AbstractLinearOperator, name: str = "operator") -> None:
    """Raise unless the operator maps a space of real or of complex vectors to itself."""
    structure_in, structure_out = operator.in_structure(), operator.out_structure()
    shapes_in = [leaf.shape for leaf in tree_leaves(structure_in)]
    shapes_out = [leaf.shape for leaf in tree_leaves(structure_out)]
    same_tree = tree_structure(structure_in) == tree_structure(structure_out)
    if not same_tree or shapes_in != shapes_out:
        fix = (
            "For a real rectangular operator J, `J.T @ J` is square; "
            "`traceax.schatten_norm` takes J itself."
        )
        if operator.out_size() == operator.in_size():
            fix = "The product must have the structure of the vector."
        raise ValueError(
            f"`{name}` must be square, with the same structure in and out. Found "
            f"out_size={operator.out_size()}, in_size={operator.in_size()}, with "
            f"in_structure()={structure_in} and out_structure()={structure_out}. {fix}"
        )
    check_spaces(operator, name)


def check_spaces(operator: lx.AbstractLinearOperator, name: str = "operator") -> None:
    """Raise unless the operator maps a space of real or of complex vectors to such a
    space of the same kind."""
    if 0 in (operator.in_size(), operator.out_size()):
        raise ValueError(f"`{name}` must have at least one row. Found size 0.")
    structure_in, structure_out = operator.in_structure(), operator.out_structure()
    leaves = [*tree_leaves(structure_in), *tree_leaves(structure_out)]
    dtypes = {leaf.dtype for leaf in [*leaves, *_scalars(operator)]}
    kinds = {jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes}
    if len(kinds) > 1 or not all(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes):
        raise TypeError(
            f"`{name}` must map real vectors to real ones or complex vectors to "
            f"complex ones. Found the dtypes {sorted(map(str, dtypes))} in its "
            "in_structure(), out_structure() and factors. Cast the operator's arrays and "
            "its input structure to one floating or complex dtype."
        )


def _scalars(operator: lx.AbstractLinearOperator) -> list[Array]:
    """Complex factors of real operators, of which the structures of lineax know
    nothing."""
    found = []
    multiple = isinstance(operator, lx.MulLinearOperator | lx.DivLinearOperator)
    if multiple and jnp.iscomplexobj(operator.scalar):
        found += [] if is_complex(operator.operator) else [operator.scalar]
    for name in ("operator", "operator1", "operator2"):
        if isinstance(part := getattr(operator, name, None), lx.AbstractLinearOperator):
            found += _scalars(part)
    return found


def dtypes(operator: lx.AbstractLinearOperator) -> tuple[jnp.dtype, jnp.dtype]:
    """`dtype` and `precision` of [`FlatOperator`][]."""
    structures = (operator.in_structure(), operator.out_structure())
    each = [leaf.dtype for leaf in tree_leaves(structures)]
    with standard_promotion():
        dtype = jnp.promote_types(jnp.result_type(*each), jnp.float32)
    return dtype, max(each, key=lambda x: float(jnp.finfo(x).eps))


def to_flat(tree: PyTree, dtype: DTypeLike) -> Inexact[Array, " n"]:
    """The leaves joined one after another."""
    parts = [leaf.reshape(-1).astype(dtype) for leaf in tree_leaves(tree)]
    return jnp.concatenate(parts)


def from_flat(vector: Inexact[Array, " n"], structure: PyTree) -> PyTree:
    """The inverse of `to_flat`, for a PyTree of `jax.ShapeDtypeStruct`."""
    leaves = tree_leaves(structure)
    splits = list(itertools.accumulate(leaf.size for leaf in leaves))[:-1]
    pieces = [
        piece.reshape(leaf.shape).astype(leaf.dtype)
        for piece, leaf in zip(jnp.split(vector, splits), leaves, strict=True)
    ]
    return tree_unflatten(tree_structure(structure), pieces)


def flatten(operator: lx.AbstractLinearOperator) -> FlatOperator:
    """The operator as a map of flat vectors: the leaves of PyTrees are joined one after
    another.

    It makes no product. What does not depend on the vector is computed once, by
    `lineax.linearise`, and held as long as the result.

    **Arguments:**

    - `operator`: a `lineax.AbstractLinearOperator` of any structure.

    **Returns:**

    A [`traceax.internal.FlatOperator`][] of the size and dtype of the operator, at least
    float32.

    **Raises:**

    `ValueError` for a function of which tracing shows that it is not linear.
    """
    structure = operator.in_structure()
    dtype, precision = dtypes(operator)
    linear = lx.linearise(operator)

    def mv(vector):
        return to_flat(linear.mv(from_flat(vector, structure)), dtype)

    size = operator.in_size()
    product = FlatFunction.of(mv, size, dtype)
    if _has_function(operator):
        _check_linear(product)
    return FlatOperator(product, size, dtype, precision, is_hermitian(operator))


def _has_function(operator: lx.AbstractLinearOperator) -> bool:
    """Whether a function of the user, that may not be linear, is a part of it."""
    is_function = lambda x: isinstance(x, lx.FunctionLinearOperator)  # noqa: E731
    return any(map(is_function, jax.tree.leaves(operator, is_leaf=is_function)))


def _check_linear(product: FlatFunction) -> None:
    if (reason := why_not_linear(product.code)) is not None:
        raise ValueError(
            f"`operator` must be linear. Found a function that is not: {reason}. For the "
            "derivative of a function at a point x, pass `traceax.hessian(function, x)` "
            "if it returns a scalar, or `lineax.JacobianLinearOperator(lambda x, _: "
            "function(x), x)`."
        )


def unflatten(
    fn: Callable[[Array], Array],
    structure: PyTree,
    dtype: DTypeLike,
    tags: object,
) -> lx.FunctionLinearOperator:
    """A map of flat vectors as an operator on PyTrees of `structure`."""

    def mv(tree):
        with standard_promotion():
            return from_flat(fn(to_flat(tree, dtype)), structure)

    return lx.FunctionLinearOperator(mv, structure, tags)
