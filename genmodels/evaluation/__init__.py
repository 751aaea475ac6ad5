"""One evaluation for every family: likelihoods, proofs, comparison, reports."""
