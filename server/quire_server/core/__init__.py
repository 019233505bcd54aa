"""Decisions without tensors: requests, blocks, the scheduler, and the seam to the runner. Standard library
only.
"""
