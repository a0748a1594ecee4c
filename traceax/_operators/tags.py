"""Properties of a lineax operator that its tags and its structure tell."""

import jax.numpy as jnp
import lineax as lx
from jax.tree_util import tree_leaves

from .._core.arithmetic import standard_promotion


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


def is_hermitian(operator: lx.AbstractLinearOperator) -> bool:
    """Whether the tags say that the operator is Hermitian."""
    # lineax has no tag for complex Hermitian operators, and so does not carry ours over
    # to sums and real multiples.
    if sign_of(operator) != 0:
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


def sign_of(operator: lx.AbstractLinearOperator) -> int:
    """1 for an operator tagged positive semidefinite, -1 for one tagged negative
    semidefinite, and 0 for any other."""
    if lx.is_positive_semidefinite(operator):
        return 1
    return -1 if lx.is_negative_semidefinite(operator) else 0


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
