"""The building blocks of models; the only bridge to the kernels."""
