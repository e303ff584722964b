"""Does it do the right thing: tokens, order, invariants, budgets. No time is judged here."""
