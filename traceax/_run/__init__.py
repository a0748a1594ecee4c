"""From a task to its answer: compiling, budgets, loops, devices, derivatives."""
