"""Speed, measured: `make bench`, or one part of it by `make bench ONLY=batching`. Only tests import it."""
