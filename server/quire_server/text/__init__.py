"""Text and token ids: tokenizer, incremental detokenizer, chat templates, grammars of structured output. No
torch.
"""
