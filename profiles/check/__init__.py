"""Checks of a run's correctness: tokens, order, invariants and budgets, but no times."""
