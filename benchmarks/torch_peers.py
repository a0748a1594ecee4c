"""The peers in PyTorch, each as a function `(matrix, seed) -> estimate` of its trace, a
float, so that a device has done its work."""

from collections.abc import Callable

import torch
from curvlinops.trace.epperly2024xtrace import xtrace
from curvlinops.trace.hutchinson import hutchinson_trace
from curvlinops.trace.meyer2020hutch import hutchpp_trace
from skerch.algorithms import hutch, xhutchpp


def seeded(estimate, k):
    def run(matrix, seed):
        torch.manual_seed(seed)
        return float(estimate(matrix, k))

    return run


def skerch_hutchpp(matrix, k, seed):
    """As the docstring of `skerch.algorithms.hutch` says: deflate by a basis."""
    m, generator = k // 3, torch.Generator().manual_seed(seed)
    signs = 2 * torch.randint(0, 2, (len(matrix), m), generator=generator) - 1
    basis, _ = torch.linalg.qr(matrix @ signs.to(matrix))
    settings = {"seed": 1000 * seed, "defl_Q": basis, "return_diag": False}
    rest = hutch(matrix, matrix.device, matrix.dtype, k - 2 * m, **settings)["tr"]
    return float(rest + torch.sum(basis * (matrix.T @ basis)))


def skerch(estimate, matrix, k, seed, **settings):
    settings |= {"seed": 1000 * seed, "return_diag": False}
    return float(estimate(matrix, matrix.device, matrix.dtype, k, **settings)["tr"])


def torch_functions(k: int) -> dict[str, dict[str, Callable]]:
    """By package and name, for a budget of k products. None has a standard error."""
    return {
        "curvlinops": {
            "Hutchinson": seeded(hutchinson_trace, k),
            "Hutch++": seeded(hutchpp_trace, k - k % 3),
            "XTrace": seeded(xtrace, k),
        },
        "skerch": {
            "Hutchinson": lambda a, seed: skerch(hutch, a, k, seed),
            "Hutch++": lambda a, seed: skerch_hutchpp(a, k, seed),
            "XTrace": lambda a, seed: skerch(xhutchpp, a, k // 2, seed),
        },
    }
