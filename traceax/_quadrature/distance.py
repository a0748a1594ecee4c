"""Distances between discrete measures on the real line, from their cumulative functions
F and G.

    W_1 = int |F(t) - G(t)| dt

is the Wasserstein distance of order one: the largest difference of the means of a
function whose slope is at most 1 (Villani, Topics in Optimal Transportation, 2003,
section 2.2). Two densities that are smoothed by the same kernel differ by at most W_1
times its largest slope.
"""

import jax.numpy as jnp
from jaxtyping import Array, Real


def wasserstein(
    nodes: Real[Array, " s"],
    weights: Real[Array, " s"],
    other_nodes: Real[Array, " t"],
    other_weights: Real[Array, " t"],
) -> Real[Array, ""]:
    """The Wasserstein distance of two measures, in the units of the nodes."""
    points = jnp.append(nodes, other_nodes)
    order = jnp.argsort(points)
    differences = jnp.cumsum(jnp.append(weights, -other_weights)[order])
    return jnp.sum(jnp.abs(differences[:-1]) * jnp.diff(points[order]))


def sampling_distance(
    nodes: Real[Array, " s"], weights: Real[Array, " s"], n: int, k: int
) -> Real[Array, ""]:
    """About the Wasserstein distance between a spectral measure of n eigenvalues and its
    estimate from k probes: the integral of the standard error of F.

    F(t) is estimated from `z* P z / n` for a projection P of rank n F, whose variance for
    real probes of fixed length is about `2 F (1 - F) / n`. The nodes are ascending."""
    cumulative = jnp.clip(jnp.cumsum(weights), 0, 1)[:-1]
    variance = 2 * cumulative * (1 - cumulative) / (n * k)
    return jnp.sum(jnp.sqrt(variance) * jnp.diff(nodes))
