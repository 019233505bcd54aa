"""Everything that is decided without tensors: requests, KV blocks, the scheduler, and its interface to the
model runner. Standard library only.
"""
