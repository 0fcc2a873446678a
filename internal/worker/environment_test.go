package worker

import "testing"

// The host's own variables may have a password, such as the broker's URL.
func TestWorkersLackHostVariables(t *testing.T) {
	t.Setenv("STAGEMESH_NATS", "nats://user:secret@b")
	t.Setenv("HARMLESS", "yes")
	env := Settings{Env: map[string]string{"OWN": "1"}, Replicas: []Replica{{}}}.environment(0)
	if _, there := env["STAGEMESH_NATS"]; there || env["HARMLESS"] != "yes" || env["OWN"] != "1" {
		t.Errorf("got %v", env)
	}
}
