"""Attention over the paged KV cache: RoPE and cache write, decode, prefill chunks, verification of drafts."""
