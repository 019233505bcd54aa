"""How much memory a model needs, and what fits beside it: arithmetic for the operator, the command line and
the docs.

Pure, standard library only. Knows no Kubernetes and no tensor. Each function says whether it is exact or an
estimate.
"""
