// Who reaches whom under NetworkPolicies, with no cluster: namespaces, pods and policies come on stdin as the API
// server's JSON together with the connections asked about, the verdicts go out as an array in the same order:
//
//	{"namespaces": [...], "pods": [...], "networkPolicies": [...],
//	 "connections": [{"from": "team-a/client", "to": "203.0.113.7", "port": 443, "protocol": "TCP"}]}
//	[{"allowed": false, "deniedBy": ["egress of team-a/client"]}]
//
// A pod is written namespace/name, everything else is its address. The verdicts are those of Cyclonus, the engine
// that SIG Network's Policy Assistant grew out of. kube-network-policies exports no evaluation before v0.9, and
// later versions need a newer Go than 1.24.0. Two things are added here: a pod's own node reaches it whatever the
// policies say, as the API says, and the port that is connected to has the name that the pod gives it.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/netip"
	"os"
	"strings"

	"github.com/mattfenwick/cyclonus/pkg/matcher"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	kubejson "sigs.k8s.io/json"
)

type question struct {
	Namespaces      []corev1.Namespace            `json:"namespaces"`
	Pods            []corev1.Pod                  `json:"pods"`
	NetworkPolicies []*networkingv1.NetworkPolicy `json:"networkPolicies"`
	Connections     []connection                  `json:"connections"`
}

type connection struct {
	From     string          `json:"from"`
	To       string          `json:"to"`
	Port     int32           `json:"port"`
	Protocol corev1.Protocol `json:"protocol"`
}

type verdict struct {
	Allowed  bool     `json:"allowed"`
	DeniedBy []string `json:"deniedBy,omitempty"`
}

// One end of a connection: a pod at its address, or an address outside the cluster.
type end struct {
	pod  *corev1.Pod
	peer *matcher.TrafficPeer
}

type world struct {
	namespaces map[string]map[string]string
	pods       map[string]*corev1.Pod
	policies   *matcher.Policy
}

func parse(input []byte) (question, error) {
	var asked question
	// The engine takes it for not matching where the label is absent, Kubernetes for matching.
	if bytes.Contains(input, []byte(`"NotIn"`)) {
		return asked, fmt.Errorf("a selector with NotIn cannot be evaluated here")
	}
	// As the API server does, a field that is not known or given twice is refused, not dropped.
	problems, err := kubejson.UnmarshalStrict(input, &asked)
	if err == nil && len(problems) > 0 {
		err = problems[0]
	}
	return asked, err
}

func newWorld(asked question) *world {
	made := &world{
		namespaces: map[string]map[string]string{},
		pods:       map[string]*corev1.Pod{},
		policies:   matcher.BuildNetworkPolicies(false, asked.NetworkPolicies),
	}
	for _, namespace := range asked.Namespaces {
		made.namespaces[namespace.Name] = namespace.Labels
	}
	for i := range asked.Pods {
		pod := &asked.Pods[i]
		made.pods[pod.Namespace+"/"+pod.Name] = pod
	}
	return made
}

// A misspelt name must not become an address that no policy restricts.
func (w *world) end(name string) (end, error) {
	if !strings.Contains(name, "/") {
		_, err := netip.ParseAddr(name)
		return end{peer: &matcher.TrafficPeer{IP: name}}, err
	}
	pod, found := w.pods[name]
	if !found {
		return end{}, fmt.Errorf("there is no pod %s", name)
	}
	labels, found := w.namespaces[pod.Namespace]
	if !found {
		return end{}, fmt.Errorf("there is no namespace %s", pod.Namespace)
	}
	internal := &matcher.InternalPeer{Namespace: pod.Namespace, NamespaceLabels: labels, PodLabels: pod.Labels}
	return end{pod, &matcher.TrafficPeer{Internal: internal, IP: pod.Status.PodIP}}, nil
}

func (w *world) judge(asked connection) (verdict, error) {
	from, err := w.end(asked.From)
	if err != nil {
		return verdict{}, err
	}
	to, err := w.end(asked.To)
	if err != nil {
		return verdict{}, err
	}
	result := w.policies.IsTrafficAllowed(&matcher.Traffic{
		Source:           from.peer,
		Destination:      to.peer,
		ResolvedPort:     int(asked.Port),
		ResolvedPortName: portName(to.pod, asked),
		Protocol:         asked.Protocol,
	})
	var denied []string
	if !result.Egress.IsAllowed() {
		denied = append(denied, "egress of "+asked.From)
	}
	if !result.Ingress.IsAllowed() && from.peer.IP != to.pod.Status.HostIP { // only a pod denies
		denied = append(denied, "ingress of "+asked.To)
	}
	return verdict{Allowed: len(denied) == 0, DeniedBy: denied}, nil
}

func portName(pod *corev1.Pod, asked connection) string {
	if pod == nil {
		return ""
	}
	for _, container := range pod.Spec.Containers {
		for _, port := range container.Ports {
			if port.ContainerPort == asked.Port && port.Protocol == asked.Protocol {
				return port.Name
			}
		}
	}
	return ""
}

func run() error {
	input, err := io.ReadAll(os.Stdin)
	if err != nil {
		return err
	}
	asked, err := parse(input)
	if err != nil {
		return err
	}
	world := newWorld(asked)
	verdicts := make([]verdict, 0, len(asked.Connections))
	for _, connection := range asked.Connections {
		said, err := world.judge(connection)
		if err != nil {
			return err
		}
		verdicts = append(verdicts, said)
	}
	return json.NewEncoder(os.Stdout).Encode(verdicts)
}

func main() {
	log.SetFlags(0)
	if err := run(); err != nil {
		log.Fatal("reachability: ", err)
	}
}
