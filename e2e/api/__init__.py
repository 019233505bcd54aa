"""The API on a real API server (etcd and kube-apiserver, nothing else): schema, rules, defaults, children."""
