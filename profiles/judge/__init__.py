"""Two sides, one verdict: are the tokens the same, did anything change, is B better than A, and may we say so."""
