"""Text to token ids and back: tokenizer, incremental detokenizer, chat template. No torch."""
