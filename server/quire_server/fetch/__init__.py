"""``quire-server fetch``: downloads a model from its source into a directory, completely and verified.

A separate program, run by the operator's download Job and by users; no server imports it. A source (``hub``,
``buckets``, ``oci_registry``) lists files and reads them from an offset; ``transfer`` downloads, hashes and
retries, and ``directory`` publishes the result.
"""
