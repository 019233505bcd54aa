"""The metrics adapter as a process, against a real kube-apiserver and its aggregator."""
