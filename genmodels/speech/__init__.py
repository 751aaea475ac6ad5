"""Speech as a plain library: mel-spectrograms, alignment of texts and frames, durations."""
