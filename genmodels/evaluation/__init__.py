"""One evaluation for every family: likelihoods, checks, comparison, reports."""
