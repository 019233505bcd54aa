"""Quire's images, built from the working tree and pushed to where a cluster pulls from.

`python -m e2e.images build|push` for people, `make up` for everybody. `recipe` says what an image is made of
and how it is called (pure), `tools` drives buildah or docker, `base` says what images start from, by digest,
and makes a Debian where there is no registry.
"""
