"""Measures models on a text: perplexity of a quantised model, acceptance rate of a draft model."""
