"""Conversion of what users hold to operators of lineax: matrices of NumPy, JAX and SciPy,
functions, and operators whose products are made on the host."""

import contextlib
import functools as ft
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import PyTree

from .._core.checks import plain_integer
from .._core.code import Itself
from .host import HostOperator, HostProduct
from .storage import refuse_masked
from .stored import is_sparse, of_dense, of_sparse


@runtime_checkable
class Matrix(Protocol):
    """What arrays and sparse matrices have in common, for type checkers."""

    @property
    def dtype(self) -> Any: ...

    def __matmul__(self, other: Any, /) -> Any: ...


# What every call takes as its operator.
OperatorLike: TypeAlias = lx.AbstractLinearOperator | Matrix | HostOperator

# The errors that JAX raises where a function needs the values of a traced array.
_UNTRACEABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
)


@contextlib.contextmanager
def explain_untraceable(name: str) -> Iterator[None]:
    """A context for code that traces the product of the argument `name`. Where JAX cannot
    trace it, the error says how to pass it."""
    try:
        yield
    except _UNTRACEABLE as error:
        raise TypeError(
            f"The product of `{name}` must be one that JAX can trace. Found a function "
            "that needs the values of traced arrays. Use `jnp` in the place of `numpy` "
            "and `math`. To have it called on the host, pass `scipy.sparse.linalg."
            "LinearOperator((n, n), matvec=function, dtype=float)`. See the guide "
            '"Products made on the host".'
        ) from error


def as_operator(x: Any, like: Any = None, tags: Any = ()) -> lx.AbstractLinearOperator:
    """Convert a matrix or a function to an operator of lineax.

    Every call converts the matrix that it is given. Convert it yourself to add tags, or
    once for several calls; a function has to be converted.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import numpy as np
        import scipy.sparse as sp
        import traceax as tx

        key, tag = jax.random.key(0), lx.positive_semidefinite_tag
        path = sp.diags_array([-1.0, 3.0, -1.0], offsets=[-1, 0, 1], shape=(400, 400))
        operator = tx.as_operator(path.astype(np.float32), tags=tag)
        print(tx.logdet(operator, k=10, key=key).value)

        blur = tx.as_operator(lambda x: (x + jnp.roll(x, 1, axis=0)) / 2, like=(20, 20))
        print(tx.trace(blur, k=20, key=key).value)
        ```

    **Arguments:**

    - `x`:
        - an array of NumPy or JAX with two axes, real or complex. Integers and booleans
            become floating;
        - a sparse matrix or array of SciPy, which is copied to the device; a BCOO or BCSR
            of `jax.experimental.sparse`. A matvec takes as many operations as there are
            stored entries, and so does one with the adjoint;
        - a linear function that JAX can trace, with `like`;
        - a `scipy.sparse.linalg.LinearOperator`, or an object with its interface, such as
            an operator of PyLops. Products are made
            [on the host](../how_to/host_products.md), a block of vectors in one call
            (`matmat`), and those with the adjoint by `rmatmat`, where there is one. A
            function that JAX cannot trace, such as one of NumPy, is passed in this form;
        - an operator of lineax, to which `tags` are added.
    - `like`: for a function, an example of the vectors that it is applied to: an array, a
        `jax.ShapeDtypeStruct`, or a PyTree of these. Or a shape, for arrays of JAX's
        default floating dtype.
    - `tags`: a tag, or several, such as `lineax.positive_semidefinite_tag`.

    **Returns:**

    A `lineax.AbstractLinearOperator`, in the dtype of `x`; in float32 or complex64, with
    a warning the first time, if that is float64 or complex128 and JAX's 64-bit mode is
    off. It has derivatives in arrays of JAX, in the data of BCOO and BCSR, and in what a
    function closes over.

    The entries of a square matrix are looked at, unless they are traced or on several
    devices. A diagonal matrix becomes a `lineax.DiagonalLinearOperator`. One that is
    symmetric or Hermitian to the last bit gets a tag. For dense ones this takes the time
    of about two matvecs, and less if they are not Hermitian; for sparse ones that of some
    twenty. Whether a matrix is semidefinite is never guessed: say so by `tags`. Inside of
    `jax.jit`, where no entry is seen, say by `tags` that it is symmetric as well.

    **Raises:**

    - `TypeError`: `x` is none of these; JAX cannot trace a function; `like` is missing,
        has leaves that are no arrays, or is given for something that is no function;
        `tags` are strings; a masked array, or a dtype that is no number.
    """
    return convert(x, name="x", like=like, tags=tags)


def sparse(matrix: Any, tags: Any = ()) -> lx.AbstractLinearOperator:
    """The operator of a sparse matrix, of any shape.

    !!! Example

        ```python
        import jax.numpy as jnp
        import lineax as lx
        import scipy.sparse as sp
        import traceax as tx

        path = sp.diags_array([-1.0, 3.0, -1.0], offsets=[-1, 0, 1], shape=(400, 400))
        operator = tx.sparse(path.astype("float32"), lx.positive_semidefinite_tag)
        solver = lx.CG(rtol=1e-5, atol=1e-5)
        x = lx.linear_solve(operator, jnp.ones(400), solver).value
        print(f"{x[200]:.3f}")  # 1.000
        ```

    **Arguments:**

    - `matrix`: a sparse matrix or array of SciPy, which is copied to the device, or a
        BCOO or BCSR of `jax.experimental.sparse`, without batch or dense axes.
    - `tags`: a tag, or several, such as `lineax.positive_semidefinite_tag`.

    **Returns:**

    That of [`traceax.as_operator`][], which takes other matrices too: a symmetric or
    Hermitian matrix gets its tag, and a diagonal one becomes a
    `lineax.DiagonalLinearOperator`. A matvec takes as many operations as there are stored
    entries, and so does one with the transpose. Trace, diagonal and Frobenius norm are
    exact, without a matvec.

    **Raises:**

    `TypeError` if `matrix` is none of these or does not hold numbers.
    """
    if not is_sparse(matrix):
        raise TypeError(
            "`matrix` must be a sparse matrix of SciPy, or a BCOO or BCSR without batch "
            f"and dense axes. Found {_describe(matrix)}. For other matrices, see "
            "`traceax.as_operator`."
        )
    return convert(matrix, name="matrix", tags=tags)


def convert(
    x: Any, *, name: str, like: Any = None, tags: Any = (), second: Any = None
) -> lx.AbstractLinearOperator:
    """`as_operator` for the argument `name` of a call. `second` is the argument that
    follows it: if `x` is no operator and that is one, the error says so."""
    tags = as_frozenset(tags)
    if like is not None and not _is_function(x):
        raise TypeError(
            "`like` is for functions, which do not say what their vectors are. Found "
            f"`{name}` of type {type_name(x)}. Leave `like` out."
        )
    if isinstance(x, lx.AbstractLinearOperator):
        return lx.TaggedLinearOperator(x, tags) if tags else x
    if isinstance(x, np.ndarray | jax.Array) and x.ndim == 2:
        refuse_masked(name, x)
        return of_dense(x, working_dtype(x.dtype, name), tags)
    if hasattr(x, "matvec") and hasattr(x, "shape"):
        structure = jax.ShapeDtypeStruct(x.shape[1:], working_dtype(x.dtype, name))
        product = HostProduct(Itself(x))
        return lx.FunctionLinearOperator(product, structure, tags, closure_convert=False)
    if is_sparse(x):
        return of_sparse(x, working_dtype(x.dtype, name), tags)
    if _is_function(x) and like is not None:
        function: Any = x
        return _of_function(function, like, tags, name)
    fix = _how_to_convert(x)
    if isinstance(second, lx.AbstractLinearOperator) or getattr(second, "ndim", 0) == 2:
        fix = "The operator comes first: exchange it and the argument before it."
    raise TypeError(
        f"`{name}` must be a matrix or a linear operator. Found {_describe(x)}. {fix}"
    )


def _is_function(x: Any) -> bool:
    # Matrices and operators may be callable, too.
    return callable(x) and not hasattr(x, "shape")


def _of_function(
    fn: Callable[..., Any], like: Any, tags: frozenset[object], name: str
) -> lx.FunctionLinearOperator:
    with explain_untraceable(name):
        operator = lx.FunctionLinearOperator(fn, _structure_of(like), tags)
        # Tracing shows errors here, and not in a later call.
        operator.out_structure()
    return operator


def as_frozenset(tags: Any) -> frozenset[object]:
    tags = frozenset(tags if isinstance(tags, tuple | list | set | frozenset) else [tags])
    if any(isinstance(tag, str) for tag in tags):
        raise TypeError(
            f"`tags` must be tags of lineax. Found {sorted(map(str, tags))}. Pass, for "
            "example, `lineax.positive_semidefinite_tag`."
        )
    return tags


def working_dtype(dtype: Any, name: str) -> np.dtype:
    """The dtype of products: that of the entries, floating, and as JAX has it."""
    dtype = np.dtype(dtype).newbyteorder("=")
    if dtype == np.dtype(bool) or jnp.issubdtype(dtype, jnp.integer):
        dtype = np.dtype(float)
    elif jnp.issubdtype(dtype, jnp.inexact):
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            _warn_of_float32()
    else:
        raise TypeError(f"`{name}` must hold numbers. Found dtype {dtype}.")
    return jax.dtypes.canonicalize_dtype(dtype)


# A cache, since Python's own record of warnings is emptied whenever a filter changes.
@ft.cache
def _warn_of_float32() -> None:
    """Say once that entries are rounded."""
    warnings.warn(
        "An operator in float64 or complex128 became one in float32 or complex64, "
        "because JAX's 64-bit mode is off. Turn it on, `jax.config.update("
        "'jax_enable_x64', True)`, or convert the operator yourself. This is said once.",
        stacklevel=2,
    )


def _structure_of(like: Any) -> PyTree[jax.ShapeDtypeStruct]:
    """The structure of vectors like this example, which may be a shape."""
    shape = like if isinstance(like, tuple) else (like,)
    sizes = tuple(map(plain_integer, shape))
    if all(type(size) is int for size in sizes):
        like = jax.ShapeDtypeStruct(sizes, jax.dtypes.canonicalize_dtype(float))

    def struct(leaf):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise TypeError(
                "`like` must be an array, a shape, or a PyTree of arrays. Found a leaf "
                f"of type {type_name(leaf)}. Leave out what is no array, for example by "
                "`equinox.filter(like, equinox.is_inexact_array)`."
            )
        return jax.ShapeDtypeStruct(leaf.shape, working_dtype(leaf.dtype, "like"))

    return jax.tree.map(struct, like)


def type_name(x: Any) -> str:
    """The name of the type of `x`, with its module, since other libraries have classes
    with the names of those of lineax."""
    kind = type(x)
    plain = kind.__module__ == "builtins" or eqx.is_array_like(x)
    return kind.__name__ if plain else f"{kind.__module__}.{kind.__qualname__}"


def _describe(x: Any) -> str:
    if isinstance(x, np.ndarray | jax.Array):
        return f"an array of shape {x.shape}"
    return f"an object of type {type_name(x)}"


def _how_to_convert(x: Any) -> str:
    """How to pass an object that is no operator, for error messages."""
    if isinstance(x, np.ndarray | jax.Array):
        return "For several matrices use `jax.vmap`; a vector is no operator."
    if isinstance(x, list | tuple):
        return "Convert a list to an array, `jnp.asarray(matrix)`."
    if callable(x):
        return (
            "Pass a function `v -> A v` as `traceax.as_operator(function, like)`, where "
            "`like` is an example of the vector v, or its shape."
        )
    return (
        "Pass an array, a sparse matrix of SciPy or JAX (BCOO, BCSR), a `lineax` "
        "operator, or what `traceax.as_operator` converts."
    )
