"""How much memory a model takes, and what fits beside it: arithmetic that the operator, the command line and
the docs share.

Pure and of the standard library alone. Knows no Kubernetes, no tensor and no file but through
``__main__``; what is exact and what is estimated is said where it is computed.
"""
