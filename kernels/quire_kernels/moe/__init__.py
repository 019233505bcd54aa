"""Mixture of experts: routing, grouping of tokens by expert, the grouped matrix product."""
