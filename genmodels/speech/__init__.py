"""Speech as a plain library: mels, text, alignment, durations, the density of Glow-TTS, sound from mels."""
