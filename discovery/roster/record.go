package roster

import (
	"fmt"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
)

// hosts is what the records are below.
const hosts = "hosts"

// KeyOf returns where a host's record is.
func KeyOf(stage, host string) discovery.Key { return discovery.KeyOf(hosts, stage, host) }

// ServiceOf returns the service that the hosts of a stage are instances of. The names
// of two meshes and stages may make one: Meta tells their instances apart.
func ServiceOf(mesh, stage string) string { return mesh + "-" + stage }

// Keys of an instance's Meta.
const (
	MetaMesh    = "mesh"
	MetaStage   = "stage"
	MetaVersion = "version"
)

// Instance returns the instance that a host is.
func Instance(r *meshv1.HostRecord) discovery.Instance {
	return discovery.Instance{
		Service: ServiceOf(r.GetMesh(), r.GetStage()), ID: r.GetHost(), Address: r.GetAddress(),
		Meta: map[string]string{MetaMesh: r.GetMesh(), MetaStage: r.GetStage(), MetaVersion: r.GetVersion()},
	}
}

func encode(r *meshv1.HostRecord) ([]byte, error) { return protojson.Marshal(r) }

// decode reads a record. What a newer host says and this does not know it leaves out.
func decode(e discovery.Entry) (*meshv1.HostRecord, error) {
	r := &meshv1.HostRecord{}
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(e.Value, r); err != nil {
		return nil, fmt.Errorf("record %s: %w", e.Key, err)
	}
	if KeyOf(r.GetStage(), r.GetHost()) != e.Key {
		return nil, fmt.Errorf("record %s is of host %s of stage %s", e.Key, r.GetHost(), r.GetStage())
	}
	return r, nil
}

const (
	// A load that changes by less than a quarter, and little is not much either, is
	// not news.
	little     = 4
	littleWait = 10 * time.Millisecond
)

// Differs reports whether somebody who has the one record wants to know of the other.
func Differs(old, now *meshv1.HostRecord) bool {
	if differs(float64(old.GetInFlight()), float64(now.GetInFlight()), little) || differs(float64(old.GetRunning()), float64(now.GetRunning()), little) {
		return true
	}
	if differs(old.GetQueueWait().AsDuration().Seconds(), now.GetQueueWait().AsDuration().Seconds(), littleWait.Seconds()) {
		return true
	}
	now = proto.CloneOf(now)
	now.InFlight, now.Running, now.QueueWait = old.GetInFlight(), old.GetRunning(), old.GetQueueWait()
	return !proto.Equal(old, now)
}

func differs(old, now, little float64) bool {
	if (old == 0) != (now == 0) {
		return true
	}
	change := max(old, now) - min(old, now)
	return change > little && change > max(old, now)/4
}
