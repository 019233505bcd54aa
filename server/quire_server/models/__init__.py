"""Model directories: untrusted files in, a runnable model out."""
