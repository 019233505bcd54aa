"""Policies that choose a replica among candidates. Pure: the clock and chance are passed in."""
