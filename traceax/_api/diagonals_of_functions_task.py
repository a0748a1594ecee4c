"""Diagonals of several functions of an operator, from the same Lanczos runs.

A run from a probe v gives `f_1(A) v, ..., f_p(A) v` (`_functions/actions.py`), from which
the diagonals are read as from p operators that are applied to the same probes. What is
said of the error of each of them is what `DiagonalOfFunction` says of one.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PRNGKeyArray

from .._core.flat import FlatOperator, freeze
from .._core.joint import join, OfImages
from .._core.quantity import Diagonal
from .._core.results import first_failure
from .._core.sampler import draw_for
from .._core.samplers import RademacherSampler
from .._core.solution import Estimate
from .._estimators.streaming import AbstractStreamingEstimator
from .._functions.action import Action
from .._functions.actions import Actions
from .._functions.matrix_diagonal import exact_diagonal_of_function, factorise
from .._functions.products import PreconditionedAction
from .._krylov.lanczos import Lanczos
from .._operators.door import Facts
from .._quadrature.domain import is_complex_on_reals
from .._quadrature.function_tree import FunctionTree
from .._run.budget import Budget
from .._run.execution import AbstractExecution
from .._run.solve import AbstractTask
from .._run.steps import AdaptiveSteps, choose_steps, exact_limit, Steps
from .diagonal_of_function_task import DiagonalOfFunction, HIDDEN


class DiagonalsOfFunctions(AbstractTask):
    """The diagonals of the functions of a tree, by an estimator with independent samples.

    - `quantity`: a diagonal for each function.
    """

    estimator: AbstractStreamingEstimator
    quantity: OfImages
    function: FunctionTree
    num_steps: int | AdaptiveSteps

    @classmethod
    def of(
        cls,
        estimator: AbstractStreamingEstimator,
        diagonal: Diagonal,
        function: FunctionTree,
        num_steps: int | AdaptiveSteps,
        size: int,
    ) -> "DiagonalsOfFunctions":
        """The task for an operator of this size, whose diagonal is `diagonal`."""
        count = len(function.members)
        shapes = ((size,),) * count
        quantity = OfImages((diagonal,) * count, function.treedef, shapes)
        return cls(
            estimator=estimator,
            quantity=quantity,
            function=function,
            num_steps=num_steps,
        )

    @property
    def name(self) -> str:
        return self.estimator.name

    @property
    def title(self) -> str:
        return f"Diagonals of {self.function.title}"

    @property
    def min_matvecs(self) -> int:
        return self.estimator.smallest_budget

    @property
    def fallback(self) -> str:
        return self.estimator.fallback

    @property
    def chooses_steps(self) -> bool:
        return isinstance(self.num_steps, AdaptiveSteps)

    def exact_limit(self, operator: FlatOperator) -> int:
        return exact_limit()

    def default_max_k(self, operator: FlatOperator, k: Budget) -> int:
        return self.estimator.default_max_k(operator, k)

    @property
    def _members(self) -> list[DiagonalOfFunction]:
        """The task of each function."""
        return [
            DiagonalOfFunction(
                estimator=self.estimator,
                quantity=part,
                function=function,
                num_steps=self.num_steps,
                preconditioner=None,
            )
            for part, function in zip(
                self.quantity.parts, self.function.members, strict=True
            )
        ]

    def exact(
        self, operator: FlatOperator, facts: Facts, execution: AbstractExecution
    ) -> Estimate:
        factorised = factorise(operator, execution)
        estimates = [
            exact_diagonal_of_function(
                operator, function, execution, factorised=factorised
            )
            for function in self.function.members
        ]
        return self._join(estimates[0], estimates)

    def run(
        self,
        operator: FlatOperator,
        k: int | Budget,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> Estimate:
        flat, cost, num_steps = operator, 1, self.num_steps
        if any(is_complex_on_reals(f, flat.dtype) for f in self.function.members):
            flat = flat.complexified
            # Two products with a real operator make one with a complex vector.
            cost = 1 if flat is operator else 2
        probe = draw_for(flat, RademacherSampler(), key, jnp.zeros(1, int))[:, 0]

        def products(steps):
            most = num_steps.most if isinstance(num_steps, AdaptiveSteps) else num_steps
            actions = [Action(flat, f, most, steps) for f in self.function.members]
            return [PreconditionedAction(action, None) for action in actions]

        def choose(adaptive):
            return self._choose_steps(
                adaptive, freeze(products(adaptive.most)), probe, k, execution
            )

        steps, remaining = Steps.resumed(num_steps, choose, k)
        made = jnp.asarray(steps.made) if steps.chosen else steps.made
        chosen = products(made)
        actions = Actions(tuple(product.action for product in chosen))
        of_functions = dataclasses.replace(
            flat, fn=actions, hermitian=False, sign=0, sign_holds=None
        )
        # By position: estimators of users may name these arguments differently.
        estimate = self.estimator.measure(
            self.quantity, of_functions, remaining, key, execution
        )
        # One run more than those of the estimate, from `probe`.
        num_matvecs = (estimate.num_matvecs + 1) * steps.made + steps.spent
        estimate = dataclasses.replace(
            estimate, num_matvecs=cost * num_matvecs, state=steps.state(estimate.state)
        )
        state, made = actions.run(probe)
        zero = jnp.zeros((), flat.dtype)
        estimates = [
            member.with_truncation_error(
                part,
                product=product,
                state=state,
                steps=made,
                probe=probe,
                offset=zero,
                mean_offset=zero,
                k=k,
            )
            for member, part, product in zip(
                self._members, self._split(estimate), chosen, strict=True
            )
        ]
        return self._join(estimate, estimates)

    def _choose_steps(
        self,
        adaptive: AdaptiveSteps,
        products: list[PreconditionedAction],
        probe: Inexact[Array, " n"],
        k: int | Budget,
        execution: AbstractExecution,
    ) -> Int[Array, ""]:
        """The number of steps that the function needs which needs most."""
        flat, constant_k = products[0].action.operator, freeze(k)

        def excess_after(_, state, steps):
            ratios = [
                member.excess(
                    product.look(state, steps, HIDDEN[True]),
                    probe=probe,
                    k=constant_k,
                    mean_offset=jnp.zeros((), flat.dtype),
                    rounding=flat.rounding,
                )
                for member, product in zip(self._members, products, strict=True)
            ]
            return jnp.max(jnp.stack(ratios))

        return choose_steps(
            adaptive,
            krylov=Lanczos(),
            operator=flat,
            probe=probe,
            first=4,  # as for one function
            excess_after=excess_after,
            execution=execution,
        )

    def _split(self, estimate: Estimate) -> list[Estimate]:
        """The estimate of each function."""
        names = ("value", "std_err", "magnitude")
        split = zip(
            *(self.quantity.split(getattr(estimate, name)) for name in names), strict=True
        )
        # The samples and their skewness are those of all functions together.
        return [
            dataclasses.replace(
                estimate,
                samples=None,
                skewness=None,
                **dict(zip(names, arrays, strict=True)),
            )
            for arrays in split
        ]

    def _join(self, whole: Estimate, parts: list[Estimate]) -> Estimate:
        """The estimate of all diagonals, with what the `parts` know of each. Entries of
        `extra` that differ between functions become PyTrees."""
        unresolved = [jnp.broadcast_to(x.unresolved, x.std_err.shape) for x in parts]
        bounds = [x.bounds for x in parts if x.bounds is not None]
        extra = parts[0].extra | {
            name: jax.tree.unflatten(
                self.function.treedef, [part.extra[name] for part in parts]
            )
            for name in ("truncation_error", "gradient_residual")
        }
        return dataclasses.replace(
            whole,
            value=join([part.value for part in parts]),
            std_err=join([part.std_err for part in parts]),
            unresolved=join(unresolved),
            result=first_failure(*(part.result for part in parts)),
            extra=extra,
            bounds=jnp.concatenate(bounds, axis=-1),
        )
