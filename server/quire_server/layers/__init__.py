"""The building blocks of models, and the only package of the server that imports the kernels."""
