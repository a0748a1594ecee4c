"""Norms of PyTrees for adaptive budgets that ask for the tolerance part by part."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Real

from .._numerics.dense import two_norm


def each_leaf(tree: PyTree[Array]) -> Real[Array, " leaves"]:
    """The two-norm of each leaf of a PyTree: pass it as `norm` to [`traceax.Adaptive`][]
    to ask for the tolerance of each leaf, and not of all leaves together.

    A relative tolerance is then relative to each leaf, and a leaf near zero may never
    reach it. Pass an `atol` as well, below which errors do not matter.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import traceax as tx

        def loss(params):
            bias = jnp.sum(params["bias"] ** 2)
            return jnp.sum(jnp.cosh(params["weight"])) + 0.01 * bias

        params = {"weight": jnp.ones(200), "bias": jnp.ones(20)}
        operator, key = tx.hessian(loss, params), jax.random.key(0)
        k = tx.Adaptive(rtol=0.05, atol=1e-4, norm=tx.each_leaf)
        solution = tx.leaf_traces(operator, k=k, key=key)
        print(solution.value["bias"], "+-", solution.std_err["bias"])
        ```

    **Arguments:**

    - `tree`: a PyTree of arrays, such as the value of [`traceax.leaf_traces`][].

    **Returns:**

    A real array with one entry for each leaf.

    **Raises:**

    `ValueError` if the tree has no leaves.
    """
    return jnp.stack([two_norm(leaf) for leaf in jax.tree.leaves(tree)])


def each_entry(tree: PyTree[Array]) -> Real[Array, " entries"]:
    """The modulus of each entry of a PyTree: pass it as `norm` to [`traceax.Adaptive`][]
    to ask for the tolerance of each entry.

    The entry that is hardest to estimate decides when a run ends. An entry near zero may
    never reach a relative tolerance: pass an `atol` as well.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import traceax as tx

        x = jax.random.normal(jax.random.key(0), (500, 50))
        k = tx.Adaptive(rtol=0.2, norm=tx.each_entry)
        gram = tx.ggn(lambda w: x @ w, lambda y: jnp.sum(y**2) / 2, jnp.zeros(50))
        solution = tx.diagonal(gram, tx.HutchinsonEstimator(), k=k, key=jax.random.key(1))
        print(jnp.max(jnp.abs(solution.value / jnp.sum(x**2, axis=0) - 1)))
        ```

    **Arguments:**

    - `tree`: a PyTree of arrays, such as the value of [`traceax.diagonal`][].

    **Returns:**

    A real array with as many entries as all leaves together.

    **Raises:**

    `ValueError` if the tree has no leaves.
    """
    return jnp.concatenate([jnp.abs(leaf).ravel() for leaf in jax.tree.leaves(tree)])
