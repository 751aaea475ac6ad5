"""What everything else builds on: batches, likelihoods, keyed random numbers, whole files, errors."""
