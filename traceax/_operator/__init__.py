"""Functions that make `lineax` operators, or tell something of one."""
