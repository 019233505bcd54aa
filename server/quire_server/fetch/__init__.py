"""`quire-server fetch`: brings a model from where it is published into a directory, whole and checked.

A program of its own, started by the operator's download Job and by people; no server imports it. One room
moves bytes (`transfer`), whatever the source; a source only lists files and reads them from an offset.
"""
