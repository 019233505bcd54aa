"""The operator's process against a real API server: etcd and kube-apiserver, no controllers, no kubelet.

The tests write what controllers and a kubelet would write (ReplicaSets, pods, container statuses), so that
every failure can be produced within seconds. The operator has the RBAC of the rendered chart only.
"""
