"""The operator's own process against a real API server: etcd and kube-apiserver, no controllers, no kubelet.

What a controller or a kubelet would write (a ReplicaSet, a pod, how a container ended) these tests write
themselves, so that every failure can be had at will and in seconds. The operator has the rights of the
rendered chart and no more.
"""
