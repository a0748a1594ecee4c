"""Properties of a lineax operator that its tags and its structure tell."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.tree_util import tree_leaves

from .._core.arithmetic import standard_promotion
from .._core.jax_interfaces import Tracer
from .structured import AbstractStructuredOperator


class _HermitianTag:
    """A tag for Hermitian operators, used like the tags of `lineax`. It is needed for
    complex operators that are Hermitian and not semidefinite.

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
        # A string is the name of a global. Copies and unpickled tags are this object
        # again, which membership in `tags` is tested by.
        return "hermitian_tag"


hermitian_tag = _HermitianTag()


@lx.transpose_tags_rules.append
def _keep_hermitian_tag(tags: frozenset[object]) -> object:
    """The transpose of a Hermitian operator is its complex conjugate, Hermitian too."""
    return hermitian_tag if hermitian_tag in tags else None


class Symmetry(NamedTuple):
    """Symmetry and definiteness of an operator, as its tags and its structure tell.

    - `hermitian`: whether the operator is Hermitian.
    - `sign`: 1 for a positive semidefinite operator, -1 for a negative semidefinite one,
        and 0 if neither is known.
    - `assumed`: the traced arrays that are assumed to have no negative entry. The sign is
        right only if that holds, while `hermitian` never depends on it.
    """

    hermitian: bool
    sign: int
    assumed: tuple[Any, ...] = ()


def symmetry_of(operator: lx.AbstractLinearOperator) -> Symmetry:
    """What tags and structure tell of an operator. lineax looks at no array. Here the
    signs of scalars, and of the diagonals that are added to a tagged operator, are read
    where they have values, and assumed where they are traced."""
    sign, assumed = _definiteness(operator)
    return Symmetry(is_hermitian(operator), sign, assumed)


def sign_of(operator: lx.AbstractLinearOperator) -> int:
    """1 for a positive semidefinite operator, -1 for a negative semidefinite one, and 0
    if neither is known."""
    return _definiteness(operator)[0]


def is_hermitian(operator: lx.AbstractLinearOperator) -> bool:
    """Whether tags and structure say that the operator is Hermitian."""
    return all(
        (_is_tagged_hermitian(part) or isinstance(part, lx.DiagonalLinearOperator))
        and all(map(_is_real, _factors(scalars, part)))
        for scalars, part in _terms(operator, _is_tagged_hermitian)
    )


def _definiteness(operator: lx.AbstractLinearOperator) -> tuple[int, tuple[Any, ...]]:
    """The sign of an operator, and the traced arrays that it is assumed for."""
    if sign := _tagged_sign(operator):
        return sign, ()
    terms = list(_terms(operator, _tagged_sign))
    parts = [part for _, part in terms]
    diagonal = [isinstance(part, lx.DiagonalLinearOperator) for part in parts]
    signs = [1 if x else _tagged_sign(y) for x, y in zip(diagonal, parts, strict=True)]
    # Before any array is read: no sign follows from one indefinite term, and none is
    # needed without a tag, since diagonals and multiples of the identity have exact
    # answers.
    structured = lx.DiagonalLinearOperator | lx.IdentityLinearOperator
    if not all(signs) or all(isinstance(part, structured) for part in parts):
        return 0, ()
    possible, assumed = {1, -1}, []
    for sign, (scalars, part) in zip(signs, terms, strict=True):
        of_term = {sign}
        for factor in _factors(scalars, part):
            of_factor = _signs(factor)
            if of_factor is None:
                of_factor = {1}
                assumed.append(factor)
            of_term = {x * y for x in of_term for y in of_factor}
        possible &= of_term
    return (max(possible), tuple(assumed)) if possible else (0, ())


def _terms(
    operator: lx.AbstractLinearOperator, known: Callable[[Any], Any]
) -> Iterator[tuple[tuple[Any, ...], lx.AbstractLinearOperator]]:
    """The terms of a sum: the scalars that multiply an operator (or divide it, which
    makes the same sign), and that operator. Those that are `known` are not divided."""
    if known(operator):
        yield (), operator
        return
    match operator:
        case lx.AddLinearOperator():
            yield from _terms(operator.operator1, known)
            yield from _terms(operator.operator2, known)
            return
        case lx.TaggedLinearOperator():
            scalars = ()
        case lx.NegLinearOperator():
            scalars = (-1.0,)
        case lx.MulLinearOperator() | lx.DivLinearOperator():
            scalars = (operator.scalar,)
        case _:
            yield (), operator
            return
    for others, part in _terms(operator.operator, known):
        yield (*scalars, *others), part


def _tagged_sign(operator: lx.AbstractLinearOperator) -> int:
    """The sign that lineax knows: of tags, the identity, and sums of such."""
    if lx.is_positive_semidefinite(operator):
        return 1
    return -1 if lx.is_negative_semidefinite(operator) else 0


def _is_tagged_hermitian(operator: lx.AbstractLinearOperator) -> bool:
    if _tagged_sign(operator) or hermitian_tag in getattr(operator, "tags", ()):
        return True
    if isinstance(operator, AbstractStructuredOperator) and operator.parts:
        return all(map(_is_tagged_hermitian, operator.parts))
    return lx.is_symmetric(operator) and not is_complex(operator)


def _factors(
    scalars: tuple[Any, ...], part: lx.AbstractLinearOperator
) -> tuple[Any, ...]:
    """The arrays whose signs a term has beside its tags."""
    if isinstance(part, lx.DiagonalLinearOperator):
        return (*scalars, *tree_leaves(part.diagonal))
    return scalars


def _signs(x: Any) -> set[int] | None:
    """The signs that all entries of a scalar or an array have: both for zeros, none for
    mixed or complex entries, and None for a traced array, which has no values. NaN counts
    as zero: it is found elsewhere."""
    if not _is_real(x):
        return set()
    x = _values(x)
    if x is None:
        return None
    return {sign for sign in (1, -1) if not np.any(sign * x.real < 0)}


def _is_real(x: Any) -> bool:
    """Whether all entries are real. Traced entries of a complex dtype may not be."""
    if not jnp.iscomplexobj(x):
        return True
    x = _values(x)
    return x is not None and not np.any(x.imag != 0)


def _values(x: Any) -> np.ndarray | None:
    """The values of an array on the host, or None if it is traced or on other hosts."""
    if isinstance(x, Tracer) or not getattr(x, "is_fully_addressable", True):
        return None
    return np.asarray(jax.device_get(x))


def is_complex(operator: lx.AbstractLinearOperator) -> bool:
    """Whether the operator maps complex vectors."""
    return jnp.issubdtype(dtypes(operator)[0], jnp.complexfloating)


def dtypes(operator: lx.AbstractLinearOperator) -> tuple[jnp.dtype, jnp.dtype]:
    """The `dtype` and the `precision` of an operator, as in [`FlatOperator`][]: the dtype
    that estimates are made in, and the coarsest dtype of its leaves."""
    structures = (operator.in_structure(), operator.out_structure())
    leaf_dtypes = [leaf.dtype for leaf in tree_leaves(structures)]
    with standard_promotion():
        dtype = jnp.promote_types(jnp.result_type(*leaf_dtypes), jnp.float32)
    return dtype, max(leaf_dtypes, key=lambda x: float(jnp.finfo(x).eps))
